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

A loader's waits are divided among the source, the local disk, and neither. A batch is read by W processes (the loader's
workers; the training process itself if it has none). While the training process waits for w seconds, W * w seconds of
their work pass. If they were blocked for S seconds at the source and L seconds locally in that interval, min(w, (S + L)
/ W) of the wait is explained by reading and split in the proportion S : L; they must have spent the rest on decoding
and collating. The sum goes over the daemon's samples, and a wait that ended in one is compared with the time blocked
since the wait can have begun, so that waits of the first epoch are not explained by reads of the second; where the
samples do not hold the waits, it goes over the whole run. Each node's waits are divided by its own reads. Reading comes
first, so `preprocess_s` is the least that preprocessing can have taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from hpcstage.record.figures import counts
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import ProcessPart, Sample
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import Waits
from hpcstage.units import NS_PER_S

ENOUGH_SHARE = 0.5
"""At least this share of the processes must have measured their waits to stand for all."""
READER_SHARE = 0.5
"""The main process counts as the reader if it did at least this share of all opens."""


@dataclass(frozen=True)
class Split(Waits):
    """Seconds of one process by what it did; None: not measured."""

    compute_s: float | None = None
    wait_source_s: float | None = None
    wait_local_s: float | None = None
    preprocess_s: float | None = None

    @property
    def measured_s(self) -> float:
        """Returns the sum of the parts that were measured."""
        return sum((value for value in astuple(self) if value is not None), 0.0)


@dataclass(frozen=True)
class LoaderWaits:
    """A training process with PyTorch's loader."""

    span_ns: int
    wait_ns: int


@dataclass(frozen=True)
class ReaderWaits:
    """A process that reads by itself."""

    begin_ns: int
    life_ns: int
    """0: hpcstage did not see how long the process lived."""
    waits: tuple[float, float] | None
    """Nanoseconds that the process waited for the source and for staged copies. None: not measured."""


@dataclass(frozen=True)
class ProcessTimes:
    """The times of one node's processes that the time split needs."""

    attached: bool
    loaders: Sequence[LoaderWaits] = ()
    shares: WaitShares | None = None
    readers: Sequence[ReaderWaits] = ()
    reads_known: bool = True
    said: Sequence[str] = ()
    """Sentences that say what was not measured."""


def times_of(run: RunPart, node: NodePart) -> ProcessTimes:
    """Measures the training processes where there are any, else the processes that read."""
    trainers = [p for p in node.processes if counts.count(p, "loader_steps") > 0]
    said: list[str] = []
    if trainers:
        shares = shares_of(node, trainers, said)
        return ProcessTimes(True, [_loader(p) for p in trainers], shares, said=said)
    child_pid = run.child_pid if node.host == run.host else None
    readers = [_reader(p, child_pid, said) for p in _readers(child_pid, node.processes, said)]
    known = any(reader.waits is not None for reader in readers)
    return ProcessTimes(bool(node.processes), readers=readers, reads_known=known, said=said)


def _loader(process: ProcessPart) -> LoaderWaits:
    span_ns = max(0, counts.count(process, "loader_last_ns") - counts.count(process, "loader_first_ns"))
    return LoaderWaits(span_ns, counts.count(process, "loader_wait_ns"))


def _reader(process: ProcessPart, child_pid: int | None, said: list[str]) -> ReaderWaits:
    begin_ns, life_ns = counts.count(process, "attach_ns"), counts.life_ns(process)
    if process.pid == child_pid and not counts.count(process, "exit_ns"):
        life_ns = 0  # it lived as long as the command
    waits = _waited_ns(process, life_ns)
    if waits is None and counts.reads_known(process):
        how = "files are mapped into memory" if counts.maps(process) else "several threads read at once"
        say(said, f"{how}, and too few looks at the threads tell what they waited for: not measured")
    if process.processes > 1 and waits is not None:  # as one that lived while any of them did
        span_ns = min(life_ns, max(0, counts.count(process, "exit_ns") - begin_ns))
        share = span_ns / life_ns if life_ns else 1.0
        life_ns, waits = span_ns, (waits[0] * share, waits[1] * share)
    return ReaderWaits(begin_ns, life_ns, waits)


def _readers(child_pid: int | None, processes: Sequence[ProcessPart], said: list[str]) -> list[ProcessPart]:
    """Returns the processes whose waits are the program's: its main one, or all that read if that reads little."""
    reading = sorted((p for p in processes if _reads(p)), key=counts.opens_of, reverse=True)
    if not reading:
        return []
    opens = sum(counts.opens_of(p) for p in reading)
    main = next((p for p in reading if p.pid == child_pid), reading[0])
    if counts.opens_of(main) >= READER_SHARE * opens:
        return [main]
    said.append(f"{counts.number(reading)} processes read; what others waited for them is not measured")
    return reading


def _reads(process: ProcessPart) -> bool:
    """Returns whether it opened files, or listed or looked at them at the source."""
    return bool(counts.opens_of(process) or counts.count(process, "source_stats") or counts.count(process, "listings"))


