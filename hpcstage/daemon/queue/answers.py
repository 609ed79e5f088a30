"""Answers wants: at once, when their file has reached its final state, or when they have waited long enough.

Owns the wants that wait and the counts of answers; the queue decides what the answer is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Container
from heapq import heappop, heappush

from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Decision, Verdict
from hpcstage.protocol.shim import Answer, Reason


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


class Answers:
    """Holds the wants that wait and counts the answers. `answer` sends a reply to the shim behind a token."""

    def __init__(self, answer: Callable[[int, Reply], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._answer = answer
        self._parked = Parked()
        self.waits_for = self._parked.waits_for
        self.next_deadline = self._parked.next_deadline
        self.drop = self._parked.drop
        self.park = self._parked.park

    def reply(self, reason: Reason) -> Reply:
        """Returns the reply for a reason: NONE means that the copy is there, any other why the source is to be read."""
        if reason is Reason.NONE:
            self.counts["want_ready"] += 1
            return Reply(Answer.READY)
        self.counts["want_direct"] += 1
        return Reply(Answer.DIRECT, reason)

    def told(self, decision: Decision) -> Reply:
        """Returns the reply for a want that waits no longer; a decision to wait becomes LATER."""
        return self.reply(Reason.NONE if decision.verdict is Verdict.READY else decision.reason or Reason.LATER)

    def expire(self, now: float) -> list[int]:
        """Sends the wants that have waited long enough to the source. Returns the ids that they waited for."""
        expired = self._parked.expire(now)
        for token, _ in expired:
            self._answer(token, self.reply(Reason.LATER))
        return [id_ for _, id_ in expired]

    def settle(self, id_: int, queue: Queue) -> None:
        """Answers the wants that wait for a file, which has reached its final state."""
        tokens = self._parked.settle(id_)
        if not tokens:
            return
        decision = queue.want(id_, time.monotonic())
        for token in tokens:
            self._answer(token, self.told(decision))

    def wanted(self, among: Container[int] | None = None) -> Collection[int]:
        """Returns the ids that wants wait for; with `among` only those of them."""
        return [id_ for id_ in self._parked.ids() if among is None or id_ in among]

    def end(self, reason: Reason) -> None:
        """Answers every want that still waits with this reason."""
        for id_ in self._parked.ids():
            for token in self._parked.settle(id_):
                self._answer(token, self.reply(reason))
