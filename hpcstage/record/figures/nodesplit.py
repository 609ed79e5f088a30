"""Measures on one node how long its processes waited and computed, before the wall time is known. Pure.

A process waits while a thread of it is inside a call on a dataset's file (an open, a want, a read, a stat, a listing)
and none of its threads runs. Waits of several threads at the same moment are one wait, and a wait of one thread beside
the computing of another is none.

* Where at most one thread was inside such calls at a time, the time inside them is the wait. It is measured exactly.
* Where several threads were, the daemon's looks at the threads tell in which share of that time no other thread ran
  (`daemon.process.looks`). The time itself is measured exactly, including that before the first look.
* Where files were mapped into memory (a page fault is no call, and neither the count of faults nor the bytes of
  /proc/PID/io tell of those on a network file system), the share of looks at which all threads rested and one was in a
  page fault, times the life of the process, is added. With too few looks the wait counts as not measured.

A process computes while it lives and does not wait. The times of several reading processes of a node are added and
divided by the mean number of them that lived at a time, over the time in which any did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hpcstage.record.figures import tally
from hpcstage.record.figures.waits import Shares, shares_of, waited_ns
from hpcstage.record.parts.part import NodePart, ProcessPart, RunPart

NS = 1e9
ENOUGH = 0.5
"""At least this share of the processes must have measured their waits to stand for all."""
READER_SHARE = 0.5
"""The main process counts as the reader if it did at least this share of all opens."""


@dataclass(frozen=True)
class Split:
    """Seconds of one process by what it did; None: not measured."""

    compute_s: float | None = None
    wait_source_s: float | None = None
    wait_local_s: float | None = None
    preprocess_s: float | None = None


@dataclass(frozen=True)
class Loader:
    """A training process with PyTorch's loader."""

    span_ns: int
    wait_ns: int


@dataclass(frozen=True)
class Reader:
    """A process that reads by itself."""

    begin_ns: int
    life_ns: int
    """0: hpcstage did not see how long the process lived."""
    waits: tuple[float, float] | None
    """Nanoseconds that the process waited for the source and for staged copies. None: not measured."""


@dataclass
class Measured:
    """The times of one node's processes that the time split needs."""

    attached: bool = False
    loaders: Sequence[Loader] = ()
    shares: Shares | None = None
    readers: Sequence[Reader] = ()
    reads_known: bool = True
    said: list[str] = field(default_factory=list)


def measured_of(run: RunPart, node: NodePart) -> Measured:
    """Measures the training processes where there are any, else the processes that read."""
    trainers = [p for p in node.processes if tally.count(p, "loader_steps") > 0]
    found = Measured(attached=bool(node.processes))
    if trainers:
        found.shares = shares_of(node, trainers, found.said)
        found.loaders = [_loader(p) for p in trainers]
        return found
    child_pid = run.child_pid if node.host == run.host else None
    readers = _readers(child_pid, node.processes, found.said)
    found.readers = [_reader(p, child_pid, found.said) for p in readers]
    found.reads_known = any(reader.waits is not None for reader in found.readers)
    return found


def _loader(process: ProcessPart) -> Loader:
    span_ns = max(0, tally.count(process, "loader_last_ns") - tally.count(process, "loader_first_ns"))
    return Loader(span_ns, tally.count(process, "loader_wait_ns"))


def _reader(process: ProcessPart, child_pid: int | None, said: list[str]) -> Reader:
    begin_ns, life_ns = tally.count(process, "attach_ns"), tally.life_ns(process)
    if process.pid == child_pid and not tally.count(process, "exit_ns"):
        life_ns = 0  # it lived as long as the command
    waits = waited_ns(process, life_ns)
    if waits is None and tally.reads_known(process):
        how = "files are mapped into memory" if tally.maps(process) else "several threads read at once"
        say(said, f"{how}, and too few looks at the threads tell what they waited for: not measured")
    if process.processes > 1 and waits is not None:  # as one that lived while any of them did
        span_ns = min(life_ns, max(0, tally.count(process, "exit_ns") - begin_ns))
        share = span_ns / life_ns if life_ns else 1.0
        life_ns, waits = span_ns, (waits[0] * share, waits[1] * share)
    return Reader(begin_ns, life_ns, waits)


