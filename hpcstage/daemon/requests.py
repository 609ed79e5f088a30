"""Answers the requests of programs, and those who wait until all is staged.

Owns who waits for the end of the staging. `queue.answers` owns the requests that wait.
"""

from __future__ import annotations

import time
from collections.abc import Container

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.peers.peers import Peers
from hpcstage.daemon.peers.sharing import Neighbours
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.queue.rates import AnswerKind
from hpcstage.daemon.queue.states import FINAL, FileState
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Message, Service
from hpcstage.daemon.usefulness import Usefulness
from hpcstage.protocol.shim import Answer, Kind, Reason


class Requests(Service):
    """Owns who waits for the end of the staging, and answers all who wait."""

    kinds = frozenset({Kind.REQUEST, Kind.STAGED})

    def __init__(
        self, base: Resources, engine: Engine, peers: Peers, sharing: Neighbours, usefulness: Usefulness
    ) -> None:
        self._answers = base.answers
        self._answer = base.answer
        self._engine = engine
        self._peers = peers
        self._sharing = sharing
        self._usefulness = usefulness
        self._waiting_for_staged: list[int] = []
        self._is_settled = False
        """Whether all was staged once that comes without a request."""
        self._closed_seen = Reason.NONE

    @property
    def are_waiting_for_staged(self) -> bool:
        """Whether somebody waits until all is staged."""
        return bool(self._waiting_for_staged)

    def handle(self, message: Message) -> Reply | None:
        """See Service."""
        if message.kind is Kind.REQUEST:
            return self._request(message.token, message.payload, time.monotonic())
        if self._is_settled or self._engine.queue.settled:
            return Reply(Answer.DONE, keep=True)
        self._waiting_for_staged.append(message.token)
        return None

    def _request(self, token: int, path: bytes, now: float) -> Reply | None:
        """Returns the answer to a request, or None if it comes later: when the copy is there or has taken too long."""
        engine, answers = self._engine, self._answers
        id_ = engine.manifest.find_source(path)
        if id_ is None:
            return answers.reply(Reason.UNKNOWN)
        self._usefulness.served(now)
        decision = engine.queue.request(id_, now)
        if decision.kind is not AnswerKind.WAIT:
            self.yield_to_programs(now)
            return answers.told(decision)
        answers.park(id_, token, decision.deadline)
        if engine.queue.states.of(id_) is FileState.FLYING:
            engine.pool.hurry(id_)
        else:
            engine.pump(now)
            self._peers.pump(now)
        self.yield_to_programs(now)
        return None

    def dropped(self, token: int) -> None:
        """See Service."""
        self._answers.drop(token)
        if token in self._waiting_for_staged:
            self._waiting_for_staged.remove(token)

    def yield_to_programs(self, now: float) -> None:
        """Defers the copies of files that programs read at the source, here and in a group on other nodes."""
        self._engine.follow(now)
        self._sharing.reading(now)

    def look(self, now: float) -> None:
        """Answers the requests that have waited long enough, and those whose files will not be copied any more."""
        for id_ in self._answers.expire(now):
            self._peers.timed_out(id_, now)
        states = self._engine.queue.states
        if states.closed is not self._closed_seen:
            self._closed_seen = states.closed
            for id_ in self._answers.requested():
                if states.of(id_) in FINAL:
                    self.final(id_)
            self._peers.offers.refused()

    def final(self, id_: int) -> None:
        """Answers all who wait for a file, which has reached its final state."""
        self._peers.offers.final(id_)
        self._answers.settle(id_, self._engine.queue)

    def voided(self, ids: Container[int]) -> None:
        """Answers all who wait for files that were written to."""
        for id_ in self._answers.requested(ids):
            self.final(id_)
        self._peers.offers.voided(ids)

    def staged(self, *, is_settled: bool) -> None:
        """Answers those who wait until all is staged. `is_settled` says that those who come later need not wait."""
        self._is_settled = self._is_settled or is_settled
        for token in self._waiting_for_staged:
            self._answer(token, Reply(Answer.DONE, keep=True))
        self._waiting_for_staged.clear()
