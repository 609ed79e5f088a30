"""Answers the nodes that ask this one for files: at once where the answer is known, else when the file is there.

Owns the peer requests of other nodes that wait, and the answers until they are sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator

from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import AnswerKind
from hpcstage.daemon.queue.states import FileState
from hpcstage.protocol import exchange
from hpcstage.protocol.exchange import Why

_WHY: dict[FileState | None, Why] = {
    FileState.STORED: Why.NONE,
    FileState.VOID: Why.VOID,
    FileState.FAILED: Why.FAILED,
    FileState.REFUSED: Why.FULL,
}


class Offers:
    """Owns the waiting peer requests and the answers. `fetcher` returns the node that fetches an id from the source;
    None where that is not known. Ids from `files` on are unknown here."""

    def __init__(self, queue: Queue, files: int, fetcher: Callable[[int], int | None]) -> None:
        self._queue = queue
        self._files = files
        self._fetcher = fetcher
        self._askers: dict[int, list[int]] = {}
        """By id: the nodes that wait for it."""
        self._answers: dict[tuple[int, Why], list[int]] = {}

    def asked(self, message: exchange.Ask, now: float) -> None:
        """Takes the peer request of another node for files."""
        for id_ in message.ids:
            if id_ >= self._files or self._queue.is_deferred(id_, now):
                self._answer(id_, message.node)
            elif self._queue.asked_for(id_) is AnswerKind.WAIT:
                self._add(id_, message.node)
            else:
                self._answer(id_, message.node)

    def final(self, id_: int) -> None:
        """Answers the nodes that asked for an id, which is in its final state here."""
        for node in self._askers.pop(id_, ()):
            self._answer(id_, node)

    def defer(self, now: float) -> None:
        """Answers the nodes that asked for large files that programs read at the source: they do not wait for them."""
        for id_ in list(self._askers):
            if self._queue.is_deferred(id_, now):
                self.final(id_)

    def voided(self, ids: Container[int]) -> None:
        """Answers the nodes that asked for files that were written to."""
        for id_ in list(self._askers):
            if id_ in ids:
                self.final(id_)

    def refused(self) -> None:
        """Answers the nodes that asked for files that this node will not read, as it reads nothing more."""
        for id_ in list(self._askers):
            if self._queue.asked_for(id_) is AnswerKind.DIRECT:
                self.final(id_)

    def take(self) -> Iterator[exchange.Offer]:
        """Takes out the answers to be sent."""
        answers, self._answers = self._answers, {}
        for (node, why), ids in answers.items():
            yield from exchange.in_messages(exchange.Offer(node, why, tuple(ids)))

    def drop(self, node: int) -> None:
        """Forgets the peer requests of a node that is gone."""
        for id_ in [id_ for id_, nodes in self._askers.items() if node in nodes]:
            self._askers[id_].remove(node)
            if not self._askers[id_]:
                del self._askers[id_]

    def clear(self) -> None:
        """Forgets all peer requests and answers, as the group has ended."""
        self._askers.clear()
        self._answers.clear()

    def _add(self, id_: int, node: int) -> None:
        nodes = self._askers.setdefault(id_, [])
        if node not in nodes:
            nodes.append(node)

    def _answer(self, id_: int, node: int) -> None:
        self._answers.setdefault((node, self._why(id_, node)), []).append(id_)

    def _why(self, id_: int, node: int) -> Why:
        state = self._queue.states.of(id_) if id_ < self._files else None
        if state in _WHY:
            return _WHY[state]
        if state is not None and self._queue.is_deferred(id_, time.monotonic()):
            return Why.LATER
        # Another node reads it: the asking one, or one that it asks later, when it knows as much as this node.
        owns = state is not None and self._fetcher(id_) == node
        return Why.ABSENT if owns else Why.UNKNOWN
