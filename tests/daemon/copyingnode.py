"""One node's engine with a real copier, and what a program sees of what arrives there."""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable
from pathlib import Path

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.rates import Limits
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.scan import scan
from hpcstage.protocol import arriving as wire
from hpcstage.protocol.arriving import StripeState
from hpcstage.store.copier import CopierSettings
from hpcstage.store.pool import CopierPool
from hpcstage.store.storedir import Store


class Row:
    """What a program sees of a row."""

    def __init__(self, node_dir: Path, row: int) -> None:
        data = (node_dir / wire.ARRIVING_FILE).read_bytes()
        assert len(data) == wire.ARRIVING_BYTES
        assert wire.ARRIVING_HEADER.unpack_from(data) == (wire.ARRIVING_MAGIC, wire.ARRIVING_ROWS, wire.ROW_STRIPES)
        (granted,) = struct.unpack_from("<I", data, wire.GRANTED_OFFSET + 4 * row)
        (self.shown,) = struct.unpack_from("<I", data, wire.SHOWN_OFFSET + 4 * row)
        self.holds = granted != 0 and granted == self.shown
        start = wire.ARRIVING_HEADER_BYTES + row * wire.ARRIVING_ROW_BYTES
        values = wire.ARRIVING_ROW.unpack_from(data, start)
        self.device, self.inode, self.size, self.mtime, self.ctime, self.id, self.stripe_bytes, _ = values
        name = data[start + wire.NAME_OFFSET : start + wire.NAME_OFFSET + wire.ARRIVING_NAME_BYTES]
        self.incoming = node_dir / os.fsdecode(name.partition(b"\0")[0])
        stripes = wire.STRIPES_OFFSET + row * wire.ROW_STRIPES
        self.stripes = list(data[stripes : stripes + -(-self.size // max(self.stripe_bytes, 1))])

    @property
    def arrived(self) -> list[int]:
        return [number for number, state in enumerate(self.stripes) if state == StripeState.ARRIVED]


class CopyingNode:
    """The engine with one real copier, and files of random bytes, named by their numbers."""

    def __init__(
        self,
        tmp_path: Path,
        node_dir: Path,
        size_bytes: int,
        limits: Limits,
        *,
        rate: float | None = None,
        files: int = 1,
    ) -> None:
        """`rate`: the most bytes per second that the copier reads."""
        self.source = tmp_path / "data" / "0"
        self.source.parent.mkdir()
        for number in range(files):
            (self.source.parent / str(number)).write_bytes(os.urandom(size_bytes))
        self.node_dir = node_dir
        self.manifest: Manifest = scan(resolve([os.fspath(self.source.parent)], Path("/"))).manifest
        store = Store(node_dir)
        store.make()
        self.manifest.save(node_dir / "manifest.bin")
        self.pool = CopierPool(CopierSettings(node_dir, node_dir / "manifest.bin", 4, rate), 1)
        self.queue = Queue(self.manifest.sizes, limits)
        self.pool.open_manifest()
        self.engine = Engine(self.manifest, self.queue, self.pool, store)

    def until(self, condition: Callable[[], bool]) -> None:
        """Runs the engine until then."""
        deadline = time.monotonic() + 30
        self.engine.pump(time.monotonic())
        while not condition():
            assert time.monotonic() < deadline
            readable, _, _ = select.select(self.pool.fds(), [], [], 0.01)
            for fd in readable:
                self.engine.receive(fd, time.monotonic())
            self.engine.pump(time.monotonic())

    def row(self) -> Row:
        return Row(self.node_dir, 0)
