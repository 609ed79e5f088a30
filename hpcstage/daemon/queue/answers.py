"""Answers wants: at once, when their file has reached its final state, or when they have waited long enough.

Owns the wants that wait and the counts of answers; the queue decides what the answer is.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Container

from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.queue.queue import Decision, Queue, Verdict
from hpcstage.daemon.queue.wants import Parked
from hpcstage.protocol.shim import Answer, Reason


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
