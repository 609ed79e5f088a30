"""Voids the copies of files that are written to: by programs with the shim, by others, and on other nodes.

Once a write was answered, no stale copy of its file is visible, or ever will be, on any node of the group.
`copying.writes` finds and drops the copies; this module takes the reports of writes, tells all who wait for the files,
and answers when the other nodes have confirmed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable

from hpcstage.daemon.copying.changes import Changes, unnoticed
from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.inodes import Inodes
from hpcstage.daemon.copying.writes import Writes
from hpcstage.daemon.inbox import Item
from hpcstage.daemon.peers.sharing import Neighbours
from hpcstage.daemon.process.server import Reply
from hpcstage.daemon.requests import Requests
from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Message, Service
from hpcstage.problem import Problem
from hpcstage.protocol import exchange
from hpcstage.protocol.shim import LANDED, Answer, Kind

CONFIRM_S = 2.5
"""The longest that a write waits for other nodes: longer than they take to confirm, or the exchange to end the group
after which they serve nothing; less than the shim waits."""


class Voiding(Service):
    """Takes all reports of writes. It calls `pump` when space may have become free."""

    kinds = frozenset({Kind.WROTE, Kind.LANDED})

    def __init__(
        self,
        base: Resources,
        engine: Engine,
        inodes: Inodes,
        requests: Requests,
        sharing: Neighbours,
        pump: Callable[[], None],
    ) -> None:
        self._base = base
        self._engine = engine
        self._requests = requests
        self._sharing = sharing
        self._pump = pump
        self._unconfirmed: dict[int, tuple[int, float, bytes]] = {}
        """By the token of a write: what the other nodes are to confirm, until when, and what is written to."""
        self._writes = Writes(base.helpers, engine, inodes, self._voided)
        self._changes = Changes(
            base.helpers, base.selector, engine.manifest, engine.queue, self._changed, self._moved, self._unseen
        )

    def begin(self, writes: Iterable[Item]) -> None:
        """Voids what was written to before there was a manifest."""
        self._writes.void_early()
        for write in writes:
            if isinstance(write, Message):
                self._void(write)
            elif isinstance(write, exchange.Written):
                self._void_elsewhere(write.ids)

    def handle(self, message: Message) -> Reply | None:
        """See Service."""
        self._void(message)
        self._pump()
        if self._sharing.told <= self._sharing.confirmed:
            return Reply(Answer.DONE)
        self._unconfirmed[message.token] = self._sharing.told, time.monotonic() + CONFIRM_S, _path(message)
        return None

    def dropped(self, token: int) -> None:
        """See Service."""
        self._unconfirmed.pop(token, None)

    def work(self, now: float) -> None:
        """See Service. Answers the writes that the other nodes have confirmed, and those that have waited too long."""
        self._changes.look(now)
        for token, (told, until, path) in list(self._unconfirmed.items()):
            if told <= self._sharing.confirmed or now >= until:
                del self._unconfirmed[token]
                self._base.answer(token, Reply(Answer.DONE))
                if told > self._sharing.confirmed:
                    self._sharing.unconfirmed(path)

    def wake_after(self, now: float) -> float | None:
        """See Service."""
        return min((max(0.0, until - now) for _, until, _ in self._unconfirmed.values()), default=None)

    def drain(self) -> tuple[str, ...]:
        """See Service."""
        for token in self._unconfirmed:
            self._base.answer(token, Reply(Answer.DONE))
        return ()

    def elsewhere(self, ids: Collection[int]) -> None:
        """Voids files that programs of other nodes write to."""
        self._void_elsewhere(ids)
        self._pump()

    def _void(self, message: Message) -> None:
        landed = None
        if message.kind is Kind.LANDED:
            device, inode = LANDED.unpack_from(message.payload)
            landed = device, inode
        self._writes.void(_path(message), landed)

    def _void_elsewhere(self, ids: Collection[int]) -> None:
        known = [id_ for id_ in ids if id_ < len(self._engine.manifest)]
        self._engine.void(known)
        self._requests.voided(frozenset(known))

    def _voided(self, ids: Collection[int]) -> None:
        self._requests.voided(ids)
        self._sharing.written(ids)

    def _changed(self, path: bytes) -> None:
        """Voids what a program without the shim changed."""
        self._writes.void(path)
        self._pump()

    def _moved(self, root: bytes) -> None:
        """Voids a dataset of which somebody put another one in the place, or took it away."""
        self._changed(root)
        text = f"{os.fsdecode(root)}, or a directory or link above it, was renamed or replaced while the command ran"
        remedy = f"programs on {self._base.spec.host} read from then on what has the name; start a new run to stage it"
        self._base.problems.append(Problem("dataset-replaced", text, remedy))

    def _unseen(self, what: str) -> None:
        self._base.problems.append(unnoticed(self._base.spec.host, what))


def _path(message: Message) -> bytes:
    return message.payload[LANDED.size :] if message.kind is Kind.LANDED else message.payload