def say(said: list[str], sentence: str) -> None:
    """Adds a sentence once."""
    if sentence not in said:
        said.append(sentence)


def split_of(times: ProcessTimes, wall_s: float | None) -> Split:
    """Returns the mean split of a node's processes within the wall time."""
    splits = splits_of(times, wall_s) if wall_s is not None and times.reads_known else []
    return fit(mean(splits), wall_s) if wall_s is not None and splits else Split()


def splits_of(times: ProcessTimes, wall_s: float) -> list[Split]:
    """Returns a split per training process, else one of all readers of the node, within the wall time."""
    if times.shares is not None:
        return [_of_loader(loader, wall_s, times.shares) for loader in times.loaders]
    return [_of_readers(times.readers, wall_s)] if times.readers else []


def _of_loader(loader: LoaderWaits, wall_s: float, shares: WaitShares) -> Split:
    span_s = min(loader.span_ns / NS_PER_S, wall_s)
    wait_s = min(loader.wait_ns / NS_PER_S, span_s)
    parts = [None if share is None else wait_s * share for share in (shares.source, shares.local, shares.preprocess)]
    return Split(span_s - wait_s, *parts)


def _of_readers(readers: Sequence[ReaderWaits], wall_s: float) -> Split:
    """Returns the split of the measured readers, if they are enough to stand for all."""
    known = [reader for reader in readers if reader.waits is not None]
    if not known or len(known) < ENOUGH_SHARE * len(readers):
        return Split()
    at_once = _at_once(readers, wall_s) * len(known) / len(readers)
    parts = [_of_reader(reader, wall_s) for reader in known]
    compute_s, source_s, local_s = (sum(column) / at_once for column in zip(*parts, strict=True))
    return Split(compute_s, source_s, local_s)


def _of_reader(reader: ReaderWaits, wall_s: float) -> tuple[float, float, float]:
    life_s = min(reader.life_ns / NS_PER_S, wall_s) if reader.life_ns else wall_s
    source_ns, local_ns = reader.waits or (0.0, 0.0)
    source_s = min(source_ns / NS_PER_S, life_s)
    local_s = min(local_ns / NS_PER_S, life_s - source_s)
    return life_s - source_s - local_s, source_s, local_s


def _at_once(readers: Iterable[ReaderWaits], wall_s: float) -> float:
    lives = [(reader.begin_ns, reader.life_ns or wall_s * NS_PER_S) for reader in readers]
    return counts.at_once((begin_ns, begin_ns + life_ns, life_ns) for begin_ns, life_ns in lives)


def fit(split: Split, wall_s: float) -> Split:
    """Scales the parts down where they exceed the wall time, as several clocks or several reading threads may do."""
    taken = split.measured_s
    factor = min(1.0, wall_s / taken) if taken > 0 else 1.0
    return Split(*(None if value is None else max(0.0, value * factor) for value in astuple(split)))


def mean(splits: Sequence[Split]) -> Split:
    """Returns the mean of splits; a part that is unknown in one of them is unknown."""
    return Split(*(_mean_of(column) for column in zip(*map(astuple, splits), strict=True)))


def _mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None


# ---- the waits of one process, and what a loader's waits were for ----

SAMPLED_SHARE = 0.5
"""The samples are used if they hold at least this share of the waits that the processes counted."""
LOOKED_SHARE = 0.5
"""The daemon's looks at a process are used if they cover at least this share of its life and LEAST_LOOKED_NS."""
LEAST_LOOKED_NS = 500_000_000


@dataclass(frozen=True)
class WaitShares:
    """Shares of the waits; None: not measured. They add up to 1 or are all None."""

    source: float | None
    local: float | None
    preprocess: float | None


SOURCE_NS = ("want_ns", "source_open_ns", "source_read_ns", "source_stat_ns", "listing_ns")
Interval = tuple[float, float, float]
"""Nanoseconds, summed over processes: waits of the loaders, time inside calls at the source, and on staged copies."""


def _blocked_ns(process: ProcessPart) -> tuple[int, int]:
    """Returns the time inside opens, wants, reads, stats and listings at the source, and that inside opens and reads of
    staged copies, in nanoseconds, summed over the threads of a process."""
    source = sum(counts.count(process, n) for n in SOURCE_NS)
    local = sum(counts.count(process, n) for n in ("hit_open_ns", "local_read_ns"))
    return source, local


