"""Decides what a run was worth, why, and what to do next, in a sentence that rests on measured figures. Pure.

This module owns the kinds of verdicts, their order and their words; nothing else in hpcstage judges a run as a whole.
What hpcstage did not measure is not in the sentence, but for what it calls assumed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hpcstage.record.figures.counts import UNSEEN_LAYERS, ratio
from hpcstage.record.index import Earlier
from hpcstage.record.parts.roster import Presence
from hpcstage.record.schema import Note, Record, Severity, Verdict, VerdictKind
from hpcstage.units import format_duration, format_number, format_share, format_size

LITTLE_SHARE = 0.05
"""A program that waits for less than this share of its time gains next to nothing from faster reading."""
MUCH_SHARE = 0.2
"""Opens that went to the source for one reason explain the waits if they are at least this share of all."""
LOST_SHARE = 0.25
"""Contention explains the waits if the source lost at least this share of their time by it."""
FASTER_SHARE = 0.95
"""Mode direct was faster if its median was less than this share of the other mode's."""
ENOUGH_RUNS = 3
"""Mode direct was faster if so many runs of it all took less time than as many of the other mode: by chance alone, they
do so once in twenty times."""
ONCE = 1.2
"""The files count as read once if they were opened up to this many times."""
BEFORE_SHARE = 0.05
"""Staging before the command is worth a word if it took at least this share of the whole."""
LATE_REASONS = ("later", "scanning", "timeout")
"""The daemon's answers to opens that asked for a file too early."""
TOLD_ELSEWHERE = ("nothing-attached",)
"""Errors for which there is a kind of its own."""
NOT_JUDGED: tuple[VerdictKind, ...] = ("error", "already-local", "not-attached", "nothing-opened")
"""Kinds of runs whose times say nothing of their mode."""
KNOWN_ORDERS = ("given", "sampler", "trace")
OTHER_REASONS = {
    "scanning": "came before the scan of the dataset had ended; those after it can be served, so longer runs gain more",
    "unknown": "were not among the files of the dataset when it was scanned; name the directories that it reads with "
    "--data",
    "failed": "were of files that could not be copied; see the notes",
    "void": "were of files that had been written to; keep outputs outside of the dataset",
    "large": "were of large files that were not copied yet; --mode upfront copies them before it starts, which pays if "
    "it reads them again",
}
"""What is said of opens that went to the source for another reason than lateness and room."""
TOLD: dict[VerdictKind, tuple[str, ...]] = {
    "not-attached": ("nothing-attached", "shim-off"),
    "nothing-opened": ("nothing-opened",),
    "not-measured": ("uncounted",),
    "already-local": ("already-local",),
    "does-not-fit": ("store-full",),
}
"""The notes that a verdict makes superfluous."""
WHEN_BUSY = "or use it when the file system is busy"


def verdict_of(record: Record, earlier: Sequence[Earlier] = ()) -> Verdict:
    """Returns the verdict on a record with notes. `earlier` are the command's earlier runs, by mode."""
    return _Judge(record, earlier).verdict()


def untold(record: Record) -> list[Note]:
    """Returns the notes that say something beside the verdict."""
    verdict = record.verdict
    if verdict is None:
        return list(record.notes)
    told = TOLD.get(verdict.kind, ())
    return [note for note in record.notes if note.id not in told and not verdict.text.startswith(note.text)]


