"""Reduces a node's part to the figures that the record needs of it, without its samples and processes. Pure.

The parts of a thousand nodes need not fit into memory: each is read once, and a few kilobytes of it stay. Times are
placed on the run's own axis: seconds since the wrapper started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hpcstage.record.figures.counts import Histogram, by_layer, joined, totals_of
from hpcstage.record.figures.epochs import epochs_of
from hpcstage.record.figures.track import Track, track_of
from hpcstage.record.figures.waits import NodeTimes, Split, times_of
from hpcstage.record.parts.alive import Life
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.roster import Presence, clock_error_s, reason_of, says_something, state_of
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import EpochRow, RunTotals
from hpcstage.units import NS_PER_S

LEAST_WRITE_S = 2.0
"""A disk is judged if all transfers together wrote to it for longer than this: a few files say nothing about it."""
LEAST_BYTES = 16 * 2**20
"""The speed of a local disk is known if at least this many bytes were read from staged copies."""


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
    last_s: float
    totals: RunTotals
    layers: dict[str, Counter[str]]
    """What its processes counted, by layer."""
    times: NodeTimes
    copying_s: float | None
    hist_open: Histogram
    hist_read: Histogram
    """Latencies of opens and of reads at the source, the copiers' and the program's together."""
    reader_bytes_per_s: float | None
    """The rate of one reader of its program at the source, with the opens."""
    disk_write_s: float
    """Time of transfers in writes to the local disk."""
    disk_write_share: float | None
    """The share of all their time that these writes took; None where they took less than LEAST_WRITE_S."""
    disk_read_bytes_per_s: float | None
    """The rate of one reader of staged copies; None where too little was read."""
    track: Track | None
    epochs: tuple[EpochRow, ...]
    """Of node 0 only: the loaders of the other nodes go through the same ones."""
    name: str = ""
    split: Split = field(default_factory=Split)
    relative_pace: float | None = None
    """How fast the source was for the node as a share of how fast it was for the others at the same moment; median."""

    @property
    def index(self) -> int:
        """Returns the node's index in the job."""
        return self.part.node_index


def digest_of(run: RunPart, node: NodePart, running: Life | None = None) -> Digest:
    """Computes all figures of a node that the record needs."""
    state = state_of(node, running)
    last_s = max(node.ended_s or 0.0, *(sample.start_s + sample.length_s for sample in node.samples[-1:]), 0.0)
    shift_s = node.started_unix_s - run.started_unix_s - clock_error_s(run, node, last_s)
    start_s = (run.child_started_s or 0.0) - shift_s
    end_s = last_s if run.child_ended_s is None else run.child_ended_s - shift_s
    layers = by_layer(node.processes)
    seen = joined(layers.values())
    totals = totals_of(node, seen)
    write_s = sum(sample.copy_write_ns for sample in node.samples) / NS_PER_S
    copy_s = write_s + sum(sample.copy_open_ns + sample.copy_read_ns for sample in node.samples) / NS_PER_S
    return Digest(
        part=replace(node, samples=(), processes=(), hist_open={}, hist_read={}, errors=()),
        state=state,
        why=reason_of(run, node, state, running),
        speaks=says_something(node),
        shift_s=shift_s,
        last_s=last_s,
        totals=totals,
        layers=layers,
        times=times_of(run, node, max(0.0, end_s - start_s)),
        copying_s=_copying_s(node, start_s, end_s),
        hist_open=joined([node.hist_open, *(p.hist_open for p in node.processes)]),
        hist_read=joined([node.hist_read, *(p.hist_read for p in node.processes)]),
        reader_bytes_per_s=_rate(seen, "source_read_bytes", "source_open_ns", "source_read_ns"),
        disk_write_s=write_s,
        disk_write_share=write_s / copy_s if write_s > LEAST_WRITE_S else None,
        disk_read_bytes_per_s=_rate(seen, "local_read_bytes", "local_read_ns"),
        track=track_of(node.samples, shift_s),
        epochs=epochs_of(node, totals, shift_s) if node.node_index == 0 else (),
    )


def _rate(seen: Counter[str], size_name: str, *times: str) -> float | None:
    """Returns the rate of one reader of the node's program; None where it read too little."""
    read_ns = sum(seen[name] for name in times)
    return NS_PER_S / (read_ns / seen[size_name]) if seen[size_name] >= LEAST_BYTES and read_ns else None


def _copying_s(node: NodePart, start_s: float, end_s: float) -> float | None:
    """Returns the seconds with copies in flight between these times; None without samples.

    A sample says how many copies were in flight on average, not when: the node's own sum of times with any in flight
    corrects what short bursts would add.
    """
    if not node.samples:
        return None
    inside_s = total_s = 0.0
    for sample in node.samples:
        share = min(1.0, sample.busy)
        total_s += sample.length_s * share
        inside_s += max(0.0, min(sample.start_s + sample.length_s, end_s) - max(sample.start_s, start_s)) * share
    busy_s = node.totals.copy_busy_s
    return inside_s if busy_s is None or total_s <= busy_s else inside_s * max(0.0, busy_s) / total_s


def _is_virtual(node: NodePart) -> bool:
    """Returns whether a node is one of several on one machine, by its name `HOST.vINDEX`."""
    return node.node_count > 1 and node.host.endswith(f".v{node.node_index}")


def missed_of(nodes: Sequence[Digest]) -> int | None:
    """Returns how many Python processes never attached; None where no node knows: the daemons of virtual nodes all see
    the whole command."""
    known = [node.part for node in nodes if not _is_virtual(node.part)]
    return sum(part.missed_count for part in known) if known else None
