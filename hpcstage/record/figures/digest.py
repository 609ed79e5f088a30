"""Reduces a node's part to the figures that the record needs of it, without its samples and processes. Pure.

The parts of a thousand nodes need not fit into memory: each is read once, and a few kilobytes of it stay. Times are
placed on the run's own axis: seconds since the wrapper started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

from hpcstage.record.figures import counts
from hpcstage.record.figures.counts import MOST_EXAMPLES, Histogram, coverage_of, merge, totals_of
from hpcstage.record.figures.track import Track, track_of
from hpcstage.record.figures.waits import ProcessTimes, Split, times_of
from hpcstage.record.parts.part import DatasetPart, MissedProcess, NodePart
from hpcstage.record.parts.roster import Presence, clock_error_s, expected, reason_of, says_something, state_of
from hpcstage.record.parts.rows import ProcessPart
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import Contention, Coverage, DiskSpeed, ProcessRow, RunTotals, TimeSplit
from hpcstage.units import NS_PER_S

MOST_PROCESSES = 64
"""At most this many processes are listed per node, those with most opens first."""
MOST_ROWS = 1024
"""About this many processes, and as many errors, are listed of all nodes together, but LEAST_ROWS of each node."""
LEAST_ROWS = 2
LEAST_BYTES = 16 * 2**20
"""The speed of a local disk is known if at least this many bytes were read from staged copies."""


@dataclass(frozen=True)
class Window:
    """When the command ran, in seconds on the run's axis."""

    start_s: float
    end_s: float | None
    end_seen: bool
    """False: the end is the last time that any node noted, as in a killed job."""

    @property
    def wall_s(self) -> float | None:
        """Returns the seconds for which the command ran, or was seen running."""
        return None if self.end_s is None else max(0.0, self.end_s - self.start_s)


@dataclass(frozen=True)
class Digest:
    """The figures of one node."""

    part: NodePart
    """The part without samples, processes and other data that grow with the run."""
    state: Presence
    why: str | None
    """Why the node's state is not `OK`."""
    speaks: bool
    """Whether the node reported any figure."""
    shift_s: float
    """Seconds to be added to a time on the node's axis to get that on the run's."""
    clock_moved_s: float
    last_s: float
    totals: RunTotals
    coverage: Coverage
    times: ProcessTimes
    copying_s: float | None
    hist_open: Histogram
    hist_read: Histogram
    """Latencies of opens and of reads at the source, the copiers' and the program's together."""
    reader_bytes_per_s: float | None
    """The rate of one reader of its program at the source, with the opens."""
    disk: DiskSpeed | None
    track: Track | None
    processes: tuple[ProcessRow, ...]
    pids: frozenset[int]
    """The processes that attached, of a virtual node."""
    name: str = ""
    split: Split = field(default_factory=Split)
    relative_pace: float | None = None
    """How fast the source was for the node as a share of how fast it was for the others at the same moment; median."""

    @property
    def index(self) -> int:
        """Returns the node's index in the job."""
        return self.part.node_index


@dataclass(frozen=True)
class JobFigures:
    """The sections of the record that the figures of all nodes add up to."""

    datasets: tuple[DatasetPart, ...]
    totals: RunTotals
    time_split: TimeSplit
    contention: Contention


