"""A real daemon in a process of its own, and the client's side of its socket."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hpcstage import inotify
from hpcstage.inotify import EventQueue
from hpcstage.node import page
from hpcstage.plan.budget import BudgetAsked, BudgetFacts
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.protocol import shim
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.leadspec import DATASETS
from hpcstage.protocol.membership import Membership
from hpcstage.record.parts.part import NodePart

REPO = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0


def wait_until(condition: Callable[[], object], timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.005)


class Client:
    """Speaks to a daemon as shims and wrappers do."""

    def __init__(self, sock: Path) -> None:
        self.sock = sock

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(DEADLINE_S)
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                connection.connect(os.fspath(self.sock))
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                assert time.monotonic() < deadline, "nobody listens"
                time.sleep(0.005)

    @staticmethod
    def send(connection: socket.socket, kind: int, payload: bytes = b"") -> None:
        connection.send(shim.MESSAGE.pack(shim.VERSION, kind, 0, os.getpid()) + payload)

    @staticmethod
    def receive(connection: socket.socket) -> tuple[shim.Answer, shim.Reason, int]:
        data = connection.recv(100)
        assert data, "the daemon closed the connection without an answer"
        _, answer, reason, value = shim.REPLY.unpack(data)
        return shim.Answer(answer), shim.Reason(reason), value

    def ask(self, kind: int, payload: bytes = b"", connection: socket.socket | None = None):
        own = connection or self.connect()
        try:
            self.send(own, kind, payload)
            return self.receive(own)
        finally:
            if connection is None:
                own.close()

    def request(self, path: Path | bytes) -> tuple[shim.Answer, shim.Reason]:
        return self.ask(shim.Kind.REQUEST, os.fsencode(path))[:2]


class SourceOpens:
    """The files of a dataset in the order in which they are opened at the source, as the kernel tells it."""

    def __init__(self, root: Path) -> None:
        self._files = sorted(path for path in root.rglob("*") if path.is_file())
        self._queue = EventQueue()
        directories = {path.parent for path in self._files}
        self._watches = {self._queue.add(os.fsencode(path), inotify.OPEN): path for path in directories}

    def ids(self) -> list[int]:
        """Their places by name, each once. Ends the watch."""
        found = []
        while data := self._queue.read():
            found += [self._watches[number] / os.fsdecode(name) for number, _, _, name in inotify.events(data) if name]
        self._queue.close()
        return [self._files.index(path) for path in dict.fromkeys(found) if path in self._files]


class DaemonProcess(Client):
    """A daemon, and the wrapper that attached to it."""

    def __init__(self, spec: DaemonSpec, log: Path) -> None:
        self.spec = spec
        self.node_dir = Path(spec.node_dir)
        self.run_dir = Path(spec.run_dir)
        super().__init__(self.node_dir / "sock")
        spec.save(self.node_dir / "spec.json")
        self.log_path = log
        self.log = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hpcstage.daemon", os.fspath(self.node_dir / "spec.json")],
            env={**os.environ, "PYTHONPATH": os.fspath(REPO)},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
            pass_fds=[fd for fd in (spec.listen_fd, spec.lock_fd) if fd is not None],
        )
        self.wrapper: socket.socket | None = None

    def attach(self, child_pid: int = 0) -> DaemonProcess:
        self.wrapper = self.connect()
        answer, _, _ = self.ask(shim.Kind.ATTACH, child_pid.to_bytes(4, "little"), self.wrapper)
        assert answer is shim.Answer.DONE
        return self

    def staged(self) -> None:
        try:
            assert self.ask(shim.Kind.STAGED, b"", self.wrapper)[0] is shim.Answer.DONE
        except BrokenPipeError:
            pytest.fail(f"the daemon has ended early: {self.process.poll()}\n{self.log_text()}")

    def state(self) -> shim.State:
        return shim.State(self.ask(shim.Kind.STATUS)[2])

    def wait_for_scan(self) -> None:
        wait_until(lambda: self.state() not in (shim.State.STARTING, shim.State.SCANNING))

    def end(self) -> NodePart:
        answer, _, _ = self.ask(shim.Kind.END, connection=self.wrapper)
        assert answer is shim.Answer.LAST
        assert self.wrapper.recv(10) == b"", "end of file once the node directory is gone"
        assert not self.node_dir.exists()
        assert self.process.wait(DEADLINE_S) == 0
        assert "is missing in the part of the record" not in self.log_text()
        return self.part()

    def part(self) -> NodePart:
        path = self.run_dir / "nodes" / f"{self.spec.host}.json"
        return NodePart.from_json(json.loads(path.read_text()))

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def store(self, source: Path) -> Path:
        """Where the copy of a source file is."""
        dataset = self.spec.datasets[0]
        below = os.path.relpath(os.fsencode(source), dataset.root)
        return self.node_dir / "store" / dataset.name / os.fsdecode(below)

    def gate(self) -> tuple[int, int, int, int]:
        """The words of the page that say whether copies are opened."""
        data = (self.node_dir / "page").read_bytes()[shim.GATE_OFFSET : shim.GATE_OFFSET + shim.GATE_BYTES]
        return struct.unpack("<4I", data)

    def poke(self, word: int, value: int) -> None:
        """Sets one of them, as a program does."""
        with (self.node_dir / "page").open("r+b") as file:
            file.seek(shim.GATE_OFFSET + 4 * word)
            file.write(struct.pack("<I", value))

    def watches(self) -> bool:
        """Whether it hears of changes: the helper that sets the watches has ended, and the daemon reads."""
        texts = {}
        for fd in Path(f"/proc/{self.process.pid}/fdinfo").iterdir():
            with contextlib.suppress(OSError):
                texts[fd.name] = fd.read_text()
        polled = [line for text in texts.values() for line in text.splitlines() if line.startswith("tfd:")]
        inotify = [name for name, text in texts.items() if "inotify wd:" in text]
        return any(f"tfd: {name:>8}" in line for name in inotify for line in polled)

    def log_text(self) -> str:
        return self.log_path.read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)
        self.log.close()
        if self.wrapper is not None:
            self.wrapper.close()


@pytest.fixture
def start_daemon(tmp_path: Path, local_dir: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons on a dataset; `node_dir` may be given. `resolved=False`: nothing says what to scan."""
    started: list[DaemonProcess] = []

    def start(source: Path | list[str], mode: str = "runtime", **options) -> DaemonProcess:
        arguments = source if isinstance(source, list) else [os.fspath(source)]
        number = len(started)
        node_dir = Path(options.pop("node_dir", None) or local_dir / f"node{number}")
        run_dir = tmp_path / f"run{number}"
        node_dir.mkdir(mode=0o700, exist_ok=True)
        run_dir.mkdir(exist_ok=True)
        page.create(node_dir / "page")
        resolved = resolve(arguments, tmp_path, order=options.get("order"))
        if options.pop("resolved", True):
            resolved.save(node_dir / DATASETS)
        spec = DaemonSpec(
            run_id="test",
            membership=Membership.of(["node"]),
            node_dir=os.fspath(node_dir),
            run_dir=os.fspath(run_dir),
            mode=mode,
            datasets=list(resolved.all),
            order="auto" if arguments[0].startswith("@") else "manifest",
            transfers=8,
        )
        asked = BudgetAsked(options.pop("budget_bytes", None), None, options.pop("budget_inodes", None))
        spec = replace(spec, budget=BudgetFacts(asked))
        daemon = DaemonProcess(replace(spec, **options), tmp_path / f"daemon{number}.log")
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        daemon.kill()
        shutil.rmtree(daemon.node_dir, ignore_errors=True)


def same(source: Path, copy: Path) -> bool:
    """Content, size, modification time and permission bits are the source's."""
    a, b = source.stat(), copy.stat()
    facts = [(s.st_size, s.st_mtime_ns, s.st_mode & 0o777) for s in (a, b)]
    return facts[0] == facts[1] and source.read_bytes() == copy.read_bytes()
