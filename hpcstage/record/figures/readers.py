"""Says which processes read, how many at a time, and what else they did: the input of the estimate in `savings`. Pure.

There are two kinds. Readers are processes that read by themselves, and training processes whose loader has no workers.
Loaders are training processes whose workers read ahead of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcstage.record.figures import counts
from hpcstage.record.figures.readahead import Pieces, pieces_of
from hpcstage.record.figures.waits import family_of, waited_ns
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import ProcessPart
from hpcstage.units import NS_PER_S


@dataclass(frozen=True)
class ReaderUse:
    """All processes of a node that read by themselves."""

    opens: int
    at_once: float
    """The mean number of them that read at a time."""
    threads: int
    """The most threads of one process that read at once."""
    phase_s: float
    """The time from the first to the last call of each process, summed."""
    waited_s: float | None
    """Seconds that the processes waited for the source and for copies, summed; None: not measured."""
    queued_s: float
    """About how long, at most, the main thread of one of them waited for a processor outside of its calls."""
    want_s: float
    """Seconds that their threads waited for answers of the daemon, summed."""
    tail_s: float
    """The time from the last call of each process to its end, summed; at most, where several are one row."""
    pieces: Pieces


@dataclass(frozen=True)
class LoaderUse:
    """A training process whose loader has workers."""

    steps: int
    epochs: int
    workers: int
    opens: int
    span_s: float
    wait_s: float
    cpu_s: float
    """Processor time of its workers."""
    local_file_s: float
    """Seconds to open and read a staged copy, on average."""
    local_wait_s: float | None
    """The part of `wait_s` that the source does not explain."""
    queued_s: float
    """Seconds that its main thread waited for a processor."""
    want_s: float
    """Seconds that its workers waited for answers of the daemon, summed."""
    pieces: Pieces
    """How its workers read their files."""


@dataclass(frozen=True)
class Program:
    """All processes of a node that read."""

    loaders: tuple[LoaderUse, ...] = ()
    readers: ReaderUse | None = None
    swapped: int = 0
    """Opens that got a staged copy."""
    moved: int = 0
    """Files that were opened at the source and went on with their copies."""
    arrived: int = 0
    """Bytes that were read of files whose copies were on their way."""
    strangers: int = 0
    """Opens by processes that are neither readers nor belong to a loader."""
    size_bytes: int | None = None
    """Bytes that were read from copies and at the source; None where not all reads were measured."""


def program_of(node: NodePart, source_share: float | None) -> Program:
    """Returns the program of a node. `source_share` is the part of the loaders' waits that the source explains."""
    trainers = [p for p in node.processes if counts.count(p, "loader_steps") > 0]
    loading = [p for p in trainers if counts.count(p, "loader_workers") > 0]
    families = [family_of(p, node) for p in loading]
    members = {id(p) for family in families for p in family}
    reading = [p for p in node.processes if counts.opens_of(p) and id(p) not in members]
    alone = [p for p in reading if p in trainers] if trainers else reading
    reads = [
        counts.source_reads(node.processes, "source_read_bytes"),
        counts.local_reads(node.processes, "local_read_bytes"),
    ]
    return Program(
        loaders=tuple(_loader(p, family, source_share) for p, family in zip(loading, families, strict=True)),
        readers=_readers(alone) if alone else None,
        swapped=sum(counts.swapped_of(p) for p in node.processes),
        moved=counts.total(node.processes, "moved_opens"),
        arrived=counts.total(node.processes, "arrived_read_bytes"),
        strangers=sum(counts.opens_of(p) for p in reading if p not in alone),
        size_bytes=None if None in reads else sum(value or 0 for value in reads),
    )


def _loader(trainer: ProcessPart, family: Sequence[ProcessPart], source_share: float | None) -> LoaderUse:
    workers = [p for p in family if p is not trainer]
    local_ns = counts.total(family, "hit_open_ns") + counts.total(family, "local_read_ns")
    swapped = sum(counts.swapped_of(p) for p in family)
    span_ns = counts.count(trainer, "loader_last_ns") - counts.count(trainer, "loader_first_ns")
    wait_s = counts.count(trainer, "loader_wait_ns") / NS_PER_S
    return LoaderUse(
        steps=counts.count(trainer, "loader_steps"),
        epochs=max(1, counts.count(trainer, "loader_epochs")),
        workers=counts.count(trainer, "loader_workers"),
        opens=sum(counts.opens_of(p) for p in family),
        span_s=max(0, span_ns) / NS_PER_S,
        wait_s=wait_s,
        cpu_s=counts.total(workers, "cpu_ns") / NS_PER_S,
        local_file_s=local_ns / NS_PER_S / swapped if swapped else 0.0,
        local_wait_s=None if source_share is None else wait_s * (1 - source_share),
        queued_s=counts.count(trainer, "queued_ns") / NS_PER_S,
        want_s=counts.total(family, "want_ns") / NS_PER_S,
        pieces=pieces_of(workers),
    )


def _readers(processes: Sequence[ProcessPart]) -> ReaderUse:
    phases = [(counts.count(p, "first_ns"), counts.count(p, "last_ns"), counts.phase_ns(p)) for p in processes]
    lived_ns = sum(lived_ns for _, _, lived_ns in phases)
    waits = [waited_ns(p, counts.life_ns(p)) for p in processes]
    known = [sum(pair) for pair in waits if pair is not None]
    return ReaderUse(
        opens=sum(counts.opens_of(p) for p in processes),
        at_once=counts.at_once(phases),
        threads=max(1, *(counts.count(p, "readers") for p in processes)),
        phase_s=lived_ns / NS_PER_S,
        waited_s=sum(known) / NS_PER_S if len(known) == len(waits) else None,
        queued_s=max(counts.count(p, "queued_ns") for p in processes) / NS_PER_S * _outside(lived_ns / NS_PER_S, waits),
        want_s=counts.total(processes, "want_ns") / NS_PER_S,
        tail_s=sum(map(counts.tail_ns, processes)) / NS_PER_S,
        pieces=pieces_of(processes),
    )


def _outside(lived_s: float, waits: Sequence[tuple[float, float] | None]) -> float:
    """Returns the share of the processes' time that was outside of calls."""
    inside_s = sum(sum(pair) for pair in waits if pair is not None) / NS_PER_S
    return max(0.0, 1 - inside_s / lived_s) if lived_s else 1.0
