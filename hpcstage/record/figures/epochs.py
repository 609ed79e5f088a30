"""Says how long each epoch of PyTorch's loader took on a node, and where its bytes came from. Pure.

The training processes count the epochs that their loaders went through to the end, and how long they waited for
batches; samples of these counters say when. So an epoch ends with the sample in which the last process ended it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import Sample
from hpcstage.record.schema import EpochRow, RunTotals
from hpcstage.units import NS_PER_S

MOST_EPOCHS = 1000


def epochs_of(node: NodePart, totals: RunTotals, shift_s: float) -> tuple[EpochRow, ...]:
    """Returns the first epochs, with times on the run's axis. Nothing, where they cannot be told apart: fewer than two,
    two within one sample, or training processes that did not go through them side by side."""
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
