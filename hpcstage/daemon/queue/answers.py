"""What wants are told: at once, when their file has come to its end, or when they have waited long enough.

Owns the wants that wait and the counts of answers; the queue decides what is answered.
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
    """`answer` sends a reply to a token."""

    def __init__(self, answer: Callable[[int, Reply], None]) -> None:
        self.counts: Counter[str] = Counter()
        self._answer = answer
        self._parked = Parked()
        self.waits_for = self._parked.waits_for
        self.next_deadline = self._parked.next_deadline
        self.drop = self._parked.drop
        self.park = self._parked.park

    def reply(self, reason: Reason) -> Reply:
        """The copy is there (NONE), or why the source is to be read."""
        if reason is Reason.NONE:
            self.counts["want_ready"] += 1
            return Reply(Answer.READY)
        self.counts["want_direct"] += 1
        return Reply(Answer.DIRECT, reason)

    def told(self, decision: Decision) -> Reply:
        """What the queue decided, to somebody who waits no longer."""
        return self.reply(Reason.NONE if decision.verdict is Verdict.READY else decision.reason or Reason.LATER)

    def expire(self, now: float) -> list[int]:
        """Who has waited long enough reads the source. Gives what they waited for."""
        expired = self._parked.expire(now)
        for token, _ in expired:
            self._answer(token, self.reply(Reason.LATER))
        return [id_ for _, id_ in expired]

    def settle(self, id_: int, queue: Queue) -> None:
        """A file has come to its end."""
        tokens = self._parked.settle(id_)
        if not tokens:
            return
        decision = queue.want(id_, time.monotonic())
        for token in tokens:
            self._answer(token, self.told(decision))

    def wanted(self, among: Container[int] | None = None) -> Collection[int]:
        """What somebody waits for, of all or of some."""
        return [id_ for id_ in self._parked.ids() if among is None or id_ in among]

    def end(self, reason: Reason) -> None:
        """Nobody is left waiting."""
        for id_ in self._parked.ids():
            for token in self._parked.settle(id_):
                self._answer(token, self.reply(reason))
