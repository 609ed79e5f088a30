"""Very many output files: how long the end takes, what memory, and what a large removal costs those who read data.

`write`: a program writes a million files of 1 kB, into `{out}` and plainly into a directory of the same file system
(in memory); the end is the time from the program's end to that of the command. `remove`: while 100,000 such files wait
for the way to DIR, at a low `--drain-rate`, the program removes them all, and opens files of a dataset meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.files import Place, empty, make_files, place
from benchmarks.harness import Bench, Figure, Options, at_most, holds, options_of, parser
from benchmarks.programs import CommandFailed, environment
from benchmarks.workload import million

PROGRAM = Path(million.__file__)
WRITE, REMOVE = "write", "remove"
PLAIN, OUT = "plain", "out"
FILES, QUICK_FILES = 1_000_000, 5_000
REMOVED, QUICK_REMOVED = 100_000, 2_000
DATA_FILES, DATA_BYTES = 200, 10_000
WAITING_RATE = "100KB"
"""A second: at 1 kB each, nearly all files wait when they are removed."""
MOST_OPEN_MS = 50.0
SAMPLE_S = 0.2


class Runs:
    """The directories, and the programs."""

    def __init__(self, where: Place, *, quick: bool) -> None:
        self._where = where
        self._target = where.memory / "results"
        self._files = QUICK_FILES if quick else FILES
        self._removed = QUICK_REMOVED if quick else REMOVED

    def write(self, arm: str) -> dict[str, Any]:
        """The million."""
        return self._run(arm, [WRITE], self._files, [])

    def remove(self, arm: str) -> dict[str, Any]:
        """The removal. Whoever opens files of the dataset reads copies, or the source, as it comes."""
        data = self._where.memory / "data"
        if not data.exists():
            make_files(data, DATA_FILES, DATA_BYTES)
        return self._run(arm, [REMOVE], self._removed, [str(data)])

    def _run(self, arm: str, work: Sequence[str], count: int, data: Sequence[str]) -> dict[str, Any]:
        target, local, run_dir = empty(self._target), self._where.local.renew(), empty(self._where.disk / "run")
        words = [sys.executable, "-m", "hpcstage", "run", "--out", str(target), "--local-dir", str(local)]
        words += [word for path in data for word in ("--data", path, "--drain-rate", WAITING_RATE)]
        words += ["--run-dir", str(run_dir), "--"]
        place = "{out}" if arm == OUT else str(target)
        command = [*(words if arm == OUT else []), sys.executable, str(PROGRAM), *work, place, str(count), *data]
        began = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self._where.disk,
            env=environment(self._where.disk),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        with _memory(process.pid) as peak:
            stdout, stderr = process.communicate()
        ended = time.monotonic()
        if process.returncode:
            raise CommandFailed(f"exit code {process.returncode}: {stderr.decode(errors='replace')[-2000:]}")
        said = json.loads(stdout.decode().splitlines()[0])
        found = sum(1 for _ in target.rglob("f*"))
        return {
            "seconds": ended - began, "end_s": ended - said.pop("ended"), **said,
            "peak_mb": max(peak, default=0) / 1e6, "files": found,
        }  # fmt: skip


@contextlib.contextmanager
def _memory(pid: int) -> Iterator[list[int]]:
    """Gives the memory of a process and of all below it that are hpcstage's, each moment's sum."""
    sums: list[int] = []
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(SAMPLE_S):
            with contextlib.suppress(psutil.Error):
                top = psutil.Process(pid)
                sums.append(sum(map(_own_bytes, [top, *top.children(recursive=True)])))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield sums
    finally:
        ended.set()
        looking.join()


def _own_bytes(process: psutil.Process) -> int:
    try:
        is_program = str(PROGRAM) in process.cmdline() and "hpcstage" not in process.cmdline()
        return 0 if is_program else int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def figures(bench: Bench, options: Options) -> list[Figure]:
    """What is stated."""
    found: list[Figure] = []
    if options.wants(WRITE):
        files = QUICK_FILES if options.quick else FILES
        of = bench.select(WRITE, OUT)
        found.append(holds(f"{files} files: all are in DIR", bool(of) and all(s["files"] == files for s in of)))
    if options.wants(REMOVE):
        of = bench.select(REMOVE, OUT)
        found.append(holds("removed files: none is in DIR", bool(of) and not any(s["files"] for s in of)))
        longest = max((s["longest_open_ms"] for s in of), default=None)
        found.append(at_most("a removal: longest open of a dataset's file", longest, MOST_OPEN_MS, "ms"))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = options_of(parser(__doc__).parse_args(argv))
    bench = Bench("million", options, {"files": FILES, "removed": REMOVED})
    with place(options) as where:
        runs = Runs(where, quick=options.quick)
        for cell, work, rounds in ((WRITE, runs.write, 1), (REMOVE, runs.remove, 3)):
            if options.wants(cell):
                arms = {arm: (lambda work=work, arm=arm: work(arm)) for arm in (PLAIN, OUT)}
                bench.measure(cell, arms, options.rounds(rounds))
    return bench.finish(figures(bench, options))


if __name__ == "__main__":
    sys.exit(main())
