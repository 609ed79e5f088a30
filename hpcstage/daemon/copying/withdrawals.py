"""Gives up transfers that are under way, because the program reads their files itself or copying pauses.

Owns which transfers were given up and begin again later, and whether copying pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.states import FileState
from hpcstage.plan.rule import FileReads
from hpcstage.store.pool import CopierPool


class Withdrawals:
    """Owns the transfers that were given up, and the pause. A transfer that a request waits for is never given up."""

    def __init__(self, queue: Queue, pool: CopierPool, is_requested: Callable[[int], bool]) -> None:
        self.is_paused = False
        """Whether no copy is begun for now."""
        self._queue = queue
        self._pool = pool
        self._is_requested = is_requested
        self._taken_back: set[int] = set()
        """The ids of transfers that were cancelled, though not because the program reads the files."""

    def yield_to_program(self, of: Callable[[int], FileReads], now: float) -> None:
        """Gives up transfers that are not to go on while programs read large files at the source. `of` returns what
        they have read of a file."""
        for id_ in self._queue.large.given_up(of, now):
            if not self._is_requested(id_):
                self._pool.cancel(id_)

    def pause(self) -> None:
        """Begins no more transfers for now, and gives up those under way."""
        self.is_paused = True
        self._take_back(self._queue.flights.needed())

    def _take_back(self, ids: Iterable[int]) -> None:
        for id_ in ids:
            if not self._is_requested(id_):
                self._taken_back.add(id_)
                self._pool.cancel(id_)

    def begins_again(self, id_: int, now: float, on_final: Callable[[int], None]) -> bool:
        """Returns whether a cancelled transfer will be begun again. It calls `on_final` with an id whose requests are
        answered now; a request for a small file goes on waiting."""
        queue, large = self._queue, self._queue.large
        if id_ in self._taken_back and queue.states.of(id_) is FileState.FLYING and not large.reads.has(id_, now):
            queue.source.take_back(id_)
            if large.is_large(id_):
                on_final(id_)
            return True
        if queue.source.defer(id_, now):
            on_final(id_)
            return True
        return False

    def settle(self, id_: int) -> None:
        """Notes that the result of a transfer was handled."""
        self._taken_back.discard(id_)