def _readers(child_pid: int | None, processes: Sequence[ProcessPart], said: list[str]) -> list[ProcessPart]:
    """Returns the processes whose waits are the program's: its main one, or all that read if that reads little."""
    reading = sorted((p for p in processes if _reads(p)), key=tally.opens_of, reverse=True)
    if not reading:
        return []
    opens = sum(tally.opens_of(p) for p in reading)
    main = next((p for p in reading if p.pid == child_pid), reading[0])
    if tally.opens_of(main) >= READER_SHARE * opens:
        return [main]
    said.append(f"{tally.number(reading)} processes read; what others waited for them is not measured")
    return reading


def _reads(process: ProcessPart) -> bool:
    """Returns whether it opened files, or listed or looked at them at the source."""
    return bool(tally.opens_of(process) or tally.count(process, "source_stats") or tally.count(process, "listings"))


def say(said: list[str], sentence: str) -> None:
    """Adds a sentence once."""
    if sentence not in said:
        said.append(sentence)


def splits_of(measured: Measured, wall_s: float) -> list[Split]:
    """Returns a split per training process, else one of all readers of the node, within the wall time."""
    shares = measured.shares
    if shares is not None:
        return [_of_loader(loader, wall_s, shares) for loader in measured.loaders]
    return [_of_readers(measured.readers, wall_s)] if measured.readers else []


def _of_loader(loader: Loader, wall_s: float, shares: Shares) -> Split:
    span_s = min(loader.span_ns / NS, wall_s)
    wait_s = min(loader.wait_ns / NS, span_s)
    parts = [None if share is None else wait_s * share for share in (shares.source, shares.local, shares.preprocess)]
    return Split(span_s - wait_s, *parts)


def _of_readers(readers: Sequence[Reader], wall_s: float) -> Split:
    """Returns the split of the measured readers, if they are enough to stand for all."""
    known = [reader for reader in readers if reader.waits is not None]
    if not known or len(known) < ENOUGH * len(readers):
        return Split()
    at_once = _at_once(readers, wall_s) * len(known) / len(readers)
    parts = [_of_reader(reader, wall_s) for reader in known]
    compute_s, source_s, local_s = (sum(column) / at_once for column in zip(*parts, strict=True))
    return Split(compute_s, source_s, local_s)


def _of_reader(reader: Reader, wall_s: float) -> tuple[float, float, float]:
    life_s = min(reader.life_ns / NS, wall_s) if reader.life_ns else wall_s
    source_ns, local_ns = reader.waits or (0.0, 0.0)
    source_s = min(source_ns / NS, life_s)
    local_s = min(local_ns / NS, life_s - source_s)
    return life_s - source_s - local_s, source_s, local_s


def _at_once(readers: Iterable[Reader], wall_s: float) -> float:
    """Returns the mean number of readers that lived at a time, over the time in which any did."""
    end_ns, covered_ns, lived_ns = 0.0, 0.0, 0.0
    for reader in sorted(readers, key=lambda reader: reader.begin_ns):
        life_ns = reader.life_ns or wall_s * NS
        begin_ns = max(float(reader.begin_ns), end_ns)
        end_ns = max(end_ns, reader.begin_ns + life_ns)
        covered_ns += max(0.0, end_ns - begin_ns)
        lived_ns += life_ns
    return max(1.0, lived_ns / covered_ns) if covered_ns else 1.0


def fit(split: Split, wall_s: float) -> Split:
    """Scales the parts down where they exceed the wall time, as several clocks or several reading threads may do."""
    values = [split.compute_s, split.wait_source_s, split.wait_local_s, split.preprocess_s]
    taken = sum(value for value in values if value is not None)
    factor = min(1.0, wall_s / taken) if taken > 0 else 1.0
    return Split(*(None if value is None else max(0.0, value * factor) for value in values))


def mean(splits: Sequence[Split]) -> Split:
    """Returns the mean of splits; a part that is unknown in one of them is unknown."""
    return Split(
        _mean_of([s.compute_s for s in splits]),
        _mean_of([s.wait_source_s for s in splits]),
        _mean_of([s.wait_local_s for s in splits]),
        _mean_of([s.preprocess_s for s in splits]),
    )


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None
