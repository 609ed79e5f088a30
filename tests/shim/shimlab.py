"""A node directory, a page, a source and a store for tests of the shim, and a responder in place of the daemon.

The interpreters are real: every test starts one with PYTHONPATH as `hpcstage run` sets it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcstage.node import page, shimdir
from hpcstage.plan.types import ManifestEntry
from hpcstage.protocol import shim
from hpcstage.protocol.arriving import ARRIVING_FILE, LEAST_STRIPE_BYTES
from hpcstage.store.arrivals import Arrival, Arrivals, SourceFacts
from hpcstage.store.attributes import AttributesTable
from hpcstage.store.grantedrows import GrantedRows

LAYERS = ("native", "python")
PRELUDE = """
import json, os, sys, _hpcstage_attach as attach
SOURCE = sys.argv[1]
def say(value): print(json.dumps(value))
def src(*parts): return os.path.join(SOURCE, *parts)
"""


class Lab:
    """One job's node as the shim sees it."""

    def __init__(self, base: Path, layer: str = "native") -> None:
        self.layer = layer
        self.source = base / "the source"
        self.node = base / "node"
        self.store = self.node / "store" / "0-source"
        self.sock = self.node / "sock"
        self.source.mkdir(parents=True)
        self.store.mkdir(parents=True)
        page.create(self.node / "page")
        self._table = AttributesTable(self.node, 1000)
        self.state(shim.State.STAGING)
        self.unlinked()

    def state(self, state: shim.State) -> None:
        """What the page says."""
        self._poke(shim.STATE_OFFSET, int(state))

    def gate(self) -> tuple[int, int, int, int]:
        """The four words that say whether copies are opened."""
        data = (self.node / "page").read_bytes()[shim.GATE_OFFSET : shim.GATE_OFFSET + shim.GATE_BYTES]
        return struct.unpack("<4I", data)

    def catch_up(self) -> None:
        """As a daemon that has read all that was sent."""
        self._poke(shim.GATE_OFFSET + 4 * shim.CAUGHT_UP, self.gate()[shim.GIVEN_UP])

    def publish(self) -> None:
        """As a daemon that says that there are more copies than before."""
        self._raise(shim.PUBLISHED_OFFSET)

    def void(self, name: str) -> None:
        """As a daemon that voids a copy."""
        (self.store / name).unlink(missing_ok=True)
        self._raise(shim.VOIDED_OFFSET)

    def _raise(self, offset: int) -> None:
        (before,) = struct.unpack_from("<I", (self.node / "page").read_bytes(), offset)
        self._poke(offset, before + 1)

    def unlinked(self, value: int = shim.UNLINKED) -> None:
        """No file of the dataset is a symbolic link or behind one."""
        self._poke(shim.LINKED_OFFSET, value)

    def _poke(self, offset: int, value: int) -> None:
        with (self.node / "page").open("r+b") as file:
            file.seek(offset)
            file.write(struct.pack("<I", value))

    def install(self, *, intercept: str | None = None, mode: str = "stage", request_cap_s: float = 2.0) -> Lab:
        """Makes the shim's directory."""
        maps = [(os.fsencode(self.source), os.fsencode(self.store))]
        shimdir.install(self.node, maps, shimdir.ShimSetup(intercept or self.layer, mode == "direct", request_cap_s))
        return self

    def put(self, name: str | bytes, source: bytes | None = None, store: bytes | None = None) -> Path:
        """Writes a file at the source, in the store, or both (then with the same times)."""
        text = os.fsdecode(name)
        for root, content in ((self.source, source), (self.store, store)):
            path = root / text
            path.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                path.write_bytes(content)
        if source is not None and store is not None:
            shutil.copystat(self.source / text, self.store / text)
        if store is not None:
            self.note(text)
        return self.source / text

    def note(self, name: str) -> None:
        """As the daemon does for a copy: what stat says of its source, or, where there is none, of the copy."""
        source, copy = self.source / name, self.store / name
        found = (source if source.exists() else copy).stat()
        entry = ManifestEntry(
            0, b"", found.st_size, found.st_mtime_ns, found.st_mode, found.st_dev, found.st_ino, False,
            found.st_ctime_ns, found.st_nlink, found.st_uid, found.st_gid,
        )  # fmt: skip
        self._table.put(copy.lstat(), entry, found.st_dev)

    def environment(self, **more: str) -> dict[str, str]:
        """The environment of the command."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HPCSTAGE", "PYTHON")) or k == MARK}
        return {**kept, "PYTHONPATH": os.fspath(self.node / "shim"), **more}

    def start(
        self, code: str, *args: Any, python: str = sys.executable, flags: Sequence[str] = (), **popen: Any
    ) -> subprocess.Popen[bytes]:
        """Starts an interpreter on code that may use `say`, `src` and `attach`."""
        env = popen.pop("env", None) or self.environment()
        command = [python, *flags, "-c", PRELUDE + code, os.fspath(self.source), *map(os.fspath, args)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, **popen)

    def run(self, code: str, *args: Any, timeout_s: float = 60, **popen: Any) -> Any:
        """What the code said last; fails if it failed or wrote to stderr."""
        process = self.start(code, *args, **popen)
        try:
            out, err = process.communicate(timeout=timeout_s)
        finally:
            process.kill()
        assert process.returncode == 0, err.decode(errors="replace")
        assert err == b"", err.decode(errors="replace")
        lines = out.splitlines()
        return json.loads(lines[-1]) if lines else None

    def taken(self) -> int:
        """The first slot of this layer that nobody has used."""
        header = shim.PAGE_HEADER.unpack_from((self.node / "page").read_bytes())
        return int(header[5 + (self.layer == "python")])

    def slots(self) -> list[dict[str, Any]]:
        """The used slots: pid, layer, parent and counters by name."""
        data = (self.node / "page").read_bytes()
        header = shim.PAGE_HEADER.unpack_from(data)
        python = range(shim.PYTHON_SLOTS_FROM, min(header[6], shim.SLOTS))
        numbers = [*range(min(header[5], shim.PYTHON_SLOTS_FROM)), *python]
        slots = (_slot(data, shim.PAGE_HEADER_BYTES + n * shim.SLOT_BYTES) for n in numbers)
        return [slot for slot in slots if slot["pid"] or slot["counters"]]

    def counters(self) -> dict[str, int]:
        """Summed over all slots, zeros left out."""
        sums: dict[str, int] = {}
        for slot in self.slots():
            for name, value in slot["counters"].items():
                sums[name] = sums.get(name, 0) + value
        return sums


MARK = "HPCSTAGE_TEST_SESSION"
_NAMES = {
    **{int(c): c.name.lower() for c in shim.Counter},
    **{shim.Counter.DIRECT_BASE + r: f"direct_{r.name.lower()}" for r in shim.Reason if r},
}


def _slot(data: bytes, at: int) -> dict[str, Any]:
    pid, layer, version, parent, attach_ns = shim.SLOT_HEAD.unpack_from(data, at)
    values = struct.unpack_from(f"<{shim.COUNTERS}Q", data, at + shim.COUNTERS_OFFSET)
    hist = struct.unpack_from(f"<{shim.HIST_BUCKETS}I", data, at + shim.HIST_OPEN_OFFSET)
    counters = {_NAMES.get(i, str(i)): value for i, value in enumerate(values) if value}
    return {
        "pid": pid, "layer": layer, "python": (version >> 8, version & 255), "parent": parent, "attach_ns": attach_ns,
        "counters": counters, "opens_in_histogram": sum(hist),
    }  # fmt: skip


Answers = Callable[[shim.Kind, bytes], "bytes | None"]


def ready(kind: shim.Kind, path: bytes) -> bytes:
    """REQUEST: READY. WROTE: DONE."""
    answer = shim.Answer.READY if kind is shim.Kind.REQUEST else shim.Answer.DONE
    return shim.REPLY.pack(shim.VERSION, answer, 0, 0)


def direct(reason: shim.Reason) -> Answers:
    """REQUEST: DIRECT for a reason. WROTE: DONE."""

    def answer(kind: shim.Kind, path: bytes) -> bytes:
        if kind is not shim.Kind.REQUEST:
            return ready(kind, path)
        return shim.REPLY.pack(shim.VERSION, shim.Answer.DIRECT, reason, 0)

    return answer


class Responder:
    """Answers on the socket like a daemon; `asked` holds (kind, path). An answer of None is silence."""

    def __init__(self, sock: Path, answers: Answers) -> None:
        self.asked: list[tuple[shim.Kind, bytes]] = []
        self._answers = answers
        self._held: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(sock))
        self._listener.listen(64)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            data = connection.recv(shim.MAX_DATAGRAM)
            if not data:
                connection.close()
                continue
            version, kind, _, pid = shim.MESSAGE.unpack_from(data)
            assert version == shim.VERSION
            assert pid > 0
            path = data[shim.MESSAGE.size :]
            if kind == shim.Kind.LANDED and len(path) > shim.LANDED.size:  # the same question, with the inode
                kind, path = shim.Kind.WROTE, path[shim.LANDED.size :]
            reply = self._answers(shim.Kind(kind), path)
            self.asked.append((shim.Kind(kind), path))
            if reply is None:
                self._held.append(connection)
                continue
            with contextlib.suppress(BrokenPipeError):  # some do not wait for the answer
                connection.send(reply)
            connection.close()

    def paths(self, kind: shim.Kind) -> list[bytes]:
        """What was asked, of one kind."""
        return [path for k, path in self.asked if k is kind]

    def __enter__(self) -> Responder:
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(5)
        for connection in self._held:
            connection.close()


_STEP = """
def step():
    os.write(1, b"step\\n")
    sys.stdin.readline()
