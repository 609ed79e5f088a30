"""Nodes for exchanges to serve: real stores, and the daemon's side of the real link, without a daemon.

Owns node directories, the socket that an exchange connects to, and the simplest daemon there can be: it offers what is
in its store at once, and asks for what it is told to ask for, within the link's credits. Starts the exchanges by
mpiexec, as the lead does.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Dataset, DatasetKind, ManifestEntry
from hpcstage.protocol import exchange
from hpcstage.protocol.exchange import Why
from hpcstage.protocol.exchangespec import GroupSpec
from hpcstage.protocol.membership import GroupNode, Membership
from hpcstage.protocol.shim import MESSAGE
from hpcstage.protocol.shim import Kind as Request
from hpcstage.store.storedir import Store

MPIEXEC = Path(sys.executable).with_name("mpiexec")
REPO = Path(__file__).resolve().parent.parent
_DATASET = "0-data"
_BACKLOG = 16


def manifest_of(
    sizes: Sequence[int], *, links: Sequence[int] = (), mtime_ns: int = 1_600_000_000_123_456_789
) -> Manifest:
    """Files of these sizes in folders of 1,000."""
    dataset = Dataset(_DATASET, DatasetKind.DIRECTORY, b"/nonexistent/data", (), ("/nonexistent/data",))
    entries = [
        ManifestEntry(0, b"%05d/f%07d" % (id_ // 1000, id_), size, mtime_ns + id_, 0o644, 1, id_ + 1, id_ in links)
        for id_, size in enumerate(sizes)
    ]
    return Manifest.build([dataset], entries)


class Node:
    """One node: its directory, its end of the link, and what it knows."""

    def __init__(self, path: Path, index: int, count: int, manifest: Manifest | None) -> None:
        self.path = path
        self.index = index
        self.count = count
        path.mkdir(parents=True)
        Store(path).make()
        self.manifest = manifest
        if manifest is not None:
            manifest.save(path / "manifest.bin")
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(os.fspath(path / "sock"))
        self.listener.listen(_BACKLOG)
        self.connection: socket.socket | None = None
        self.reset()

    def reset(self) -> None:
        """Nothing has been said yet."""
        self._close()
        self.groups: list[Membership] = []
        """The memberships that the exchange has told."""
        self._pieces = exchange.GroupPieces()
        self.handed: list[exchange.PlanFiles] = []
        self.asked: list[exchange.Ask] = []
        self.got: dict[int, exchange.Got] = {}
        self.missed: dict[int, exchange.Missed] = {}
        self.sent_files = self.sent_bytes = 0
        self.closed = False
        self.lost = False
        """The exchange has gone without being told to."""
        self.answers = True
        """Whether asks are answered at once with what is in the store."""
        self._todo: dict[int, deque[int]] = {}
        self._pending: dict[int, int] = {}
        self._pending_files: Counter[int] = Counter()
        self._pending_bytes: dict[int, int] = {}

    def _close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None

    # ---- the store

    def file(self, id_: int) -> Path:
        """Where a staged copy is."""
        assert self.manifest is not None
        return self.path / "store" / os.fsdecode(self.manifest.store_path(id_))

    def stage(self, id_: int, data: bytes) -> None:
        """Puts a copy in place, as if it had been staged."""
        assert self.manifest is not None
        path = self.file(id_)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        entry = self.manifest.entry(id_)
        os.chmod(path, entry.mode)
        os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))

    # ---- the link

    @property
    def is_ready(self) -> bool:
        """The exchange has said that the whole group stands."""
        return bool(self.groups)

    @property
    def outstanding(self) -> int:
        """Ids that were wanted and are not here."""
        return len(self._pending) + sum(map(len, self._todo.values()))

    def accept(self) -> None:
        """The exchange has connected."""
        connection, _ = self.listener.accept()
        connection.settimeout(10.0)
        assert MESSAGE.unpack_from(connection.recv(8192))[1] == Request.PEER
        self.connection = connection
        self.send(exchange.Hello(self.index, 1 << 40, 1 << 20))

    def send(self, message: exchange.Message) -> None:
        """To the exchange."""
        if self.connection is not None and not self.closed:
            try:
                self.connection.send(exchange.pack(message), socket.MSG_NOSIGNAL)
            except OSError:
                self.closed = True

    def ask(self, node: int, ids: Sequence[int]) -> None:
        """Asks for these, as many at a time as the credits allow."""
        self._todo.setdefault(node, deque()).extend(ids)
        self._refill(node)

    def _refill(self, node: int) -> None:
        todo = self._todo.get(node)
        pending_bytes = self._pending_bytes.get(node, 0)
        pending = self._pending_files[node]
        if not todo or pending > exchange.CREDIT_FILES // 2:
            return
        batch: list[int] = []
        assert self.manifest is not None
        while todo and pending + len(batch) < exchange.CREDIT_FILES:
            size = self.manifest.size(todo[0])
            if pending_bytes and pending_bytes + size > exchange.CREDIT_BYTES:
                break
            batch.append(todo.popleft())
            pending_bytes += size
        self._pending.update(dict.fromkeys(batch, node))
        self._pending_files[node] += len(batch)
        self._pending_bytes[node] = pending_bytes
        if batch:
            self.send(exchange.Fetch(node, tuple(batch)))

    def _settle(self, node: int, ids: Sequence[int]) -> None:
        assert self.manifest is not None
        for id_ in ids:
            if self._pending.pop(id_, None) is not None:
                self._pending_files[node] -= 1
                self._pending_bytes[node] -= self.manifest.size(id_)

    def receive(self) -> None:
        """One datagram."""
        assert self.connection is not None
        try:
            data = self.connection.recv(exchange.MAX_MESSAGE_BYTES)
        except OSError:
            data = b""
        if not data:
            self.closed = self.lost = True
            self._close()
            return
        messages = exchange.unpack_all(data)
        for message in messages:
            self._heard(message)
        for node in list(self._todo):
            self._refill(node)

    def _heard(self, message: exchange.Message) -> None:
        if isinstance(message, exchange.Got):
            self.got[message.id] = message
            self._settle(message.node, [message.id])
        elif isinstance(message, exchange.Missed):
            self.missed.update(dict.fromkeys(message.ids, message))
            self._settle(message.node, message.ids)
        elif isinstance(message, exchange.Ask):
            self.asked.append(message)
            if self.answers:
                self.offer(message)
        elif isinstance(message, exchange.Sent):
            self.sent_files += message.files
            self.sent_bytes += message.size_bytes
        elif isinstance(message, exchange.Group):
            found = self._pieces.add(message)
            self.groups += [] if found is None else [found]
        elif isinstance(message, exchange.PlanFiles):
            self.handed.append(message)
            self.manifest = Manifest.open(self.path / "manifest.bin")

    def offer(self, message: exchange.Ask) -> None:
        """Answers an ask with what is in the store."""
        assert self.manifest is not None
        store, path_of = os.fspath(self.path).encode() + b"/store/", self.manifest.store_path
        here = [id_ for id_ in message.ids if os.path.exists(store + path_of(id_))]
        for why, ids in ((Why.NONE, here), (Why.FAILED, sorted(set(message.ids) - set(here)))):
            if ids:
                self.send(exchange.Offer(message.node, why, tuple(ids)))

    def end(self, *, says: bool = True) -> None:
        """As a daemon does at the end of a run, or when it is killed."""
        if says:
            self.send(exchange.End())
        self._close()
        self.closed = True

    def remove(self) -> None:
        """The node directory goes."""
        self.listener.close()
        self._close()
        shutil.rmtree(self.path, ignore_errors=True)


def serve(nodes: Sequence[Node], until: Callable[[], bool], timeout_s: float = 30.0, *, may_lose: bool = False) -> None:
    """Plays the daemons of these nodes until the condition holds. Raises TimeoutError, or ConnectionError if an
    exchange goes that may not."""
    deadline = time.monotonic() + timeout_s
    while not until():
        if not may_lose and any(node.lost for node in nodes):
            raise ConnectionError("an exchange has gone")
        if time.monotonic() > deadline:
            raise TimeoutError(f"not in {timeout_s:g} s: {[(len(n.got), len(n.missed), n.outstanding) for n in nodes]}")
        listeners = {node.listener: node for node in nodes}
        links = {node.connection: node for node in nodes if node.connection is not None and not node.closed}
        readable, _, _ = select.select([*listeners, *links], [], [], 0.05)
        for ready in readable:
            if ready in links:
                links[ready].receive()
            else:
                listeners[ready].accept()


def membership_of(nodes: Sequence[Node], generation: int) -> Membership:
    """These nodes as the lead would name them."""
    entries = [GroupNode("localhost", os.fspath(node.path), os.fspath(node.path / "sock")) for node in nodes]
    return Membership(generation, tuple(entries))


def launch(
    nodes: Sequence[Node],
    directory: Path,
    *,
    generation: int = 0,
    env: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    arguments: Sequence[str] = (),
    log: Path | None = None,
    **times: float,
) -> subprocess.Popen[bytes]:
    """Starts one exchange per node by mpiexec."""
    spec = directory / f"group-{generation}.json"
    GroupSpec(membership_of(nodes, generation), **times).save(spec)
    with open(log or os.devnull, "ab") as output:
        return subprocess.Popen(
            [*before, MPIEXEC, "-n", str(len(nodes)), *arguments, sys.executable, "-m", "hpcstage.exchange", spec],
            env={**os.environ, "PYTHONPATH": os.fspath(REPO), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
