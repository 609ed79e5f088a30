"""Reduces a node's part to the figures that the record needs of it, without its samples and processes. Pure.

The parts of a thousand nodes need not fit into memory: each is read once, and a few kilobytes of it stay. Times are
placed on the run's own axis: seconds since the wrapper started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from hpcstage.record.figures.counts import Histogram, by_layer, joined, opens_of, totals_of
from hpcstage.record.figures.track import Track, track_of
from hpcstage.record.figures.waits import UNMEASURED, NodeTimes, times_of
from hpcstage.record.parts.alive import Life
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.roster import clock_error_s, reason_of, says_something, state_of
from hpcstage.record.parts.rows import Sample
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import EpochRow, NodeRow, RunTotals, Split
from hpcstage.units import NS_PER_S

LEAST_WRITE_S = 2.0
"""A disk is judged if all transfers together wrote to it for longer than this: a few files say nothing about it."""
LEAST_BYTES = 16 * 2**20
"""The speed of a local disk is known if at least this many bytes were read from staged copies."""
MOST_EPOCHS = 1000


@dataclass(frozen=True)
class Digest:
    """The figures of one node."""

    part: NodePart
    """The part without samples, processes and other data that grow with the run."""
    row: NodeRow
    """What the record says of the node, as far as it needs no look at the others."""
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
    disk_write_s: float
    """Time of transfers in writes to the local disk."""
    track: Track | None
    epochs: tuple[EpochRow, ...]
    """Of node 0 only: the loaders of the other nodes go through the same ones."""
    split: Split = UNMEASURED
    relative_pace: float | None = None
    """How fast the source was for the node as a share of how fast it was for the others at the same moment; median."""


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
    row = NodeRow(
        host=node.host,
        state=state,
        why=reason_of(run, node, state, running),
        staged_s=None if node.staged_s is None else node.staged_s + shift_s,
        reader_bytes_per_s=_rate(seen, "source_read_bytes", "source_open_ns", "source_read_ns"),
        disk_write_share=write_s / copy_s if write_s > LEAST_WRITE_S else None,
        disk_read_bytes_per_s=_rate(seen, "local_read_bytes", "local_read_ns"),
        budget_bytes=node.budget_bytes,
        used_bytes=node.used_bytes,
    )
    if speaks := says_something(node):
        row = replace(
            row,
            staged_files=sum(dataset.staged_files for dataset in node.datasets),
            source_bytes=totals.source_bytes,
            peer_bytes=totals.peer_bytes,
            local_bytes=totals.local_bytes,
            opens=opens_of(seen),
        )
    return Digest(
        part=replace(node, samples=(), processes=(), hist_open={}, hist_read={}, errors=()),
        row=row,
        speaks=speaks,
        shift_s=shift_s,
        last_s=last_s,
        totals=totals,
        layers=layers,
        times=times_of(run, node, max(0.0, end_s - start_s)),
        copying_s=_copying_s(node, start_s, end_s),
        hist_open=joined([node.hist_open, *(p.hist_open for p in node.processes)]),
        hist_read=joined([node.hist_read, *(p.hist_read for p in node.processes)]),
        disk_write_s=write_s,
        track=track_of(node.samples, shift_s),
        epochs=_epochs(node, totals, shift_s) if node.node_index == 0 else (),
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


# ---- the epochs of PyTorch's loader


def _epochs(node: NodePart, totals: RunTotals, shift_s: float) -> tuple[EpochRow, ...]:
    """Returns the first epochs, with times on the run's axis. Nothing, where they cannot be told apart: fewer than two,
    two within one sample, or training processes that did not go through them side by side.

    The training processes count the epochs that their loaders went through to the end, and how long they waited for
    batches; samples of these counters say when. So an epoch ends with the sample in which the last process ended it.
    """
    trainers = _side_by_side(node)
    if not trainers:
        return ()
    groups = list(islice(_groups(node.samples, trainers), MOST_EPOCHS))
    if len(groups) < 2 or not all(groups):
        return ()
    return tuple(_row(number, group, totals, trainers, shift_s) for number, group in enumerate(groups))


def _side_by_side(node: NodePart) -> int:
    """Returns the number of training processes, if all went through as many epochs at the same time; else 0."""
    counts = [p.counters for p in node.processes if p.counters.get("loader_epochs")]
    if not counts or any(p.processes > 1 for p in node.processes if p.counters.get("loader_epochs")):
        return 0
    if len({one["loader_epochs"] for one in counts}) > 1:
        return 0
    first_ns, last_ns = ([one.get(name, 0) for one in counts] for name in ("loader_first_ns", "loader_last_ns"))
    return len(counts) if max(first_ns) <= min(last_ns) else 0


def _groups(samples: Sequence[Sample], trainers: int) -> Iterator[list[Sample]]:
    """Yields the samples of each epoch, from the first batch on; none for an epoch that ended in the same sample as the
    one before."""
    group: list[Sample] = []
    ended, count = 0, 0
    for sample in _from_first_batch(samples, trainers):
        group.append(sample)
        ended += sample.loader_epochs
        while ended >= (count + 1) * trainers:
            yield group
            group, count = [], count + 1


def _from_first_batch(samples: Sequence[Sample], trainers: int) -> Sequence[Sample]:
    """Returns the samples from that on in which the first batch was asked for: its wait is counted when it is over."""
    at = next((at for at, sample in enumerate(samples) if sample.loader_wait_ns or sample.loader_epochs), len(samples))
    if at == len(samples):
        return ()
    asked_s = samples[at].start_s + samples[at].length_s - samples[at].loader_wait_ns / NS_PER_S / trainers
    while at and samples[at].start_s > asked_s:
        at -= 1
    return samples[at:]


def _row(number: int, group: Sequence[Sample], totals: RunTotals, trainers: int, shift_s: float) -> EpochRow:
    length_s = group[-1].start_s + group[-1].length_s - group[0].start_s
    waited_s = sum(sample.loader_wait_ns for sample in group) / NS_PER_S / trainers
    source = sum(sample.copied_bytes + sample.shim_bytes for sample in group)
    return EpochRow(
        number=number,
        start_s=round(max(0.0, group[0].start_s + shift_s), 3),
        length_s=round(length_s, 3),
        loader_wait_s=round(min(waited_s, length_s), 3),
        source_bytes=None if totals.source_bytes is None else source,
        peer_bytes=None if totals.peer_bytes is None else sum(sample.peer_bytes for sample in group),
        local_bytes=None if totals.local_bytes is None else sum(sample.local_bytes for sample in group),
    )
