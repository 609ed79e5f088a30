"""What one node says about waiting and computing, before the wall time is known. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hpcstage.record import tally
from hpcstage.record.part import NodePart, ProcessPart, RunPart
from hpcstage.record.waits import Shares, blocked_ns, shares_of

NS = 1e9
READER_SHARE = 0.5
"""The main process counts as the reader if it did at least this share of all opens."""


@dataclass(frozen=True)
class Split:
    """Seconds of one process; they add up to its wall. None: not measured."""

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

    life_ns: int
    """0: its end was not seen."""
    source_ns: int
    local_ns: int


@dataclass
class Measured:
    """One node's processes, as far as they say something about the time split."""

    attached: bool = False
    loaders: Sequence[Loader] = ()
    shares: Shares | None = None
    readers: Sequence[Reader] = ()
    reads_known: bool = True
    said: list[str] = field(default_factory=list)


def measured_of(run: RunPart, node: NodePart) -> Measured:
    """Training processes where there are any, else the processes that read."""
    trainers = [p for p in node.processes if tally.count(p, "loader_steps") > 0]
    found = Measured(attached=bool(node.processes))
    if trainers:
        found.shares = shares_of(node, trainers, found.said)
        found.loaders = [_loader(p) for p in trainers]
        return found
    child_pid = run.child_pid if node.host == run.host else None
    readers = _readers(child_pid, node.processes, found.said)
    found.readers = [_reader(p) for p in readers]
    found.reads_known = all(tally.reads_known(p) for p in readers)
    if readers and found.reads_known:
        _check_reads(readers, found.said)
    return found


def _loader(process: ProcessPart) -> Loader:
    span_ns = max(0, tally.count(process, "loader_last_ns") - tally.count(process, "loader_first_ns"))
    return Loader(span_ns, tally.count(process, "loader_wait_ns"))


def _reader(process: ProcessPart) -> Reader:
    born_ns, died_ns = tally.count(process, "attach_ns"), tally.count(process, "exit_ns")
    return Reader(died_ns - born_ns if died_ns > born_ns > 0 else 0, *blocked_ns(process))


def _readers(child_pid: int | None, processes: Sequence[ProcessPart], said: list[str]) -> list[ProcessPart]:
    """The process whose waits are the program's: its main one, or all that read where that reads little itself."""
    reading = sorted((p for p in processes if tally.opens_of(p)), key=tally.opens_of, reverse=True)
    if not reading:
        return []
    opens = sum(tally.opens_of(p) for p in reading)
    main = next((p for p in reading if p.pid == child_pid), reading[0])
    if tally.opens_of(main) >= READER_SHARE * opens:
        return [main]
    said.append(f"{len(reading)} processes read; what others waited for them is not measured")
    return reading


def _check_reads(readers: Sequence[ProcessPart], said: list[str]) -> None:
    if not tally.total(readers, "source_reads") + tally.total(readers, "local_reads"):
        say(said, "files were opened but no read was seen (mmap?): waits inside such reads count as compute")


def say(said: list[str], sentence: str) -> None:
    """Once."""
    if sentence not in said:
        said.append(sentence)


def splits_of(measured: Measured, wall_s: float, said: list[str]) -> list[Split]:
    """One per training process, else one per reader, within the wall time."""
    shares = measured.shares
    if shares is not None:
        return [_of_loader(loader, wall_s, shares) for loader in measured.loaders]
    return [_of_reader(reader, wall_s, said) for reader in measured.readers]


def _of_loader(loader: Loader, wall_s: float, shares: Shares) -> Split:
    span_s = min(loader.span_ns / NS, wall_s)
    wait_s = min(loader.wait_ns / NS, span_s)
    parts = [None if share is None else wait_s * share for share in (shares.source, shares.local, shares.preprocess)]
    return Split(span_s - wait_s, *parts)


def _of_reader(reader: Reader, wall_s: float, said: list[str]) -> Split:
    life_s = min(reader.life_ns / NS, wall_s) if reader.life_ns else wall_s
    blocked_s = (reader.source_ns + reader.local_ns) / NS
    if blocked_s > life_s:
        say(said, "several threads read at once: their summed waits exceed the wall time and were scaled down")
    factor = min(1.0, life_s / blocked_s) if blocked_s > 0 else 1.0
    source_s, local_s = reader.source_ns / NS * factor, reader.local_ns / NS * factor
    return Split(max(0.0, life_s - source_s - local_s), source_s, local_s, None)


def fit(split: Split, wall_s: float) -> Split:
    """Scaled down where the parts exceed the wall (clocks of several processes, or several threads that read)."""
    values = [split.compute_s, split.wait_source_s, split.wait_local_s, split.preprocess_s]
    taken = sum(value for value in values if value is not None)
    factor = min(1.0, wall_s / taken) if taken > 0 else 1.0
    return Split(*(None if value is None else max(0.0, value * factor) for value in values))


def mean(splits: Sequence[Split]) -> Split:
    """A part that is not known of all of them is not known."""
    return Split(
        _mean_of([s.compute_s for s in splits]),
        _mean_of([s.wait_source_s for s in splits]),
        _mean_of([s.wait_local_s for s in splits]),
        _mean_of([s.preprocess_s for s in splits]),
    )


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None
