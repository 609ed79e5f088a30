"""Wants that wait for their file: who, for which id, until when. Pure: callers pass `now`."""

from __future__ import annotations

from heapq import heappop, heappush


class Parked:
    """Waiting wants; a token is whatever the caller answers by (a connection's number)."""

    def __init__(self) -> None:
        self._by_id: dict[int, list[int]] = {}
        self._of_token: dict[int, int] = {}
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._of_token)

    def park(self, id_: int, token: int, deadline: float) -> None:
        """`token` waits for `id_` until `deadline` at most. A token waits once."""
        self._of_token[token] = id_
        self._by_id.setdefault(id_, []).append(token)
        heappush(self._deadlines, (deadline, token))

    def settle(self, id_: int) -> list[int]:
        """The id reached its end: the tokens to be answered, in the order in which they came."""
        tokens = self._by_id.pop(id_, None)
        if tokens is None:
            return []
        for token in tokens:
            del self._of_token[token]
        return tokens

    def expire(self, now: float) -> list[tuple[int, int]]:
        """Tokens whose deadline has passed, and what they waited for."""
        expired = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][1] not in self._of_token):
            _, token = heappop(self._deadlines)
            if token in self._of_token:
                expired.append((token, self._of_token[token]))
                self.drop(token)
        return expired

    def drop(self, token: int) -> None:
        """The one who waited is gone."""
        id_ = self._of_token.pop(token, None)
        if id_ is None:
            return
        tokens = self._by_id[id_]
        tokens.remove(token)
        if not tokens:
            del self._by_id[id_]

    def waits_for(self, id_: int) -> bool:
        """Whether somebody waits for it."""
        return id_ in self._by_id

    def ids(self) -> list[int]:
        """Ids that somebody waits for."""
        return list(self._by_id)

    def next_deadline(self) -> float | None:
        """When `expire` has work next."""
        while self._deadlines and self._deadlines[0][1] not in self._of_token:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None