class _Judge:
    """Finds the kind, and writes the sentence."""

    def __init__(self, record: Record, earlier: Sequence[Earlier]) -> None:
        self._record = record
        run, split = record.run, record.time_split
        self._earlier = {one.mode: one for one in earlier} if run.exit_code == 0 else {}
        self._others = [one for one in self._earlier.values() if one.mode != run.mode]
        self._headroom_s, self._wall_s = record.headroom_s, split.wall_s

    def verdict(self) -> Verdict:
        """Returns the verdict. What makes all figures doubtful is asked first, then what hpcstage could see, then what
        the program waited for."""
        kind, text = self._not_judged() or self._not_reached() or self._waited()
        compared = "" if kind == "direct-was-faster" else self._compared(is_judged=kind not in NOT_JUDGED)
        return Verdict(kind=kind, text=text, compared=compared)

    # ---- runs that are not judged by their waits

    def _not_judged(self) -> tuple[VerdictKind, str] | None:
        record = self._record
        error = next((note for note in record.notes if _is_fatal(note)), None)
        if error is not None:
            rest = f"; on the others {self._served_and_waited()}" if self._some_well() else ""
            return "error", f"{error.text}{f'; {error.remedy}' if error.remedy else ''}{rest}"
        if record.run.state in ("running", "unclear"):
            return "running", f"still running: up to now {self._served_and_waited()}"
        if not record.names_dataset or not record.datasets:
            if record.keeps_directories:
                return "no-dataset", "no dataset was named: only output files and checkpoints were kept locally"
            return "no-dataset", "no dataset was named, so nothing could be served; name it with --data"
        if record.run.mode == "direct" and record.run.mode_asked != "direct" and record.run.mode_why:
            remedies = (note.remedy for note in record.notes if note.id == "already-local")
            text = f"{record.run.mode_why}: staging it saves nothing"
            return "already-local", f"{text}; {next(remedies, self._leave_out())}"
        return None

    def _some_well(self) -> bool:
        """Returns whether some of several nodes staged to the end, so that there is something to judge."""
        record = self._record
        return bool(record.group and record.coverage.opens and record.number(Presence.OK))

    def _not_reached(self) -> tuple[VerdictKind, str] | None:
        """Judges a run in which hpcstage saw no open of the datasets."""
        record, coverage = self._record, self._record.coverage
        if coverage.opens:
            return None
        notes = {note.id: note for note in record.notes}
        note = notes.get("nothing-attached") or notes.get("shim-off")
        if coverage.opens is None:
            return "not-measured", "no node reported, so what the command read is not known"
        if "uncounted" in notes:
            return "not-measured", f"{notes['uncounted'].text}; {notes['uncounted'].remedy}"
        if any(number for layer, number in coverage.layers.items() if layer not in UNSEEN_LAYERS):
            roots = ", ".join(dataset.root for dataset in record.datasets[:2])
            text = f"no Python process of the command opened a file below {roots}, so nothing was served"
            if self._headroom_s and self._wall_s and self._headroom_s > LITTLE_SHARE * self._wall_s:
                return (
                    "nothing-opened",
                    f"{text}; the program {self._wait()}, for listings and the like from the source",
                )
            return "nothing-opened", f"{text}; check that --data names the paths that it opens"
        name = os.path.basename(record.run.command[0]) if record.run.command else "the command"
        if note is None or coverage.processes_missed or coverage.layers or name.startswith("python"):
            why = f"; {note.remedy}" if note and note.remedy else ""
            return "not-attached", f"hpcstage was active in no process of the command: it read the source{why}"
        text = f"hpcstage cannot serve {name}, in which no Python process was seen: it read the source"
        return "not-attached", f"{text}; {self._leave_out()}"

    # ---- runs that are judged by their waits

    def _waited(self) -> tuple[VerdictKind, str]:
        if self._headroom_s is None or not self._wall_s:
            return "not-measured", f"{self._served_and_waited()}{self._try_direct()}"
        if text := self._direct_was_faster():
            return "direct-was-faster", f"{text}; {self._leave_out()}, {WHEN_BUSY}"
        if self._headroom_s > LITTLE_SHARE * self._wall_s:
            return self._much()
        return self._little(self._headroom_s, self._wall_s)

    def _little(self, headroom_s: float, wall_s: float) -> tuple[VerdictKind, str]:
        record = self._record
        if not record.run.stages or (record.local_share or 0.0) < 0.5:
            left = f"hpcstage can save {_at_most(headroom_s)} here"
            return "source-keeps-up", f"{self._wait()} (the source keeps up): {left}; {self._leave_out()}, {WHEN_BUSY}"
        cost_s = self._source_s(record.totals.local_bytes)
        if cost_s is not None and cost_s <= LITTLE_SHARE * wall_s:
            took = f"what it read takes the source {format_duration(cost_s)}, assumed as fast as for the copies"
            return "source-keeps-up", f"{self._wait()} (the source keeps up: {took}); {self._leave_out()}, {WHEN_BUSY}"
        text = f"{self._served()}, and the program {self._wait()}"
        before_s, total_s = record.time_split.before_s or 0.0, record.time_split.total_s or 0.0
        if record.run.mode == "upfront" and before_s > BEFORE_SHARE * total_s:
            took = f"copying took {format_duration(before_s)} before the command started"
            return "copies-served", f"{text}; {took}: --mode runtime copies while it runs"
        return "copies-served", f"{text}{self._try_direct()}"

    def _much(self) -> tuple[VerdictKind, str]:
        """Judges a run that waited for a considerable time: by the reason that explains most of it."""
        record, split = self._record, self._record.time_split
        opens, reasons, wait = record.coverage.opens or 0, record.coverage.reasons, self._wait()
        if record.is_divided and not record.coverage.from_source:
            advice = "with more room (--budget) each node keeps all files; where it has that, the link is what limits"
            return "other-nodes-limit", f"{wait}, for files that other nodes keep or were reading: {advice}"
        if (split.wait_local_s or 0.0) > (split.wait_source_s or 0.0):
            advice = "a faster disk (--local-dir) or more readers (num_workers) can help, a faster source cannot"
            return "local-disk-limits", f"{wait}, most of it for the local disk: {advice}"
        if fitting := self._not_fitting(opens, reasons):
            return "does-not-fit", f"{wait}: {fitting}"
        lost_s = sum(one.cost_s for one in record.contention.shared)
        if lost_s and lost_s >= LOST_SHARE * (split.wait_source_s or 0.0):
            slow_s = sum(one.length_s for one in record.contention.shared)
            mean = _share(lost_s / slow_s)
            text = f"the source was {mean} below its own best for {format_duration(slow_s)}"
            return "source-contended", f"{wait}: {text}; run it at another time before you change anything"
        late = self._late(reasons)
        if record.run.stages and late >= MUCH_SHARE * opens:
            text = f"{_opens(late)} of {opens:,} came before the file was copied, so the source answered"
            return "copies-late", f"{wait}: {text}; {self._first_pass()}{self._order()}"
        for name, text in OTHER_REASONS.items():
            if record.run.stages and reasons.get(name, 0) >= MUCH_SHARE * opens:
                return "source-limits", f"{wait}: {_opens(reasons[name])} {text}"
        if not record.run.stages:
            most = f"{wait}: copies can save {_at_most(self._headroom_s or 0.0)}"
            return "source-limits", most if self._others else f"{most}; {self._first_pass()}"
        last = self._try_direct() if self._can_overlap else ""
        return "source-limits", f"{wait}: {self._first_pass()}{last}"

    def _not_fitting(self, opens: int, reasons: Mapping[str, int]) -> str:
        """Says what found no room, where that is much; else it returns nothing."""
        record = self._record
        size_bytes = record.size_bytes or 0
        room_bytes = size_bytes if record.room_bytes is None else record.room_bytes
        full = reasons.get("full", 0)
        if not record.run.stages or (full < MUCH_SHARE * opens and size_bytes - room_bytes <= MUCH_SHARE * size_bytes):
            return ""
        told = f"{_opens(full)} found no room on the local disk" if full else ""
        if size_bytes > room_bytes:
            told = f"the local disk has room for {format_size(room_bytes)} of {format_size(size_bytes)}"
        return f"{told}; name a larger disk with --local-dir, or raise --budget where you set one"

    def _late(self, reasons: Mapping[str, int]) -> int:
        """Counts the opens that had asked the daemon for their file and were sent to the source, being too early."""
        totals = self._record.totals
        asked = max(0, (totals.wanted or 0) - (totals.want_ready or 0))
        return min(asked, sum(reasons.get(name, 0) for name in LATE_REASONS))

    def _first_pass(self) -> str:
        """Says what helps a program that waits for the source."""
        record, times = self._record, self._opens_per_file
        if times is None:
            what = "hpcstage gains" if record.run.stages else "try --mode runtime, which gains"
            return f"{what} where files are read again, or while the program computes"
        if times > ONCE:
            often = f"each file was opened {times:.3g} times"
            if record.run.stages:
                return f"{often}, and {self._served()}: the first opens wait for the source, so longer runs gain more"
            return f"{often}: --mode runtime serves it from the local disk from the second on"
        if not self._can_overlap:
            return f"files were read once and nothing was computed meanwhile: {self._leave_out()}"
        if not record.run.stages:
            return "files were read once: --mode runtime can copy ahead while the program computes"
        return "files were read once, so copies gain only while the program computes"

    @property
    def _opens_per_file(self) -> float | None:
        return ratio(self._record.coverage.opens, self._record.files)

    @property
    def _can_overlap(self) -> bool:
        """Tells whether copies can have been made ahead: files were read again, or something was computed meanwhile."""
        compute_s = self._record.time_split.compute_s or 0.0
        times = self._opens_per_file
        return times is None or times > ONCE or compute_s > LITTLE_SHARE * (self._wall_s or 0.0)

    def _order(self) -> str:
        """Names the option that tells the reading order, where copies followed the order of the paths."""
        if not self._can_overlap or (self._record.order.provenance or "manifest") in KNOWN_ORDERS:
            return ""
        return "; if it does not read in the order of the paths, give its order with --order FILE"

    # ---- parts of sentences

    def _wait(self) -> str:
        """Says how long the program waited, with several nodes that of the slowest."""
        slowest = self._record.slowest
        wall = format_duration(self._wall_s or 0.0)
        where = f" on {slowest.host}, the slowest node" if slowest else ""
        if not self._headroom_s:
            return f"never waited for data in {wall}"
        return f"waited for data {_share(self._headroom_s / (self._wall_s or 1.0))} of {wall}{where}"

    def _served(self) -> str:
        record, share = self._record, self._record.local_share
        if share is None:
            return "what was served from the local copy is not known"
        if not share:
            return "nothing came from the local copy"
        what = "bytes that Python read" if record.local_measure == "bytes" else "opens by Python"
        return f"{_share(share)} of the {what} came from the local copy"

    def _served_and_waited(self) -> str:
        if self._headroom_s is None or not self._wall_s:
            return f"{self._served()}; how long the program waited for data was not measured"
        return f"{self._served()}, and the program {self._wait()}"

    def _source_s(self, read_bytes: int | None) -> float | None:
        """Returns how long the source would take for what the programs of a node read, one file after the other, if it
        answered them as it answered the copiers. None: not known."""
        totals = self._record.totals
        per_byte = ratio(totals.copy_read_s, totals.copied_bytes)
        if per_byte is None or read_bytes is None:
            return None
        return per_byte * read_bytes / max(1, self._record.reported)

    def _try_direct(self) -> str:
        is_known = "direct" in self._earlier or not self._record.run.stages
        return "" if is_known else "; run it once with --mode direct to see what that saved"

    def _leave_out(self) -> str:
        return "leave --data out" if self._record.keeps_directories else "leave hpcstage out"

    def _compared(self, *, is_judged: bool) -> str:
        """Puts this run's time beside those of earlier runs in other modes; empty where none is known."""
        run, total_s = self._record.run, self._record.time_split.total_s
        if not self._others or total_s is None or not run.mode:
            return ""
        told = ", ".join(f"mode {one.mode} {_took(one)}" for one in self._others)
        text = f"this run {format_duration(total_s)} in mode {run.mode}; earlier: {told}"
        best = min(self._others, key=lambda one: one.median_s)
        if not is_judged or best.median_s >= FASTER_SHARE * min(total_s, self._these(run.mode, total_s).median_s):
            return text
        advice = self._leave_out() if best.mode == "direct" else f"take --mode {best.mode}"
        return f"{text}; {advice} if more runs say the same"

    def _these(self, mode: str, total_s: float) -> Earlier:
        """Returns the earlier runs of this run's mode, and this run."""
        before = self._earlier.get(mode)
        return Earlier(mode, (*(before.took_s if before else ()), total_s))

    def _direct_was_faster(self) -> str:
        """Compares runs of mode direct with this one and those of its mode; empty where they do not show that mode
        direct is faster."""
        mode, total_s, direct = self._record.run.mode, self._record.time_split.total_s, self._earlier.get("direct")
        if not mode or not self._record.run.stages or direct is None or total_s is None:
            return ""
        these = self._these(mode, total_s)
        if min(len(direct.took_s), len(these.took_s)) < ENOUGH_RUNS:
            return ""
        if max(direct.took_s) >= min(these.took_s) or direct.median_s >= FASTER_SHARE * these.median_s:
            return ""
        each = "each run of mode direct took less time than each of mode"
        return f"{each} {mode}: {_took(direct)} against {_took(these)}"


def _share(value: float) -> str:
    return format_share(value).replace("under ", "<")


def _opens(number: int) -> str:
    return format_number(number, "open")


def _at_most(seconds: float) -> str:
    return f"at most {format_duration(seconds)}" if seconds else "nothing"


def _took(runs: Earlier) -> str:
    many = f"median of {len(runs.took_s)}" if len(runs.took_s) > 1 else "one run"
    return f"{format_duration(runs.median_s)} ({many})"


def _is_fatal(note: Note) -> bool:
    return note.severity is Severity.ERROR and note.id not in TOLD_ELSEWHERE
