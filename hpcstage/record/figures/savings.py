"""Estimates what staging saved, with formula and inputs; None with a reason where no estimate is possible. Pure.

Both estimates say from what this run measured how long the same command would have taken in another mode. They assume
that the program computes as fast as it did. The kernel tells whether files that are read again would have come from
the node's page cache (`daemon.copying.alone`); where that is unknown and matters, there is no estimate.

With several nodes, the readers and the rate of the source are those of all nodes; the command takes as long as on the
node where it takes longest; staging ends with the last node.

The estimate against mode direct begins with the wall time of this run and replaces the time that the program waited by
the time that it would have waited at the source: file by file (`readers`), with the time that a file takes there for as
many readers as the program has (`sourceload`). Unknown values are carried along as a range; a wide range gives no
estimate.

* For a process that reads one file after the other, each file takes its time at the source and the process's own time,
  less what of that the kernel hides by reading ahead, and with the requests that reading in pieces costs (`readahead`).
* For several threads of a process, the range reaches from reading that hides all computing, that after the last read
  included, to reading that hides none.
* A loader with workers is simulated batch by batch: the workers take turns, each two batches ahead of the program.

A run that was served nothing took its own time, less what hpcstage cost it: waits for the daemon's answers, which were
measured, and at most the waits for a processor and the copiers' share of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpcstage.record.figures.counts import add
from hpcstage.record.figures.digest import Digest, JobFigures
from hpcstage.record.figures.readahead import Pieces, WholeRead
from hpcstage.record.figures.readers import LoaderUse, Program, ReaderUse
from hpcstage.record.figures.sourceload import Load, Range, load_of, mean_rate
from hpcstage.record.parts.roster import Presence
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import Estimate, Savings

WIDE_SHARE = 0.12
"""A range that reaches further than this share to both sides of its middle gives no estimate."""
STRANGE_SHARE = 0.1
"""There is no estimate if processes that are neither readers nor loaders opened more than this share of their opens."""
WHOLE_SHARE = 0.75
"""The program reads files once and whole if its bytes per open are at least this share of the mean file size, and at
most its inverse."""
BATCHES_AHEAD = 2
"""PyTorch's loader asks each worker for this many batches before they are needed."""
LEAST_PLAYED = 400
"""At least this many batches of an epoch are simulated, if it has them; the others take the steady pace."""
FORMULA = "what the program's files take at the source, with as many readers, in place of its waits"
MOVED = "open files went on with their copies, and how long the source would have taken for that is not known"
ARRIVED = "large files were served while they arrived, and how long the source would have taken for that is not known"
UNSERVED = "what hpcstage cost, as nothing was served from copies"
COPYING = "nothing was served from copies, and how much copying slowed its reads is not known"
OWN_COST = "nothing was served from copies, and what hpcstage cost may be too large a part of {wall_s:.3g} s"


def savings_of(run: RunPart, nodes: Sequence[Digest], figures: JobFigures) -> Savings:
    """Returns the section `savings`, from the figures of all nodes."""
    direct = _vs_direct(nodes, figures)
    upfront = _vs_upfront(run, nodes, figures)
    return Savings(
        vs_direct_s=direct.saved_s,
        vs_upfront_s=upfront.saved_s,
        estimate=True,
        method=f"against direct: {_method(direct)}; against upfront: {_method(upfront)}",
        vs_direct=direct,
        vs_upfront=upfront,
    )


def _method(estimate: Estimate) -> str:
    return estimate.reason or estimate.formula


def _cannot(reason: str, formula: str = "") -> Estimate:
    return Estimate(saved_s=None, formula=formula, inputs={}, reason=reason)


# ---- against direct ----


def _vs_direct(nodes: Sequence[Digest], figures: JobFigures) -> Estimate:
    split, datasets, mode = figures.time_split, figures.datasets, figures.mode
    if mode is None:
        return _cannot("no node reported")
    if mode == "direct":
        return _cannot("this run read directly")
    if not figures.coverage.opens:
        return _cannot("no open below the datasets was seen")
    if split.wall_s is None:
        return _cannot("when the command ended is not known")
    if figures.coverage.processes_missed:
        return _cannot("Python processes that never attached may have read the data, too")
    files, size_bytes = add(*(d.files for d in datasets)), add(*(d.size_bytes for d in datasets))
    load = load_of([node.seen for node in nodes], size_bytes)
    try:
        programs, copied = [node.program for node in nodes], figures.totals.copied_bytes
        found = direct_of(split.wall_s, programs, load, files, size_bytes, copied)
    except CannotTell as why:
        return _cannot(str(why))
    before_s = float(split.before_s or 0.0) if mode == "upfront" else 0.0  # else the command does not wait for staging
    saved_s = found.seconds.middle - split.wall_s - before_s
    return Estimate(saved_s=saved_s, formula=found.formula, inputs={**found.inputs, "before_s": before_s}, reason=None)


