"""Follows a run that goes on, from any host that sees its run directory, until it ends.

The nodes write their parts of the record every ten seconds, and all that is said here comes from them.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hpcstage.protocol.rundir import PART
from hpcstage.protocol.shim import WorkProgress
from hpcstage.record import files
from hpcstage.record.compose import state_of
from hpcstage.record.parts import alive
from hpcstage.record.schema import Record, Severity
from hpcstage.report import figures
from hpcstage.report.progress import CopyPace
from hpcstage.units import format_duration, format_number, format_rate, format_share

EVERY_S = 2.0
LEAST_PAUSE = 5
"""Between two looks the follower sleeps at least so many times as long as a look takes."""
UNKNOWN_COLUMNS = 80
"""Some terminals do not say how wide they are."""
GOES_ON = frozenset({"running", "unclear"})
CYCLE_S = 9.5
"""In little more than this all nodes write their parts once, each at its own time."""
QUIET_S = 15.0
"""After so long without a sign of life its age is said: parts are written every ten seconds."""


class Pace:
    """Measures how fast a run goes: what it read at the source, and how far its copying is."""

    def __init__(self) -> None:
        self._at_s = 0.0
        self._source, self._copies = CopyPace(0.0, CYCLE_S), CopyPace(0.0)

    def add(self, at_s: float, record: Record) -> None:
        """Adds the figures that the nodes wrote at this time."""
        if at_s > self._at_s:
            self._at_s = at_s
            self._source.add(at_s, WorkProgress(0, record.totals.source_bytes or 0))
            self._copies.add(at_s, copied(record))

    def text(self, record: Record) -> str:
        """Says what is known in one line: the time since the start, the copies, the source, what was served."""
        told = [format_duration(max(0.0, self._at_s - record.run.started_unix_s)), *self._copying(record)]
        if record.totals.source_bytes is not None and (rate := self._source.rates()[1]):
            told.append(f"{format_rate(rate)} from the source")
        if record.coverage.opens:
            told.append(f"{figures.percent(record.coverage.share)} of opens served from local copies")
        if record.time_split.waited_s is not None:
            told.append(f"waited {figures.seconds(record.time_split.waited_s)} for data")
        if record.lost_nodes:
            told.append(f"{format_number(record.lost_nodes, 'node')} lost")
        return ", ".join(told)

    def _copying(self, record: Record) -> Iterator[str]:
        if not record.run.stages:
            return
        done, left_s = copied(record), self._copies.left_s
        if not done.all_files:
            yield f"{format_number(done.files, 'copy', 'copies')} made"
            return
        yield f"{done.files:,} of {done.all_files:,} files copied ({format_share(done.files / done.all_files)})"
        if left_s and done.files < done.all_files:
            yield f"about {format_duration(max(1, round(left_s)))} left for the rest"


def copied(record: Record) -> WorkProgress:
    """Returns how far the copying is, on all nodes together; without an end where nobody knows what will be copied: the
    files are not known yet, the stores have no room for all, or each node copies what its own program reads."""
    done = sum(one.staged_files for one in record.datasets), sum(one.staged_bytes for one in record.datasets)
    files, size, placement = record.files, record.size_bytes, record.group.placement if record.group else "replicate"
    rooms = [node.budget_bytes for node in record.nodes]
    if files is None or size is None or not rooms or None in rooms or record.lost_nodes:
        return WorkProgress(*done)
    if placement not in ("replicate", "partition") or (record.room_bytes or 0) < size:
        return WorkProgress(*done)
    copies = 1 if record.is_divided else len(rooms)
    return WorkProgress(*done, files * copies, size * copies)


class Screen:
    """Shows one line that changes on a terminal; elsewhere each as a line of its own."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""

    def show(self, line: str) -> None:
        """Shows the line in the place of the last one."""
        if line == self._shown:
            return
        self._shown = line
        if self._is_terminal:
            columns = os.get_terminal_size(sys.stdout.fileno()).columns or UNKNOWN_COLUMNS
            sys.stdout.write(f"\r\x1b[K{figures.clip(line, max(10, columns - 1))}")
        else:
            sys.stdout.write(figures.clean(line) + "\n")
        sys.stdout.flush()

    def say(self, line: str) -> None:
        """Says a line that stays."""
        self.end()
        sys.stdout.write(figures.clean(line) + "\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the line that changes."""
        if self._is_terminal and self._shown:
            sys.stdout.write("\n")
            sys.stdout.flush()
        self._shown = ""


def follow(run_dir: Path, screen: Screen) -> Record:
    """Shows how the run goes until it ends; returns its record."""
    pace, told, seen_s = Pace(), dict[str, int](), -1.0
    record = files.load_run(run_dir)
    try:
        while record.run.state in GOES_ON:
            begun_s, sign_s = time.monotonic(), alive.last_sign_s(run_dir)
            if sign_s != seen_s:
                record, seen_s = files.load_run(run_dir), sign_s
                pace.add(sign_s, record)
                for line in _news(record, told):
                    screen.say(line)
            elif not _goes_on(run_dir):
                record = files.load_run(run_dir)
            if record.run.state in GOES_ON:
                screen.show(pace.text(record) + _age(record, sign_s))
                time.sleep(max(EVERY_S, LEAST_PAUSE * (time.monotonic() - begun_s)))
    finally:
        screen.end()
    if record.run.state == "lost":
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alive.last_sign_s(run_dir)))
        screen.say(f"killed: there is no sign of life since {at}, and no end was noted")
    return record


def _goes_on(run_dir: Path) -> bool:
    """Returns whether the run goes on; without a look into the nodes' parts, which may be large."""
    if not (run_dir / PART).exists():
        return alive.last_sign_s(run_dir) > time.time() - alive.QUIET_S
    run = files.run_part(run_dir)
    return state_of(run, alive.evidence(run, run_dir)) in GOES_ON


def _age(record: Record, sign_s: float) -> str:
    age_s = time.time() - sign_s
    is_quiet = record.run.state == "unclear" and age_s > QUIET_S
    return f" (last sign of life {format_duration(round(age_s))} ago)" if is_quiet else ""


def _news(record: Record, told: dict[str, int]) -> Iterator[str]:
    """Yields the warnings and errors that were not told yet. That of lost nodes comes again when more are lost."""
    for note in record.notes:
        number = record.lost_nodes if note.id.startswith("node-") else 0
        if note.severity is not Severity.INFO and told.get(note.id, -1) < number:
            told[note.id] = number
            yield figures.note(note)
