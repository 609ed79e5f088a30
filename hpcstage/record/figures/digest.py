"""Reduces a node's part to the figures that the record needs of it, without its samples and processes. Pure.

The parts of a thousand nodes need not fit into memory: each is read once, and a few kilobytes of it stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcstage.record.figures import tally
from hpcstage.record.figures.cells import Track, track_of
from hpcstage.record.figures.coverage import Coverage, coverage_of
from hpcstage.record.figures.histogram import Histogram, merge
from hpcstage.record.figures.nodesplit import Measured, Split, measured_of
from hpcstage.record.figures.readers import Program, program_of
from hpcstage.record.figures.sourceload import Seen, seen_of
from hpcstage.record.figures.speeds import of_samples
from hpcstage.record.figures.totals import Totals, totals_of
from hpcstage.record.figures.virtual import pids_of
from hpcstage.record.figures.window import command_of, copying_s, last_of
from hpcstage.record.parts.part import NodePart, ProcessPart, RunPart, short_group
from hpcstage.record.parts.roster import State, clock_error_s, expected, reason_of, says_something, state_of

PROCESSES = 64
"""At most this many processes are listed per node, those with most opens first."""
ROWS = 1024
"""About this many processes, and as many errors, are listed of all nodes together, but LEAST_ROWS of each node."""
LEAST_ROWS = 2
LEAST_BYTES = 16 * 2**20
"""The speed of a local disk is known if at least this many bytes were read from staged copies."""


@dataclass
class Digest:
    """The figures of one node."""

    part: NodePart
    """The part without samples, processes and other data that grow with the run."""
    state: State
    why: str | None
    """Why the node's state is not `OK`."""
    speaks: bool
    """Whether the node reported any figure."""
    shift_s: float
    """Seconds to be added to a time on the node's axis to get that on the run's."""
    clock_moved_s: float
    last_s: float
    totals: Totals
    coverage: Coverage
    measured: Measured
    copying_s: float | None
    program: Program
    seen: Seen
    hist_open: Histogram
    hist_read: Histogram
    """Latencies of opens and of reads at the source, the copiers' and the program's together."""
    disk: tuple[int, int]
    """Nanoseconds in writes to the local disk, and in all that copying does, summed over transfers."""
    track: Track | None
    local_ns_per_byte: float | None
    """Nanoseconds per byte of the program's reads of staged copies; None where too little was read."""
    processes: list[dict[str, Any]]
    pids: frozenset[int] = frozenset()
    name: str = ""
    split: Split = field(default_factory=Split)
    relative_pace: float | None = None
    """How fast the source was for the node as a share of how fast it was for the others at the same moment; median."""

    @property
    def index(self) -> int:
        """Returns the node's index in the job."""
        return self.part.node_index

    @property
    def waited_s(self) -> float | None:
        """Returns the seconds that the program waited for the source and the local disk; None: not measured."""
        if self.split.wait_source_s is None or self.split.wait_local_s is None:
            return None
        return self.split.wait_source_s + self.split.wait_local_s


def digest_of(run: RunPart, node: NodePart, *, running: bool = False) -> Digest:
    """Computes all figures of a node that the record needs."""
    state = state_of(node, running=running)
    last_s = last_of(node)
    moved_s = -clock_error_s(run, node, last_s)
    shift_s = node.started_unix_s - run.started_unix_s + moved_s
    on, points = of_samples(node.samples)
    rows = _rows(run, node)
    measured = measured_of(run, node)
    return Digest(
        part=_slim(node, rows),
        state=state,
        why=reason_of(run, node, state),
        speaks=says_something(node),
        shift_s=shift_s,
        clock_moved_s=moved_s,
        last_s=last_s,
        totals=totals_of(node),
        coverage=coverage_of(node),
        measured=measured,
        copying_s=copying_s(node, command_of(run), shift_s),
        program=program_of(node, None if measured.shares is None else measured.shares.source),
        seen=seen_of(node),
        hist_open=merge([node.hist_open, *(p.hist_open for p in node.processes)]),
        hist_read=merge([node.hist_read, *(p.hist_read for p in node.processes)]),
        disk=_disk(node),
        track=track_of(on, points, shift_s),
        local_ns_per_byte=_local_ns_per_byte(node.processes),
        processes=_listed(node.processes, rows),
        pids=pids_of(node),
    )


def _rows(run: RunPart, node: NodePart) -> int:
    return min(PROCESSES, max(LEAST_ROWS, ROWS // expected(run, [node])))


def _slim(node: NodePart, rows: int) -> NodePart:
    group = short_group(node.group)
    forecast = node.forecast if node.node_index == 0 else None
    errors = node.errors[:rows]
    return replace(node, samples=[], processes=[], hist_read={}, forecast=forecast, errors=errors, group=group)


def _local_ns_per_byte(processes: Sequence[ProcessPart]) -> float | None:
    size = tally.total(processes, "local_read_bytes")
    return tally.total(processes, "local_read_ns") / size if size >= LEAST_BYTES else None


def _disk(node: NodePart) -> tuple[int, int]:
    write_ns = sum(sample.copy_write_ns for sample in node.samples)
    return write_ns, write_ns + sum(sample.copy_open_ns + sample.copy_read_ns for sample in node.samples)


def _listed(processes: Sequence[ProcessPart], rows: int) -> list[dict[str, Any]]:
    """Lists the processes with most opens; training processes first where only a few can be listed."""

    def rank(process: ProcessPart) -> tuple[bool, int]:
        return rows < PROCESSES and tally.count(process, "loader_steps") > 0, tally.opens_of(process)

    return [_process(process) for process in sorted(processes, key=rank, reverse=True)[:rows]]


def _process(process: ProcessPart) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "parent_pid": process.parent_pid,
        "layer": process.layer,
        "python": process.python,
        "opens": tally.opens_of(process),
        "swapped": tally.swapped_of(process),
        "loader_steps": tally.count(process, "loader_steps"),
        "loader_wait_s": tally.count(process, "loader_wait_ns") / 1e9,
        "loader_epochs": tally.count(process, "loader_epochs"),
        "loader_workers": tally.count(process, "loader_workers"),
    }