class CannotTell(Exception):
    """There is no estimate; the text says why."""


@dataclass(frozen=True)
class Direct:
    """The estimated wall time, and the numbers from which it follows."""

    seconds: Range
    inputs: dict[str, Any] = field(default_factory=dict)
    formula: str = FORMULA


def direct_of(
    wall_s: float,
    programs: Sequence[Program],
    load: Load,
    files: int | None,
    size_bytes: int | None,
    copied_bytes: int | None = None,
) -> Direct:
    """Estimates the wall time without staging. `files` and `size_bytes` are those of the datasets, `copied_bytes` is
    what hpcstage copied. Raises CannotTell."""
    if any(program.moved for program in programs):
        raise CannotTell(MOVED)
    if any(program.arrived for program in programs):
        raise CannotTell(ARRIVED)
    if not any(program.swapped for program in programs):
        return _unserved(wall_s, programs, copied_bytes)
    _check(programs, load, files, size_bytes)
    readers = sum(_at_once(program) for program in programs)
    changes = [_change(program, readers, load, files) for program in programs if _opens(program)]
    low, high = max(change.low for change in changes), max(change.high for change in changes)
    found = Range(max(0.0, wall_s + low), wall_s + high)
    if not load.is_steady():
        raise CannotTell("the source's speed goes up and down, and was seen for too short a time to know its mean")
    if load.is_brief(readers):
        raise CannotTell(
            f"the source was seen for {load.copying_s:.1f} s only, too short a time to know its mean speed"
        )
    if (found.high - found.low) / 2 > WIDE_SHARE * found.middle:
        raise CannotTell(_why_wide(programs, load, files, found))
    alone = load.alone
    inputs = {
        "wall_s": wall_s,
        "opens": sum(_opens(program) for program in programs),
        "readers": readers,
        "alone_file_s": None if alone is None else alone.middle,
        "source_files_per_s": mean_rate(load.rates) if load.rates else None,
        "client_keeps_files": load.keeps,
        "low_s": found.low,
        "high_s": found.high,
    }
    return Direct(found, inputs)


def _unserved(wall_s: float, programs: Sequence[Program], copied_bytes: int | None) -> Direct:
    """Estimates a run that read everything at the source, too: it took its own time, less what hpcstage cost it."""
    used = [program for program in programs if _opens(program)]
    if not used:
        raise CannotTell("no open of a process whose reads are understood was seen")
    copied = copied_bytes or 0
    slowed_s = _slowed_s(programs, copied) if copied else 0.0
    costs = [_cost(program) for program in used]
    low_s = wall_s - slowed_s - max(cost.high for cost in costs)
    found = Range(max(0.0, low_s), max(0.0, wall_s - min(cost.low for cost in costs)))
    if (found.high - found.low) / 2 > WIDE_SHARE * found.middle:
        raise CannotTell(COPYING if slowed_s > (found.high - found.low) / 2 else OWN_COST.format(wall_s=wall_s))
    inputs = {"wall_s": wall_s, "copied_bytes": copied, "low_s": found.low, "high_s": found.high}
    return Direct(found, inputs, UNSERVED)


def _slowed_s(programs: Sequence[Program], copied: int) -> float:
    """Returns by how many seconds copying slowed the program's reads at most: its share of the source's bandwidth. What
    the program waited for answers of the daemon is a cost of its own (`_cost`), and no read."""
    alone = [program.readers for program in programs if program.readers is not None]
    read = sum(program.size_bytes or 0 for program in programs)
    if not read or len(alone) < len(programs):
        raise CannotTell(COPYING)
    return max(_reading_s(group) for group in alone) * copied / (copied + read)


def _reading_s(group: ReaderUse) -> float:
    """Returns how long the processes waited for reads at the source, without their waits for answers."""
    if group.waited_s is None:
        raise CannotTell(COPYING)
    return max(0.0, group.waited_s - group.want_s) / group.at_once


def _cost(program: Program) -> Range:
    """Returns how long hpcstage held the processes of a node up: they waited for answers, and maybe for a processor.

    Threads and workers may wait for answers at the same moments or one after the other.
    """
    costs = [Range(0.0, loader.want_s / loader.workers + loader.queued_s) for loader in program.loaders]
    if program.readers is not None:
        group = program.readers
        want_s = group.want_s / group.at_once
        costs.append(Range(want_s / group.threads, want_s + group.queued_s))
    return Range(min(cost.low for cost in costs), max(cost.high for cost in costs))


def _opens(program: Program) -> int:
    return sum(loader.opens for loader in program.loaders) + (program.readers.opens if program.readers else 0)


def _at_once(program: Program) -> float:
    alone = program.readers
    own = alone.at_once * alone.threads if alone else 0.0
    return own + sum(loader.workers for loader in program.loaders)


