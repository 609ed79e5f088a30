"""Holds the wants that wait for their file: by which token, for which id, until when. Pure: callers pass `now`."""

from __future__ import annotations

from heapq import heappop, heappush


class Parked:
    """The waiting wants. A token is what the caller answers by (a connection's number)."""

    def __init__(self) -> None:
        self._by_id: dict[int, list[int]] = {}
        self._of_token: dict[int, int] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._of_token)

    def park(self, id_: int, token: int, deadline: float) -> None:
        """Lets `token` wait for `id_` until `deadline` at most. A token waits for one id at a time."""
        self._of_token[token] = id_
        self._by_id.setdefault(id_, []).append(token)
        heappush(self._deadlines, (deadline, token))

    def settle(self, id_: int) -> list[int]:
        """Takes out the tokens that wait for an id that is in its final state. Returns them in the order in which they
        came."""
        tokens = self._by_id.pop(id_, None)
        if tokens is None:
            return []
        for token in tokens:
            del self._of_token[token]
        return tokens

    def expire(self, now: float) -> list[tuple[int, int]]:
        """Takes out the tokens whose deadline has passed. Returns them with the ids that they waited for."""
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._of_token):
            _, token = heappop(self._deadlines)
            if token in self._of_token:
                expired.append((token, self._of_token[token]))
                self.drop(token)
        return expired

    def drop(self, token: int) -> None:
        """Takes out a token whose process is gone."""
        id_ = self._of_token.pop(token, None)
        if id_ is None:
            return
        tokens = self._by_id[id_]
        tokens.remove(token)
        if not tokens:
            del self._by_id[id_]

    def waits_for(self, id_: int) -> bool:
        """Returns whether a want waits for this id."""
        return id_ in self._by_id

    def ids(self) -> list[int]:
        """Returns the ids that wants wait for."""
        return list(self._by_id)

    def next_deadline(self) -> float | None:
        """Returns the time at which `expire` has work next; None while no want waits."""
        while self._deadlines and self._deadlines[0][1] not in self._of_token:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