"""
"""Makes code stop until the test has done its next action."""
Action = Callable[[], object]


def stepped(lab: Lab, code: str, *args: Any, actions: Sequence[Action] = (), flags: Sequence[str] = ()) -> Any:
    """What the code said last; at each of its steps the next action is done."""
    process = lab.start(_STEP + code, *args, stdin=subprocess.PIPE, flags=flags)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        for action in actions:
            assert process.stdout.readline() == b"step\n", process.communicate()[1].decode()
            action()
            process.stdin.write(b"\n")
            process.stdin.flush()
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (0, b""), errors.decode()
    return json.loads(out.splitlines()[-1])


_EACH = """
found, plain = {}, dict(globals())
for way, code in json.loads(sys.argv[2]).items():
    top = os.path.join(SOURCE, way) if APART else SOURCE
    space = {
        **plain, "way": way, "SOURCE": top, "src": lambda *parts, top=top: os.path.join(top, *parts),
        "say": lambda value, way=way: found.__setitem__(way, value),
    }
    try: exec(code, space)
    except Exception as error: found[way] = repr(error)
print(json.dumps(found))
"""


def each(lab: Lab, ways: dict[str, str], *args: Any, apart: bool = True, **popen: Any) -> dict[str, Any]:
    """What each way said, all in one process; to each its own directory is the source, if they are apart."""
    said = lab.run(f"APART = {apart}\n{_EACH}", json.dumps(ways), *args, **popen)
    assert isinstance(said, dict)
    return said


COMING_BYTES = 4 * LEAST_STRIPE_BYTES + 1000
"""Five stripes."""


class Coming:
    """A file whose copy is on its way, as daemon and copier show it."""

    def __init__(self, lab: Lab, source: bytes = b"s" * COMING_BYTES, incoming: bytes = b"c" * COMING_BYTES) -> None:
        self.lab = lab
        self.source = lab.source / "file"
        if not self.source.exists():
            lab.put("file", source)
        (lab.node / "incoming" / "0.0").mkdir(parents=True)
        self.incoming = lab.node / "incoming" / "0.0" / "7"
        self.incoming.write_bytes(incoming)
        self.daemon = GrantedRows(lab.node)
        self.arrival = Arrival(COMING_BYTES)

    def begin(self) -> None:
        """As the daemon grants the row, and the copier fills it."""
        assert self.daemon.grant(7)
        found = self.source.stat()
        listed = ManifestEntry(
            0, b"file", found.st_size, found.st_mtime_ns, found.st_mode, 0, 0, False, found.st_ctime_ns
        )
        facts = SourceFacts(7, found, b"incoming/0.0/7")
        self.arrival = Arrivals(self.lab.node / ARRIVING_FILE).begin(facts, listed)
        assert self.arrival.is_shown

    def arrive(self, *stripes: int) -> None:
        """As the copier does for these stripes, or for all."""
        for stripe in stripes or range(5):
            self.arrival.arrived(stripe)

    def void(self) -> None:
        """As the daemon does before a write is answered."""
        self.daemon.withdraw((7,))


def wait_until(condition: Callable[[], bool], timeout_s: float = 40.0) -> None:
    """Polls until the condition holds; fails after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"did not come true in {timeout_s} s"
        time.sleep(0.005)


def require(layer: str) -> None:
    """Skips where the layer was not built."""
    if layer == "native" and not shimdir.native_available():
        pytest.skip("the C extension is not built (setup.py build_ext --inplace)")


def compile_library(directory: Path, name: str, source: str, *flags: str) -> Path:
    """Compiles a small shared library, or skips."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    path = directory / f"lib{name}.so"
    path.with_suffix(".c").write_text(source)
    command = [compiler, "-shared", "-fPIC", *flags, "-o", os.fspath(path), os.fspath(path.with_suffix(".c"))]
    subprocess.run(command, check=True, timeout=60)
    return path
