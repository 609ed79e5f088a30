"""Peer copies against a bare MPI ping-pong of the same message size between two processes of a machine; cost at rest.

Two nodes with half of the files each get the other half: bytes per second from store to store, both ways together, as
when nodes end complete. The ping-pong (`pingpong.py`) sends as many messages of a file's size, each from and to a place
of its own in memory that has been touched before: what MPI does with data that lies where files lie. A ping-pong of one
buffer, which the processor's cache then holds, stands beside it. `shared memory`: as MPI chooses on one machine; `tcp`:
by the network's protocols, without a network's limits; `10 Gbit/s`: over a link of that rate between two network
namespaces, as between machines (needs root). There one node gets and the other gives, since a ping-pong uses one
direction at a time. Beside them: the same files passed by the plainest MPI program with no exchange (`filepass.py`),
two processes of which each reads, sends, receives and writes one MiB after the other: what files cost beyond a message,
whoever passes them. A process that copies from file to file, without another one, passes nothing from node to node and
is no measure. Both ways of passing files are measured in processes that have passed other files before, after what that
wrote has reached the disk, and in memory that was touched a moment ago: the first pass finds memory and a disk that are
idle, and a program measured without one seemed ten times as fast.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.filepass import Line, passed
from benchmarks.files import Place, place, touch_memory, write_back
from benchmarks.harness import Arm, Bench, Figure, Options, Row, at_least, at_most, divide, holds, options_of, parser
from benchmarks.link import link, unavailable
from benchmarks.peernodes import MPIEXEC, Node, launch, manifest_of, serve
from benchmarks.programs import run

LEAST_OF_OTHER = 0.8
MOST_AT_REST_PERCENT = 2.0
MB = 1e6
OURS, BARE, CACHED = "peer copies", "ping-pong", "ping-pong, one buffer"
NO_EXCHANGE = "files, no exchange"
WARM_FILES = 8
_WARM = range(2 * WARM_FILES)
TCP = {"MPIR_CVAR_NOLOCAL": "1", "UCX_TLS": "tcp,self"}
RATE, LINKED = "10gbit", "10 Gbit/s"


@dataclass(frozen=True)
class Cell:
    """What passes between the nodes, and how."""

    files: int
    """For each of the two."""
    file_bytes: int
    place: str
    """memory or disk"""
    way: str
    """shared memory, tcp or a link"""

    @property
    def name(self) -> str:
        """In results and for --only."""
        size = f"{self.file_bytes // 1_000_000} MB" if self.file_bytes >= 1_000_000 else f"{self.file_bytes // 1024} kB"
        return f"{size}, {self.place}, {self.way}"

    @property
    def receivers(self) -> tuple[int, ...]:
        """The nodes that get what the other has."""
        return (1,) if self.way == LINKED else (0, 1)

    @property
    def size_bytes(self) -> int:
        """In all."""
        return len(self.receivers) * self.files * self.file_bytes


@dataclass(frozen=True)
class Launch:
    """How two processes are started that are to reach each other in a certain way."""

    environment: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    """Words in front of mpiexec."""
    arguments: Sequence[str] = ()
    """For mpiexec."""

    @property
    def mpiexec(self) -> list[str | Path]:
        """The command that starts two processes."""
        return [*self.before, MPIEXEC, *self.arguments, "-n", "2"]


@contextlib.contextmanager
def launching(cell: Cell, directory: Path) -> Iterator[Launch]:
    """For the processes of a sample."""
    if cell.way == LINKED:
        with link(directory, RATE) as up:
            yield Launch(up.environment, up.before(), up.arguments)
    else:
        yield Launch(TCP if cell.way == "tcp" else {})


def cells(quick: bool) -> list[Cell]:
    """Enough of each that a sample takes a good part of a second."""
    small, large = (400, 3) if quick else (2500, 8)
    ways = ("shared memory", "tcp", *(() if unavailable() else (LINKED,)))
    return [
        Cell(files, size, where, way)
        for way in ways
        for where in ("memory", "disk")
        for files, size in ((small, 128 << 10), (large, 64_000_000))
    ]


class Peers:
    """Makes nodes and measures what passes between them."""

    def __init__(self, where: Place) -> None:
        self._where = where

    def arms(self, cell: Cell) -> dict[str, Arm]:
        """What is compared."""
        return {
            OURS: lambda: self._copies(cell),
            BARE: lambda: self._bare(cell, "many"),
            CACHED: lambda: self._bare(cell, "one"),
            NO_EXCHANGE: lambda: self._no_exchange(cell),
        }

    def _copies(self, cell: Cell) -> dict[str, Any]:
        with self._nodes(cell) as nodes, launching(cell, self._where.disk) as how:
            return _measured(cell, nodes, how)

    def _no_exchange(self, cell: Cell) -> dict[str, Any]:
        with self._nodes(cell) as nodes, launching(cell, self._where.disk) as how:
            passes = [_lines(nodes, cell.receivers, ids) for ids in (_WARM, _measured_ids(cell))]
            seconds = passed(passes, self._where.disk, how.mpiexec, how.environment)
        return {"seconds": seconds[-1], "bytes": cell.size_bytes}

    @contextlib.contextmanager
    def _nodes(self, cell: Cell) -> Iterator[list[Node]]:
        """With half of the files each, and memory for the other half."""
        base = self._where.memory if cell.place == "memory" else self._where.local.renew()
        nodes = _staged(base / "peers", [cell.file_bytes] * 2 * (cell.files + WARM_FILES))
        try:
            touch_memory(4 * (cell.files + WARM_FILES) * cell.file_bytes)
            yield nodes
        finally:
            for node in nodes:
                node.remove()
            if cell.place == "disk":
                self._where.local.end()

    def _bare(self, cell: Cell, places: str) -> dict[str, Any]:
        touch_memory(4 * cell.files * cell.file_bytes)
        with launching(cell, self._where.disk) as how:
            settings = [f"{name}={value}" for name, value in how.environment.items()]
            program = [sys.executable, "-m", "benchmarks.pingpong", str(cell.file_bytes), str(cell.files), places]
            done = run(["env", *settings, *how.mpiexec, *program], self._where.disk)
        return dict(json.loads(done.stdout))

    def at_rest(self, seconds: float) -> dict[str, Any]:
        """What two exchanges take that have nothing to do."""
        nodes = _staged(self._where.memory / "rest", [100, 100])
        process = launch(nodes, self._where.memory)
        try:
            serve(nodes, lambda: all(node.is_ready for node in nodes))
            settled = time.monotonic() + 1.0
            serve(nodes, lambda: time.monotonic() > settled)
            found = psutil.Process(process.pid).children(recursive=True)
            exchanges = [child for child in found if child.cmdline()[1:3] == ["-m", "hpcstage.exchange"]]
            before, start = [sum(p.cpu_times()[:2]) for p in exchanges], time.monotonic()
            serve(nodes, lambda: time.monotonic() > start + seconds)
            took = time.monotonic() - start
            used = [sum(p.cpu_times()[:2]) - b for p, b in zip(exchanges, before, strict=True)]
            for node in nodes:
                node.end()
            process.wait(30)
            return {"seconds": took, "exchanges": len(used), "percent": 100 * max(used) / took}
        finally:
            for node in nodes:
                node.remove()


def _measured_ids(cell: Cell) -> range:
    return range(2 * WARM_FILES, 2 * (cell.files + WARM_FILES))


def _lines(nodes: Sequence[Node], receivers: Sequence[int], ids: range) -> list[Line]:
    """What the receivers lack of these, where the other node has it, and where it would lie."""
    return [
        (to, nodes[1 - to].file(id_), _made(nodes[to].file(id_))) for to in receivers for id_ in ids if id_ % 2 != to
    ]


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _measured(cell: Cell, nodes: Sequence[Node], how: Launch) -> dict[str, Any]:
    base = nodes[0].path.parent
    process = launch(nodes, base, env=how.environment, before=how.before, arguments=how.arguments)
    serve(nodes, lambda: all(node.is_ready for node in nodes))
    for ids in (_WARM, _measured_ids(cell)):
        write_back(base)
        touch_memory(2 * cell.size_bytes)
        seconds = _pass(nodes, ids, cell.receivers)
    receivers = [nodes[index] for index in cell.receivers]
    whole = all(len(node.got) == cell.files + WARM_FILES and not node.missed for node in receivers)
    for node in nodes:
        node.end()
    return {"seconds": seconds, "bytes": cell.size_bytes, "complete": whole and process.wait(30) == 0}


def _staged(base: Path, sizes: Sequence[int]) -> list[Node]:
    """Two nodes, with even ids in one and odd ids in the other."""
    manifest = manifest_of(sizes)
    nodes = [Node(base / f"node{index}", index, 2, manifest) for index in range(2)]
    data = os.urandom(max(sizes))
    for id_, size in enumerate(sizes):
        nodes[id_ % 2].stage(id_, data[:size])
    return nodes


def _pass(nodes: Sequence[Node], ids: range, receivers: Sequence[int]) -> float:
    """Receivers get what the other has of these. Seconds."""
    start = time.perf_counter()
    for node in (nodes[index] for index in receivers):
        node.ask(1 - node.index, [id_ for id_ in ids if id_ % 2 != node.index])
    serve(nodes, lambda: not any(node.outstanding for node in nodes), 300.0)
    return time.perf_counter() - start


def rate(bench: Bench, cell: Cell, arm: str) -> float | None:
    """MB/s, from the median."""
    seconds = bench.median(cell.name, arm)
    size = bench.median(cell.name, arm, "bytes")
    return divide(None if size is None else size / MB, seconds)


def figures(bench: Bench, chosen: Sequence[Cell]) -> list[Figure]:
    """In memory the peer copies are held against a bare ping-pong, on a disk against the plainest program."""
    made = []
    for cell in chosen:
        other, name = (BARE, "a bare ping-pong") if cell.place == "memory" else (NO_EXCHANGE, "the plainest program")
        ratio = divide(rate(bench, cell, OURS), rate(bench, cell, other))
        made.append(at_least(f"{cell.name}: of {name}", ratio, LEAST_OF_OTHER))
    samples = [s["complete"] for s in bench.samples if "complete" in s]
    rest = bench.median("at rest", OURS, "percent")
    made.append(at_most("an exchange at rest, of a core", rest, MOST_AT_REST_PERCENT, "%"))
    return [*made, holds("every file came", all(samples) if samples else None)]


def tables(bench: Bench, chosen: Sequence[Cell]) -> None:
    """Rates from medians."""
    rows: list[Row] = []
    for cell in chosen:
        ours, bare, cached, files = (rate(bench, cell, arm) for arm in (OURS, BARE, CACHED, NO_EXCHANGE))
        row = [
            ours,
            bare,
            divide(ours, bare),
            cached,
            divide(ours, cached),
            files,
            divide(files, bare),
            divide(ours, files),
        ]
        rows.append([cell.name, *row])
    columns = ["", f"{OURS} MB/s", f"{BARE} MB/s", "ratio", f"{CACHED} MB/s", "ratio"]
    columns += [f"{NO_EXCHANGE} MB/s", "of ping-pong", f"{OURS} / {NO_EXCHANGE}"]
    bench.sheet("From store to store (both ways together, over the link one way)", columns, rows)


def main() -> int:
    """Measures, prints, checks."""
    options: Options = options_of(parser(__doc__).parse_args())
    bench = Bench("peer", options, {"cpus": os.cpu_count()}, tries=3)
    chosen = [cell for cell in cells(options.quick) if options.wants(cell.name)]
    with place(options) as where:
        peers = Peers(where)
        for cell in chosen:
            bench.measure(cell.name, peers.arms(cell), options.rounds(5))
        if options.wants("at rest"):
            bench.measure("at rest", {OURS: lambda: peers.at_rest(3.0 if options.quick else 10.0)}, options.rounds(3))
    tables(bench, chosen)
    return bench.finish(figures(bench, chosen))


if __name__ == "__main__":
    sys.exit(main())