def _check(programs: Sequence[Program], load: Load, files: int | None, size_bytes: int | None) -> None:
    opens = sum(_opens(program) for program in programs)
    if not opens:
        raise CannotTell("no open of a process whose reads are understood was seen")
    if sum(program.strangers for program in programs) > STRANGE_SHARE * opens:
        raise CannotTell("processes beside the training read much of the data")
    if load.alone is None:
        raise CannotTell("what a file takes for one reader alone was not measured")
    if not load.rates:
        raise CannotTell("how much the whole source passes was not seen")
    read = [program.size_bytes for program in programs]
    if None in read:
        raise CannotTell("how much of its files the program reads is not known (memory maps, or no measured reads)")
    if files and size_bytes:
        share = sum(value or 0 for value in read) / opens / (size_bytes / files)
        if not WHOLE_SHARE <= share <= 1 / WHOLE_SHARE:
            raise CannotTell("the program does not read its files once and whole")


def _why_wide(programs: Sequence[Program], load: Load, files: int | None, found: Range) -> str:
    span = f"between {found.low:.3g} and {found.high:.3g} s"
    if any(program.readers and program.readers.threads > 1 for program in programs):
        return f"whether its threads read while it computes is not known: {span}"
    unknown_s = (found.high - found.low) / 2
    if max(_per_lane_s(program, lambda pieces: pieces.jumping_s(load.read_s)) for program in programs) > unknown_s:
        return f"the program reads within its files out of order, where the kernel does not read ahead: {span}"
    if max(_per_lane_s(program, lambda pieces: _unknown_ahead_s(pieces, load)) for program in programs) > unknown_s:
        return f"how far the kernel reads ahead of a program that reads its files in parts is not known: {span}"
    if load.keeps is None and files and sum(_opens(program) for program in programs) > files:
        return f"whether files that are read again come from the node's memory is not known: {span}"
    return f"the source changed too much, or too little was seen of it: {span}"


def _per_lane_s(program: Program, file_s: Callable[[Pieces], float]) -> float:
    """Returns the seconds that a time of each file adds to the program, which reads so many at a time."""
    uses = [(loader.pieces, loader.opens / loader.workers) for loader in program.loaders]
    if program.readers is not None:
        uses.append((program.readers.pieces, program.readers.opens / program.readers.at_once))
    return max((opens * file_s(pieces) for pieces, opens in uses), default=0.0)


def _unknown_ahead_s(pieces: Pieces, load: Load) -> float:
    """Returns the width of what reading a file in parts adds to its time."""
    added = pieces.added_s(_whole(load))
    return added.high - added.low


def _whole(load: Load) -> WholeRead:
    return WholeRead(load.read_s, load.request_s, load.waiting_s, load.window_bytes)


def _change(program: Program, readers: float, load: Load, files: int | None) -> Range:
    """Returns by how many seconds longer the command would have run on this node."""
    changes = [_less(_of_loader(loader, readers, load, files), loader.queued_s) for loader in program.loaders]
    if program.readers is not None:
        changes.append(_less(_of_readers(program.readers, readers, load, files), program.readers.queued_s))
    return Range(max(change.low for change in changes), max(change.high for change in changes))


def _less(change: Range, queued_s: float) -> Range:
    """Widens a change downwards: without copiers beside it, the program may not have waited for a processor."""
    return Range(change.low - queued_s, change.high)


def _cycle(load: Load, readers: float, think_s: float, pieces: Pieces) -> Range:
    added = pieces.added_s(_whole(load))
    fast = load.cycle(readers, max(0.0, think_s + added.low))
    slow = load.cycle(readers, max(0.0, think_s + added.high))
    if fast is None or slow is None:
        raise CannotTell("what a file takes at the source was not measured")
    return Range(fast.low, slow.high + pieces.jumping_s(load.read_s))


def _again(load: Load, first: Range, think_s: float, local_s: float) -> Range:
    """Returns the cycle time of a file that was read before, which comes from memory if the client keeps it."""
    if load.keeps is False or load.open is None:
        return first
    kept = think_s + load.open.low + local_s
    return Range(kept, kept if load.keeps else first.high)


def _reread(opens: int, files: int | None) -> int:
    return max(0, opens - files) if files else 0


def _of_readers(group: ReaderUse, readers: float, load: Load, files: int | None) -> Range:
    if group.waited_s is None:
        raise CannotTell("what its threads waited for was not measured")
    think_s = max(0.0, group.phase_s - group.waited_s)
    if group.threads > 1:
        return _of_threads(group, readers, load, files, think_s)
    each = _cycle(load, readers, think_s / group.opens, group.pieces)
    return _total(group, each, load, files, think_s / group.opens, group.at_once)