def digest_of(run: RunPart, node: NodePart, *, running: bool = False) -> Digest:
    """Computes all figures of a node that the record needs."""
    state = state_of(node, running=running)
    last_s = max(node.ended_s or 0.0, *(sample.start_s + sample.length_s for sample in node.samples[-1:]), 0.0)
    moved_s = -clock_error_s(run, node, last_s)
    shift_s = node.started_unix_s - run.started_unix_s + moved_s
    rows = min(MOST_PROCESSES, max(LEAST_ROWS, MOST_ROWS // expected(run, [node])))
    return Digest(
        part=_without_rows(node, rows),
        state=state,
        why=reason_of(run, node, state),
        speaks=says_something(node),
        shift_s=shift_s,
        clock_moved_s=moved_s,
        last_s=last_s,
        totals=totals_of(node),
        coverage=coverage_of(node),
        times=times_of(run, node),
        copying_s=_copying_s(node, command_of(run), shift_s),
        hist_open=merge([node.hist_open, *(p.hist_open for p in node.processes)]),
        hist_read=merge([node.hist_read, *(p.hist_read for p in node.processes)]),
        reader_bytes_per_s=_rate(node, "source_read_bytes", "source_open_ns", "source_read_ns"),
        disk=_disk(node),
        track=track_of(node.samples, shift_s),
        processes=_listed(node.processes, rows),
        pids=frozenset(process.pid for process in node.processes) if _is_virtual(node) else frozenset(),
    )


def _without_rows(node: NodePart, rows: int) -> NodePart:
    group = node.group.shortened() if node.group else None
    errors = node.errors[:rows]
    return replace(node, samples=(), processes=(), hist_read={}, errors=errors, group=group)


def _disk(node: NodePart) -> DiskSpeed | None:
    """Returns how fast the node's local disk was; None where nothing was measured."""
    write_ns = sum(sample.copy_write_ns for sample in node.samples)
    copy_ns = write_ns + sum(sample.copy_open_ns + sample.copy_read_ns for sample in node.samples)
    read_bytes_per_s = _rate(node, "local_read_bytes", "local_read_ns")
    if not copy_ns and read_bytes_per_s is None:
        return None
    write_share = write_ns / copy_ns if copy_ns else 0.0
    return DiskSpeed(write_s=write_ns / NS_PER_S, write_share=write_share, read_bytes_per_s=read_bytes_per_s)


def _rate(node: NodePart, size_name: str, *times: str) -> float | None:
    """Returns the rate of one reader of the node's program; None where it read too little."""
    size_bytes = counts.total(node.processes, size_name)
    read_ns = sum(counts.total(node.processes, name) for name in times)
    return NS_PER_S / (read_ns / size_bytes) if size_bytes >= LEAST_BYTES and read_ns else None


def _listed(processes: Sequence[ProcessPart], rows: int) -> tuple[ProcessRow, ...]:
    """Lists the processes with most opens; training processes first where only a few can be listed."""

    def rank(process: ProcessPart) -> tuple[bool, int]:
        return rows < MOST_PROCESSES and counts.count(process, "loader_steps") > 0, counts.opens_of(process)

    return tuple(map(_process, sorted(processes, key=rank, reverse=True)[:rows]))


def _process(process: ProcessPart) -> ProcessRow:
    return ProcessRow(
        pid=process.pid,
        parent_pid=process.parent_pid,
        layer=process.layer,
        python=process.python,
        opens=counts.opens_of(process),
        swapped=counts.swapped_of(process),
        loader_steps=counts.count(process, "loader_steps"),
        loader_epochs=counts.count(process, "loader_epochs"),
        loader_workers=counts.count(process, "loader_workers"),
    )


# ---- when the command ran ----


def command_of(run: RunPart) -> Window:
    """Returns when the command ran, as far as the wrapper saw it."""
    return Window(run.child_started_s or 0.0, run.child_ended_s, run.child_ended_s is not None)


def window_of(run: RunPart, nodes: Sequence[Digest]) -> Window:
    """Returns when the command ran; where its end was not seen, up to the last time that any node noted."""
    window = command_of(run)
    if window.end_seen:
        return window
    return Window(window.start_s, max((node.shift_s + node.last_s for node in nodes), default=None), end_seen=False)


def _copying_s(node: NodePart, window: Window, shift_s: float) -> float | None:
    """Returns the seconds with copies in flight while the command ran; None without samples.

    A sample says how many copies were in flight on average, not when: the node's own sum of times with any in flight,
    and the moment of the last file, correct what short bursts would add.
    """
    if not node.samples:
        return None
    staged_s = inf if node.staged_s is None else node.staged_s
    first_s, last_s = window.start_s - shift_s, inf if window.end_s is None else window.end_s - shift_s
    inside_s = total_s = 0.0
    for sample in node.samples:
        start_s = sample.start_s
        end_s = min(start_s + sample.length_s, staged_s)
        if sample.busy > 0 and end_s > start_s:
            share = min(1.0, sample.busy)
            total_s += (end_s - start_s) * share
            inside_s += max(0.0, min(end_s, last_s) - max(start_s, first_s)) * share
    busy_s = node.totals.copy_busy_s
    return inside_s if busy_s is None or total_s <= busy_s else inside_s * max(0.0, busy_s) / total_s


# ---- virtual nodes: several on one machine, whose daemons all see the whole command ----


def _is_virtual(node: NodePart) -> bool:
    """Returns whether a node is virtual, by its name `HOST.vINDEX`."""
    return node.node_count > 1 and node.host.endswith(f".v{node.node_index}")


def settled(nodes: Sequence[Digest]) -> list[Digest]:
    """Returns the nodes with the counts of virtual ones corrected: the first one that reported gets what all missed.

    A process that attached to one of them counts as missed on none, and one that attached to none is one process,
    however many daemons saw it.
    """
    virtual = [node for node in nodes if _is_virtual(node.part)]
    if not virtual:
        return list(nodes)
    missed, count = _missed_by_all(virtual)

    def corrected(node: Digest, *, first: bool) -> Digest:
        examples = missed[:MOST_EXAMPLES] if first else ()
        coverage = replace(node.coverage, processes_missed=count if first else 0, missed_examples=examples)
        return replace(node, coverage=coverage)

    speaker = next((node for node in virtual if node.speaks), virtual[0])
    return [corrected(node, first=node is speaker) if _is_virtual(node.part) else node for node in nodes]


def _missed_by_all(virtual: Sequence[Digest]) -> tuple[tuple[MissedProcess, ...], int | None]:
    """Returns the processes that attached to none of the virtual nodes, and how many they are.

    Which processes attached to a node that was lost is not known; of those that the others saw, only the ones that were
    started with another PYTHONPATH are then known to have attached nowhere, and without any the number is not known.
    """
    attached = frozenset[int]().union(*(node.pids for node in virtual))
    missed = {m.pid: m for node in virtual for m in node.part.missed_processes if m.pid not in attached}
    well = sum(node.state in (Presence.OK, Presence.RUNNING) for node in virtual)
    if well < virtual[0].part.node_count:
        certain = tuple(m for m in missed.values() if m.pythonpath is not None)
        return certain, len(certain) or (None if missed else 0)
    unlisted = (_unlisted(node.part, len(attached) - len(node.pids)) for node in virtual)
    return tuple(missed.values()), max(len(missed), *unlisted)


def _unlisted(node: NodePart, elsewhere: int) -> int:
    """Returns how many processes a node missed, less those that attached elsewhere, if it missed more than it lists."""
    return max(0, node.missed_count - elsewhere) if node.missed_count > len(node.missed_processes) else 0
