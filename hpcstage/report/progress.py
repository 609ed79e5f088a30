"""Says on stderr how far a scan or a copy is: in one live line on a terminal, else in a line at each quarter.

The live line is there only while nothing but hpcstage runs. Once the command has started, the terminal is the
command's: a line that is drawn again and again would be mixed into what the command prints, and hpcstage cannot know
when it prints. `hpcstage report`, in another terminal, tells how far the copying is. A log is different: there whole
lines of several programs stand below each other anyway, so the quarters are said while the command runs, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING

from hpcstage import stderr
from hpcstage.protocol.shim import WorkProgress
from hpcstage.units import format_duration, format_rate, format_size

if TYPE_CHECKING:
    from rich.progress import Progress as LiveBar

LIVE_AFTER_S = 1.0
"""Work that takes less is over before anybody reads a line; rich is imported only then."""
LIVE_EVERY_S = 0.1
LONG_S = 60.0
"""Off a terminal, nothing is said of what is expected to take less."""
WINDOW_S = 30.0
"""The rate is that of the last half minute."""


class CopyPace:
    """Measures one piece of work: how much of it is done, how fast it goes, and when it will end."""

    def __init__(self, begun_s: float, window_s: float = WINDOW_S) -> None:
        self.begun_s = begun_s
        self._window_s = window_s
        self._seen: deque[tuple[float, WorkProgress]] = deque()

    def add(self, at_s: float, done: WorkProgress) -> None:
        """Adds what is done at this moment."""
        self._seen.append((at_s, done))
        while len(self._seen) > 2 and at_s - self._seen[1][0] > self._window_s:
            self._seen.popleft()

    @property
    def share(self) -> float | None:
        """The share that is done, of the bytes if there are any; None while nobody knows how much there is."""
        done = self._seen[-1][1]
        if not done.all_files:
            return None
        part, whole = (done.size_bytes, done.all_bytes) if done.all_bytes else (done.files, done.all_files)
        return min(1.0, part / whole)

    @property
    def elapsed_s(self) -> float:
        """The seconds since the beginning."""
        return self._seen[-1][0] - self.begun_s

    @property
    def left_s(self) -> float | None:
        """The expected seconds until the end; None where the rate or the amount is not known."""
        done, files_per_s, bytes_per_s = self._seen[-1][1], *self.rates()
        if self.share is None:
            return None
        if done.all_bytes:
            return max(0, done.all_bytes - done.size_bytes) / bytes_per_s if bytes_per_s else None
        return max(0, done.all_files - done.files) / files_per_s if files_per_s else None

    def rates(self) -> tuple[float, float]:
        """Returns files and bytes per second over the window."""
        (begin_s, first), (end_s, last) = self._seen[0], self._seen[-1]
        passed_s = max(end_s - begin_s, 1e-9)
        return (last.files - first.files) / passed_s, (last.size_bytes - first.size_bytes) / passed_s

    def text(self) -> str:
        """Returns share, time left, rate, bytes and files, the most important first: a narrow terminal cuts the end."""
        done, share, left_s = self._seen[-1][1], self.share, self.left_s
        files_per_s, bytes_per_s = self.rates()
        if share is None:
            return f"{done.files:,} files, {format_size(done.size_bytes)}, {files_per_s:,.0f} files/s"
        if share == 1.0:
            end = f"in {format_duration(self.elapsed_s)}"
        else:
            end = "time left unknown" if left_s is None else f"{format_duration(max(1, round(left_s)))} left"
        said = [f"{int(100 * share)} %", end, format_rate(bytes_per_s)]
        sizes = f"{format_size(done.size_bytes)} of {format_size(done.all_bytes)}"
        return ", ".join([*said[: 2 if share == 1.0 else 3], sizes, f"{done.files:,} of {done.all_files:,} files"])


class ProgressLine:
    """Owns what is said of progress. `show` may be called as often as one likes, and costs next to nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._on_terminal = not quiet and stderr.stream().isatty() and os.environ.get("TERM") != "dumb"
        self._begun_s = self._drawn_s = time.monotonic()
        self._doing = ""
        self._pace = CopyPace(self._begun_s)
        self._quarters = 0
        self._next_line_s = LONG_S
        self._bar: LiveBar | None = None

    def __enter__(self) -> ProgressLine:
        """Returns itself; the live line is gone at the end of the block."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Ends the live line, as `leave_terminal` does."""
        self.leave_terminal()

    @property
    def is_silent(self) -> bool:
        """Whether `show` says nothing any more."""
        return self._quiet

    def leave_terminal(self) -> None:
        """Removes the live line for good, as the terminal is the command's from here on. Lines in a log still come."""
        self._end_bar()
        self._quiet = self._quiet or self._on_terminal

    def show(self, doing: str, done: WorkProgress) -> None:
        """Says how far `doing` is, if it is time to say it."""
        now_s = time.monotonic()
        if self._quiet or (self._on_terminal and doing == self._doing and now_s < self._drawn_s + LIVE_EVERY_S):
            return
        self._drawn_s = now_s
        if doing != self._doing:
            self._end_bar()
            self._doing, self._pace, self._quarters, self._next_line_s = doing, CopyPace(now_s), 0, LONG_S
        self._pace.add(now_s, done)
        try:
            if not self._on_terminal:
                self._say_at_quarters()
            elif now_s >= self._begun_s + LIVE_AFTER_S:
                self._draw()
        except Exception:  # noqa: BLE001  the terminal may be gone, or rich damaged: the run goes on
            self._quiet = True

    def _say_at_quarters(self) -> None:
        """Writes a line at each quarter of what takes long. Where nobody knows how much there is, it writes one after a
        minute, and then each time that the time has doubled."""
        pace, share = self._pace, self._pace.share
        if share is None:
            is_due = pace.elapsed_s >= self._next_line_s
            self._next_line_s *= 2 if is_due else 1
        else:
            is_due = int(4 * share) > self._quarters and pace.elapsed_s + (pace.left_s or 0.0) > LONG_S
            self._quarters = max(self._quarters, int(4 * share))
        if is_due:
            out = stderr.stream()
            out.write(f"hpcstage: {self._doing}: {pace.text()}\n")
            out.flush()

    def _draw(self) -> None:
        share = self._pace.share
        if self._bar is None:
            self._bar = _live_bar()
            self._bar.add_task(self._doing, total=None if share is None else 1.0, told="")
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=share or 0.0, told=self._pace.text(), refresh=True)

    def _end_bar(self) -> None:
        if self._bar is not None:
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()
            self._bar = None


def _live_bar() -> LiveBar:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as LiveBar

    class CursorStays(Console):
        """A console that never hides the cursor: nobody would show it again after SIGKILL."""

        def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002  rich's signature
            return False

    doing, told = TextColumn("hpcstage: {task.description}"), TextColumn("{task.fields[told]}", markup=False)
    console = CursorStays(file=stderr.stream())
    return LiveBar(doing, BarColumn(), told, console=console, auto_refresh=False, transient=True, redirect_stdout=False)
