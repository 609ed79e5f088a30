"""Divides a loader's waits among the source, the local disk, and neither. Pure.

A batch is read by W processes (the loader's workers; the training process itself if it has none). While the training
process waits for w seconds, W * w seconds of their work pass. If they were blocked for S seconds at the source and L
seconds locally in that interval, min(w, (S + L) / W) of the wait is explained by reading and split in the proportion
S : L; they must have spent the rest on decoding and collating. The sum goes over the daemon's samples, and a wait that
ended in one is compared with the time blocked since the wait can have begun, so that waits of the first epoch are not
explained by reads of the second; where the samples do not hold the waits, it goes over the whole run. Each node's waits
are divided by its own reads. Reading comes first, so `preprocess_s` is the least that preprocessing can have taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcstage.record.figures import tally
from hpcstage.record.parts.part import NodePart, ProcessPart, Sample

SAMPLED = 0.5
"""The samples are used if they hold at least this share of the waits that the processes counted."""

LOOKED = 0.5
"""The daemon's looks at a process are used if they cover at least this share of its life and LEAST_LOOKED_NS."""
LEAST_LOOKED_NS = 500_000_000


@dataclass(frozen=True)
class Shares:
    """Shares of the waits; None: not measured. They add up to 1 or are all None."""

    source: float | None
    local: float | None
    preprocess: float | None


NS = 1e9
SOURCE_NS = ("want_ns", "source_open_ns", "source_read_ns", "source_stat_ns", "listing_ns")
Interval = tuple[float, float, float]
"""Nanoseconds, summed over processes: waits of the loaders, time inside calls at the source, and on staged copies."""


def blocked_ns(process: ProcessPart) -> tuple[int, int]:
    """Returns the time inside opens, wants, reads, stats and listings at the source, and that inside opens and reads of
    staged copies, in nanoseconds, summed over the threads of a process."""
    source = sum(tally.count(process, n) for n in SOURCE_NS)
    local = sum(tally.count(process, n) for n in ("hit_open_ns", "local_read_ns"))
    return source, local


def waited_ns(process: ProcessPart, life_ns: int) -> tuple[float, float] | None:
    """Returns how long a process that reads by itself waited for the source and for staged copies, in nanoseconds;
    None: not measured.

    See `nodesplit` for what a wait is where several threads read, or where files are mapped.
    """
    if not tally.reads_known(process):
        return None
    source_ns = tally.count(process, "blocked_source_ns")
    local_ns = max(0, tally.count(process, "blocked_ns") - source_ns)
    several = tally.count(process, "readers") > 1
    if not (several or tally.maps(process)):
        return float(source_ns), float(local_ns)
    looked_ns = tally.count(process, "looked_ns")
    if looked_ns < max(LEAST_LOOKED_NS, LOOKED * life_ns):
        return None
    whole = max(1.0, life_ns / looked_ns)
    calls_ns = {"source": source_ns, "local": local_ns}
    waits = [
        inside_ns * (_resting(process, where) if several else 1.0)
        + tally.count(process, f"look_fault_{where}_ns") * whole
        for where, inside_ns in calls_ns.items()
    ]
    return waits[0], waits[1]


def _resting(process: ProcessPart, where: str) -> float:
    """Returns the share of the looks at threads inside calls in which no other thread ran."""
    inside_ns = tally.count(process, f"look_inside_{where}_ns")
    return tally.count(process, f"look_wait_{where}_ns") / inside_ns if inside_ns else 1.0


def shares_of(node: NodePart, trainers: Sequence[ProcessPart], unmeasured: list[str]) -> Shares:
    """Returns how the waits of a node's training processes divide."""
    families = [family_of(trainer, node) for trainer in trainers]
    members = [process for family in families for process in family]
    waited = tally.total(trainers, "loader_wait_ns")
    if not waited:
        return Shares(0.0, 0.0, 0.0)
    if not any(tally.opens_of(p) for p in members):
        unmeasured.append("no opens were seen in the processes that read for the loader: its waits are not divided")
        return Shares(None, None, None)
    if not all(tally.reads_known(p) for p in members if tally.opens_of(p)):
        unmeasured.append("this layer does not measure reads: the loader's waits are not divided")
        return Shares(None, None, None)
    if any(tally.maps(p) for p in members):
        return _mapped(members, waited, unmeasured)
    readers = max(1.0, sum(_workers(t) for t in trainers) / len(trainers))
    return _explain(_intervals(node, members, waited), readers)


def _mapped(members: Sequence[ProcessPart], waited: int, unmeasured: list[str]) -> Shares:
    """Divides the waits where processes map files, by the daemon's looks over the whole run."""
    reading = [p for p in members if tally.opens_of(p)]
    waits = [waited_ns(p, tally.life_ns(p)) for p in reading]
    known = [pair for pair in waits if pair is not None]
    if len(known) < len(reading):
        unmeasured.append("files are mapped into memory: what the loader's waits were for is not measured")
        return Shares(None, None, None)
    whole = float(waited), sum(source for source, _ in known), sum(local for _, local in known)
    return _explain([whole], float(len(reading)))


def _workers(trainer: ProcessPart) -> int:
    return max(1, tally.count(trainer, "loader_workers"))


def family_of(trainer: ProcessPart, node: NodePart) -> list[ProcessPart]:
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
    if sum(wait_ns for wait_ns, _, _ in sampled) >= SAMPLED * waited_ns:
        return sampled
    blocked = [blocked_ns(process) for process in members]
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
        since_s = min(sample.start_s, end_s - sample.loader_wait_ns / NS)
        while begin < at and samples[begin].start_s + samples[begin].length_s <= since_s:
            source -= samples[begin].blocked_source_ns
            local -= max(0, samples[begin].blocked_ns - samples[begin].blocked_source_ns)
            begin += 1
        found.append((sample.loader_wait_ns, max(0.0, source), max(0.0, local)))
    return found


def _explain(intervals: Iterable[Interval], readers: float) -> Shares:
    source = local = total = 0.0
    for wait_ns, source_ns, local_ns in intervals:
        total += wait_ns
        reading = source_ns + local_ns
        if reading > 0:
            explained = min(wait_ns, reading / readers) / reading
            source += explained * source_ns
            local += explained * local_ns
    return Shares(source / total, local / total, max(0.0, 1.0 - (source + local) / total))
