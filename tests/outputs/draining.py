"""Runs a drain as a daemon's loop would, and compares directories."""

from __future__ import annotations

import contextlib
import os
import select
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcstage.outputs.drain import DrainReport, OutputDrain
from hpcstage.outputs.prepare import OutputPlace, prepare

END_S = 60.0
"""Waits end when all has come true; a machine with much to do takes long."""


class Running:
    """A drain of a local directory to a target, on two file systems, with a loop of its own."""

    def __init__(self, local: Path, target: Path, node: str = "", **options: object) -> None:
        self.place = OutputPlace(local / "out")
        self.target = target
        self.prepared = prepare(self.place, target, "run-1", node=node)
        self.out = Path(self.place.root)
        self.drain = OutputDrain(self.prepared, **options)
        self.closed = False

    def turn(self, most_s: float = 0.05) -> None:
        now = time.monotonic()
        wait_s = self.drain.wake_after(now)
        wait_s = most_s if wait_s is None else min(wait_s, most_s)
        select.select(list(self.drain.descriptors()), [], [], wait_s)
        self.drain.work(time.monotonic())

    def until(self, condition: Callable[[], object], timeout_s: float = END_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"did not come true: {self.drain.report()}"
            self.turn()

    def settle(self) -> None:
        """All that was seen is carried out."""
        self.turn(0.0)
        self.until(lambda: self.drain.is_drained)

    def end(self, timeout_s: float = END_S) -> DrainReport:
        self.drain.end(time.monotonic())
        self.until(lambda: self.drain.is_drained, timeout_s)
        return self.stop()

    def stop(self) -> DrainReport:
        """Ends as a kill does: nothing more is done."""
        report = self.drain.report()
        if not self.closed:
            self.drain.close()
            self.closed = True
        return report


@pytest.fixture
def start(local_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts drains, by default to `tmp_path/results`."""
    started: list[Running] = []

    def begin(target: Path | None = None, **options: object) -> Running:
        started.append(Running(local_dir / f"n{len(started)}", target or tmp_path / "results", **options))
        return started[-1]

    yield begin
    for running in started:
        running.stop()


def tree(root: Path, *, times: bool = False) -> dict[str, tuple[object, ...]]:
    """All that is below a directory: kinds, contents, modes, link texts, and times if wanted. A drain may be at work
    there: what goes while it is looked at is left out."""
    found: dict[str, tuple[object, ...]] = {}
    for directory, directories, files in os.walk(root):
        for name in (*directories, *files):
            path = Path(directory, name)
            with contextlib.suppress(FileNotFoundError):
                found[os.fspath(path.relative_to(root))] = _entry(path, times=times)
    return found


def _entry(path: Path, *, times: bool) -> tuple[object, ...]:
    status = path.lstat()
    what: object = None
    if stat.S_ISLNK(status.st_mode):
        what = os.readlink(path)
    elif stat.S_ISREG(status.st_mode):
        what = path.read_bytes()
    mode = 0 if stat.S_ISLNK(status.st_mode) else stat.S_IMODE(status.st_mode)
    return stat.S_IFMT(status.st_mode), what, mode, status.st_mtime_ns if times else 0
