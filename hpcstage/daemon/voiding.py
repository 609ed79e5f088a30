"""Voids the copies of files that are written to: by programs with the shim, by others, and on other nodes.

Once a write was answered, no stale copy of its file is visible, or ever will be. `copying.writes` finds and drops the
copies; this module takes the reports of writes and tells all who wait for the files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from hpcstage.daemon.copying.changes import Changes
from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.inodes import Inodes
from hpcstage.daemon.copying.writes import Writes
from hpcstage.daemon.inbox import Item
from hpcstage.daemon.peers.sharing import Neighbours
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Request, Service
from hpcstage.daemon.wants import Wants
from hpcstage.problem import Problem
from hpcstage.protocol import exchange
from hpcstage.protocol.shim import LANDED, Answer, Kind


class Voiding(Service):
    """Takes all reports of writes. It calls `pump` when space may have become free."""

    kinds = frozenset({Kind.WROTE, Kind.LANDED})

    def __init__(
        self,
        base: Resources,
        engine: Engine,
        inodes: Inodes,
        wants: Wants,
        sharing: Neighbours,
        pump: Callable[[], None],
    ) -> None:
        self._base = base
        self._engine = engine
        self._wants = wants
        self._sharing = sharing
        self._pump = pump
        self._writes = Writes(base.helpers, engine, inodes, self._voided)
        self._changes = Changes(base.helpers, base.selector, engine.manifest, engine.queue, self._changed, self._unseen)

    def begin(self, writes: Iterable[Item]) -> None:
        """Voids what was written to before there was a manifest."""
        self._writes.void_early()
        for write in writes:
            if isinstance(write, Request):
                self._void(write)
            elif isinstance(write, exchange.Written):
                self._void_elsewhere(write.ids)

    def request(self, request: Request) -> Reply:
        """See Service."""
        self._void(request)
        self._pump()
        return Reply(Answer.DONE)

    def elsewhere(self, ids: Collection[int]) -> None:
        """Voids files that programs of other nodes write to."""
        self._void_elsewhere(ids)
        self._pump()

    def _void(self, request: Request) -> None:
        landed = None
        if request.kind is Kind.LANDED:
            device, inode = LANDED.unpack_from(request.payload)
            landed = device, inode
        self._writes.void(request.payload if landed is None else request.payload[LANDED.size :], landed)

    def _void_elsewhere(self, ids: Collection[int]) -> None:
        known = [id_ for id_ in ids if id_ < len(self._engine.manifest)]
        self._engine.void(known)
        self._wants.voided(frozenset(known))

    def _voided(self, ids: Collection[int]) -> None:
        self._wants.voided(ids)
        self._sharing.written(ids)

    def _changed(self, path: bytes) -> None:
        """Voids what a program without the shim changed."""
        self._writes.void(path)
        self._pump()

    def _unseen(self, what: str) -> None:
        text = f"on {self._base.spec.host}, changes by programs without hpcstage are not noticed in {what}"
        remedy = "if such programs write to the datasets during the job, use --mode direct"
        self._base.problems.append(Problem("changes-unseen", text, remedy))
