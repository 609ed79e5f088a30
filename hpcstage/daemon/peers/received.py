"""Takes in the copies that come from other nodes, and counts what was passed on between nodes.

Owns the counts. The exchange has written such a copy into the store under its final name when it says that it came.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.queue.states import FileState
from hpcstage.protocol import exchange
from hpcstage.store.copierpipe import Result
from hpcstage.store.copyfile import Status


@dataclass
class PeerCounts:
    """Counts of what came from other nodes and went to them."""

    peer_files: int = 0
    peer_bytes: int = 0
    sent_bytes: int = 0


class Received:
    """Owns the counts of copies that nodes passed on."""

    def __init__(self, engine: Engine) -> None:
        self._counts = PeerCounts()
        self._engine = engine
        self._queue = engine.queue

    @property
    def counts(self) -> PeerCounts:
        """The counts until now, with what copiers got from other nodes of files of which they read the rest."""
        return replace(self._counts, peer_bytes=self._counts.peer_bytes + self._engine.pool.stats.received)

    def got(self, message: exchange.Got, now: float) -> None:
        """Takes in a copy that has come."""
        result = Result(
            message.id,
            Status.OK,
            size_bytes=message.size_bytes,
            mtime_ns=message.mtime_ns,
        )
        self._received(result, now)

    def take_if_here(self, id_: int, now: float) -> bool:
        """Takes in a copy that is in the store although no message said so. Returns whether it is."""
        status = self._engine.copies.status(id_)
        if status is None:
            return False
        result = Result(id_, Status.OK, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)
        self._received(result, now)
        return True

    def _received(self, result: Result, now: float) -> None:
        engine = self._engine
        engine.tombstones.lift(result.id)
        is_needed = engine.stored(result, now) if result.id in self._queue.flights.asked else self._late(result)
        engine.tombstones.settle(result.id)
        engine.hooks.final(result.id)
        if is_needed:
            self._counts.peer_files += 1
            self._counts.peer_bytes += result.size_bytes

    def _late(self, result: Result) -> bool:
        """Takes in a copy whose peer request was given up. A transfer that is in flight finds it. Returns False if it
        is not needed."""
        copies = self._engine.copies
        if self._queue.states.of(result.id) in (FileState.STORED, FileState.FLYING):
            return False
        if self._queue.came_late(result.id, result.size_bytes):
            copies.add(result.id, result.size_bytes, stays=self._queue.states.keeps(result.id))
            return True
        copies.delete(result.id)
        return False

    def failed(self, id_: int) -> None:
        """Notes that a copy will not come from another node."""
        self._engine.tombstones.lift(id_)
        self._engine.tombstones.settle(id_)

    def deferred_by_peer(self, id_: int, now: float) -> None:
        """Defers a large file that no other node sends as long as a program reads it at the source."""
        self.failed(id_)
        self._queue.deferred_by_peer(id_, now)
        self._engine.hooks.final(id_)

    def sent(self, message: exchange.Sent) -> None:
        """Counts bytes that the exchange has sent to another node."""
        self._counts.sent_bytes += message.size_bytes
