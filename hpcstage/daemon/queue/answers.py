"""Answers requests: at once, when their file has reached its final state, or when they have waited long enough.

Owns the requests that wait and the counts of answers; the queue decides what the answer is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from heapq import heappop, heappush

from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import AnswerKind, Decision
from hpcstage.protocol.shim import Answer, Reason


class Answers:
    """Holds the requests that wait and counts the answers. A token is the number of the connection behind which a shim
    waits, for one id at a time; `answer` sends a reply to it."""

    def __init__(self, answer: Callable[[int, Reply], None]) -> None:
        self.want_ready = 0
        """The number of requests that were answered READY."""
        self._answer = answer
        self._by_id: dict[int, list[int]] = {}
        self._of_token: dict[int, int] = {}
        self._deadlines: list[tuple[float, int]] = []

    # ---- replies

    def reply(self, reason: Reason) -> Reply:
        """Returns the reply for a reason: NONE means that the copy is there, any other why the source is to be read."""
        if reason is Reason.NONE:
            self.want_ready += 1
            return Reply(Answer.READY)
        return Reply(Answer.DIRECT, reason)

    def told(self, decision: Decision) -> Reply:
        """Returns the reply for a request that waits no longer; a decision to wait becomes LATER."""
        return self.reply(Reason.NONE if decision.kind is AnswerKind.READY else decision.reason or Reason.LATER)

    # ---- requests that wait

    def park(self, id_: int, token: int, deadline: float) -> None:
        """Lets `token` wait for `id_` until `deadline` at most."""
        self._of_token[token] = id_
        self._by_id.setdefault(id_, []).append(token)
        heappush(self._deadlines, (deadline, token))

    def drop(self, token: int) -> None:
        """Takes out a token whose process is gone."""
        id_ = self._of_token.pop(token, None)
        if id_ is not None:
            self._by_id[id_].remove(token)
            if not self._by_id[id_]:
                del self._by_id[id_]

    def waits_for(self, id_: int) -> bool:
        """Returns whether a request waits for this id."""
        return id_ in self._by_id

    def requested(self, among: Container[int] | None = None) -> list[int]:
        """Returns the ids that requests wait for; with `among` only those of them."""
        return [id_ for id_ in self._by_id if among is None or id_ in among]

    def next_deadline(self) -> float | None:
        """Returns the time at which `expire` has work next; None while no request waits."""
        while self._deadlines and self._deadlines[0][1] not in self._of_token:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    # ---- answers

    def expire(self, now: float) -> list[int]:
        """Sends the requests that have waited long enough to the source. Returns the ids that they waited for."""
        ids = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            token = heappop(self._deadlines)[1]
            ids.append(self._of_token[token])
            self.drop(token)
            self._answer(token, self.reply(Reason.LATER))
        return ids

    def settle(self, id_: int, queue: Queue) -> None:
        """Answers the requests that wait for a file, which has reached its final state."""
        if id_ in self._by_id:
            decision = queue.request(id_, time.monotonic())
            for token in self._taken(id_):
                self._answer(token, self.told(decision))

    def end(self, reason: Reason) -> None:
        """Answers every request that still waits with this reason."""
        for id_ in self.requested():
            for token in self._taken(id_):
                self._answer(token, self.reply(reason))

    def _taken(self, id_: int) -> list[int]:
        """Takes out the tokens that wait for an id, and returns them in the order in which they came."""
        tokens = self._by_id.pop(id_)
        for token in tokens:
            del self._of_token[token]
        return tokens