def _total(group: ReaderUse, each: Range, load: Load, files: int | None, think_s: float, at_once: float) -> Range:
    again = _again(load, each, think_s, 0.0)
    more = _reread(group.opens, files)
    now_s = group.phase_s / group.at_once
    low = ((group.opens - more) * each.low + more * again.low) / at_once - now_s
    high = ((group.opens - more) * each.high + more * again.high) / at_once - now_s
    return Range(low, high)


def _of_threads(group: ReaderUse, readers: float, load: Load, files: int | None, think_s: float) -> Range:
    """Returns a range from reading that hides computing to reading and computing in turn.

    The program may compute on what its threads read while they read more, also after the last of their reads.
    """
    at_once = group.at_once * group.threads
    reading = _total(group, _cycle(load, readers, 0.0, replace(group.pieces, within_s=0.0)), load, files, 0.0, at_once)
    now_s, compute_s, tail_s = (seconds / group.at_once for seconds in (group.phase_s, think_s, group.tail_s))
    return Range(max(reading.low - tail_s, compute_s - now_s), reading.high + compute_s)


# ---- a loader with workers ----


def _of_loader(loader: LoaderUse, readers: float, load: Load, files: int | None) -> Range:
    compute_s = max(0.0, loader.span_s - loader.wait_s) / loader.steps
    per_batch = loader.opens / loader.steps
    think_s = loader.cpu_s / loader.opens if loader.opens else 0.0
    batches = max(1, round(loader.steps / loader.epochs))
    local_s = per_batch * (think_s + loader.local_file_s)
    played_s = loader.epochs * _epoch_wait_s(batches, loader.workers, local_s, compute_s)
    rest_s = max(0.0, (loader.local_wait_s or 0.0) - played_s)
    each = _cycle(load, readers, think_s, loader.pieces)
    again = _again(load, each, think_s, loader.local_file_s)
    share = _reread(loader.opens, files) / loader.opens if loader.opens else 0.0
    later = share * loader.epochs

    def wait_s(first_s: float, again_s: float) -> float:
        first = _epoch_wait_s(batches, loader.workers, per_batch * first_s, compute_s)
        second = _epoch_wait_s(batches, loader.workers, per_batch * again_s, compute_s)
        return (loader.epochs - later) * first + later * second + rest_s - loader.wait_s

    return Range(wait_s(each.low, again.low), wait_s(each.high, again.high))


def _epoch_wait_s(batches: int, workers: int, batch_s: float, compute_s: float) -> float:
    """Returns how long a program waits for its batches in an epoch, if a worker takes `batch_s` for each."""
    played = min(batches, max(LEAST_PLAYED, 4 * BATCHES_AHEAD * workers))
    free_s = [0.0] * workers
    got_s: list[float] = []
    now_s = waited_s = 0.0
    for number in range(played):
        worker = number % workers
        asked_s = got_s[number - BATCHES_AHEAD * workers] if number >= BATCHES_AHEAD * workers else 0.0
        free_s[worker] = max(free_s[worker], asked_s) + batch_s
        waited_s += max(0.0, free_s[worker] - now_s)
        now_s = max(now_s, free_s[worker])
        got_s.append(now_s)
        now_s += compute_s
    return waited_s + (batches - played) * max(0.0, batch_s / workers - compute_s)


# ---- against upfront ----

UPFRONT = "time that staging took - time that the program waited for the source"
SEVERAL = "time that staging took on all nodes - time that the program waited for the source on the slowest"


def _vs_upfront(run: RunPart, nodes: Sequence[Digest], figures: JobFigures) -> Estimate:
    split, mode = figures.time_split, figures.mode
    formula = SEVERAL if split.slowest else UPFRONT
    if mode is None:
        return _cannot("no node reported")
    if mode == "upfront":
        return _cannot("this run staged upfront")
    if mode == "direct":
        return _cannot("this run staged nothing, so what staging takes is not known")
    wait_s = (split.slowest or split).wait_source_s
    if wait_s is None:
        return _cannot("waits for the source were not measured", formula)
    staging_s = _staging_s(run, nodes)
    if staging_s is None:
        return _cannot("staging did not end within the run", formula)
    inputs = {"staging_s": staging_s, "wait_source_s": wait_s}
    return Estimate(saved_s=staging_s - wait_s, formula=formula, inputs=inputs, reason=None)


def _staging_s(run: RunPart, nodes: Sequence[Digest]) -> float | None:
    """Returns the time from the command's start, or the daemons' if that is later, to the last staged file.

    All nodes stage at once. Nodes that died are left out.
    """
    alive = [node for node in nodes if node.state is Presence.OK] or nodes
    ends = [node.part.staged_s for node in alive]
    known = [end for end in ends if end is not None]
    if not known or len(known) < len(ends):
        return None
    lead_s = max(0.0, (run.child_started_s or 0.0) - min(node.shift_s for node in alive))
    return max(0.0, max(known) - lead_s)