def _waited_ns(process: ProcessPart, life_ns: int) -> tuple[float, float] | None:
    """Returns how long a process that reads by itself waited for the source and for staged copies, in nanoseconds;
    None: not measured.

    The head of this module says what a wait is where several threads read, or where files are mapped.
    """
    if not counts.reads_known(process):
        return None
    source_ns = counts.count(process, "blocked_source_ns")
    local_ns = max(0, counts.count(process, "blocked_ns") - source_ns)
    several = counts.count(process, "readers") > 1
    if not (several or counts.maps(process)):
        return float(source_ns), float(local_ns)
    looked_ns = counts.count(process, "looked_ns")
    if looked_ns < max(LEAST_LOOKED_NS, LOOKED_SHARE * life_ns):
        return None
    whole = max(1.0, life_ns / looked_ns)
    calls_ns = {"source": source_ns, "local": local_ns}
    waits = [
        inside_ns * (_resting(process, where) if several else 1.0)
        + counts.count(process, f"look_fault_{where}_ns") * whole
        for where, inside_ns in calls_ns.items()
    ]
    return waits[0], waits[1]


def _resting(process: ProcessPart, where: str) -> float:
    """Returns the share of the looks at threads inside calls in which no other thread ran."""
    inside_ns = counts.count(process, f"look_inside_{where}_ns")
    return counts.count(process, f"look_wait_{where}_ns") / inside_ns if inside_ns else 1.0


def shares_of(node: NodePart, trainers: Sequence[ProcessPart], unmeasured: list[str]) -> WaitShares:
    """Returns how the waits of a node's training processes divide."""
    families = [_family_of(trainer, node) for trainer in trainers]
    members = [process for family in families for process in family]
    waited = counts.total(trainers, "loader_wait_ns")
    if not waited:
        return WaitShares(0.0, 0.0, 0.0)
    if not any(counts.opens_of(p) for p in members):
        unmeasured.append("no opens were seen in the processes that read for the loader: its waits are not divided")
        return WaitShares(None, None, None)
    if not all(counts.reads_known(p) for p in members if counts.opens_of(p)):
        unmeasured.append("this layer does not measure reads: the loader's waits are not divided")
        return WaitShares(None, None, None)
    if any(counts.maps(p) for p in members):
        return _mapped(members, waited, unmeasured)
    readers = max(1.0, sum(_workers(t) for t in trainers) / len(trainers))
    return _explain(_intervals(node, members, waited), readers)


def _mapped(members: Sequence[ProcessPart], waited: int, unmeasured: list[str]) -> WaitShares:
    """Divides the waits where processes map files, by the daemon's looks over the whole run."""
    reading = [p for p in members if counts.opens_of(p)]
    waits = [_waited_ns(p, counts.life_ns(p)) for p in reading]
    known = [pair for pair in waits if pair is not None]
    if len(known) < len(reading):
        unmeasured.append("files are mapped into memory: what the loader's waits were for is not measured")
        return WaitShares(None, None, None)
    whole = float(waited), sum(source for source, _ in known), sum(local for _, local in known)
    return _explain([whole], float(len(reading)))


def _workers(trainer: ProcessPart) -> int:
    return max(1, counts.count(trainer, "loader_workers"))


def _family_of(trainer: ProcessPart, node: NodePart) -> list[ProcessPart]:
    """Returns a process and its descendants."""
    pids, family = {trainer.pid}, [trainer]
    rest = [p for p in node.processes if p is not trainer]
    while True:
        born = [p for p in rest if p.parent_pid in pids]
        if not born:
            return family
        rest = [p for p in rest if p.parent_pid not in pids]
        family += born
        pids |= {p.pid for p in born if p.pid}


def _intervals(node: NodePart, members: Sequence[ProcessPart], waited_ns: int) -> list[Interval]:
    sampled = _sampled(node.samples)
    if sum(wait_ns for wait_ns, _, _ in sampled) >= SAMPLED_SHARE * waited_ns:
        return sampled
    blocked = [_blocked_ns(process) for process in members]
    return [(waited_ns, sum(s for s, _ in blocked), sum(local for _, local in blocked))]


def _sampled(samples: Sequence[Sample]) -> list[Interval]:
    """Returns for each sample in which waits ended these waits, and the time blocked from when they can have begun to
    the sample's end."""
    found: list[Interval] = []
    begin = 0
    source = local = 0.0
    for at, sample in enumerate(samples):
        source += sample.blocked_source_ns
        local += max(0, sample.blocked_ns - sample.blocked_source_ns)
        if sample.loader_wait_ns <= 0:
            continue
        end_s = sample.start_s + sample.length_s
        since_s = min(sample.start_s, end_s - sample.loader_wait_ns / NS_PER_S)
        while begin < at and samples[begin].start_s + samples[begin].length_s <= since_s:
            source -= samples[begin].blocked_source_ns
            local -= max(0, samples[begin].blocked_ns - samples[begin].blocked_source_ns)
            begin += 1
        found.append((sample.loader_wait_ns, max(0.0, source), max(0.0, local)))
    return found


def _explain(intervals: Iterable[Interval], readers: float) -> WaitShares:
    source = local = total = 0.0
    for wait_ns, source_ns, local_ns in intervals:
        total += wait_ns
        reading = source_ns + local_ns
        if reading > 0:
            explained = min(wait_ns, reading / readers) / reading
            source += explained * source_ns
            local += explained * local_ns
    return WaitShares(source / total, local / total, max(0.0, 1.0 - (source + local) / total))
