"""A large file is read at random while it arrives, and processes of hpcstage are killed meanwhile: is every byte right?

Each try runs a program that reads one file with 8 threads and 8 forked processes and compares every byte
(`workload/arriving.py`). It begins when a part of the file has arrived. At a random moment the daemon, its copiers or
both get SIGKILL; in some tries the program writes to the file, or the local disk fills up. A try counts as passed if
the program found nothing wrong, and if no process and no node directory is left.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults import below, kill, started
from benchmarks.files import Place, empty, place
from benchmarks.harness import Bench, Figure, Options, at_least, holds, options_of, parser
from benchmarks.programs import hpcstage_command
from benchmarks.storage import Storage
from hpcstage.emulator import Settings
from hpcstage.protocol.arriving import (
    ARRIVING_FILE,
    ARRIVING_HEADER_BYTES,
    ARRIVING_READ,
    ARRIVING_ROW_BYTES,
    ARRIVING_ROWS,
    READ_OFFSET,
)

READING = Path(__file__).resolve().parent / "workload" / "arriving.py"
VICTIMS = ("daemon", "copiers", "both")
TURNS = 5
WRITES, FILLS = 1, 4
"""Of TURNS tries, that in which the program writes to the file, and that in which the local disk fills up."""
TRIES, QUICK_TRIES = 50, len(VICTIMS)
MOST_PER_KILL = 2
FILE_BYTES, QUICK_FILE_BYTES = 240_000_003, 50_000_003
READING_S, QUICK_READING_S = 12.0, 2.0
"""50 times 12 s are 10 minutes."""
BANDWIDTH = 20e6
BEGUN = 0.3
"""The part of the file that has arrived when it is opened."""
LIMIT_S = 120.0
GONE_S = 15.0


class Tries:
    """One file, and the program that reads it."""

    def __init__(self, where: Place, options: Options) -> None:
        self.where = where
        self.size = QUICK_FILE_BYTES if options.quick else FILE_BYTES
        self.reading_s = QUICK_READING_S if options.quick else READING_S
        self.made = where.memory / "made"
        self.made.write_bytes(random.Random(7).randbytes(self.size))
        self.data = where.memory / "data"
        self.data.mkdir()

    def one(self, number: int) -> dict[str, Any]:
        """One try; everything about it follows from its number but the machine's mood."""
        rng, turn = random.Random(number), number % TURNS
        victim, delay_s = VICTIMS[number % len(VICTIMS)], rng.uniform(0, 0.8 * self.reading_s)
        write_s = rng.uniform(0, 0.8 * self.reading_s) if turn == WRITES else None
        fill_s = rng.uniform(0, 0.8 * self.reading_s) if turn == FILLS else None
        shutil.copyfile(self.made, self.data / "large")
        local, run_dir, here = self.where.local.renew(), empty(self.where.disk / "run"), empty(self.where.disk / "here")
        fill_s = fill_s if self.where.local.is_loop else None
        events: list[tuple[float, Callable[[], object]]] = []
        empty(self.where.disk / "state")
        with Storage(self.data, Settings(BANDWIDTH, 0.001, 0.001), self.where.memory, keep_cache=True) as storage:
            head = hpcstage_command("runtime", run_dir, local, str(storage.path))
            command = [*head, *self._command(storage.path / "large", here, write_s)]
            with started(command, self.where.disk) as process:
                until((here / "begin").exists, process)
                until(lambda: storage.counters().read_bytes > BEGUN * self.size, process)
                ours, killed = below(process.pid), [0]
                events.append((delay_s, lambda: killed.append(kill(chosen(ours, victim)))))
                if fill_s is not None:
                    events.append((fill_s, lambda: fill(local)))
                go(here / "begin-go", str(int(BEGUN * self.size)))
                served = max(self._through(sorted(events, key=lambda event: event[0]), local))
                until((here / "end").exists, process)
                served = max(served, read_of_arriving(local))
                go(here / "end-go", "")
                out, err = process.communicate(timeout=LIMIT_S)
                left = psutil.wait_procs(ours, timeout=GONE_S)[1]
        with contextlib.suppress(OSError):
            (local / "filler").unlink()
        said = json.loads(out.splitlines()[-1]) if out.strip() else {}
        directories = [path.name for path in local.glob("hpcstage-*/*/")]
        return {
            "victim": victim, "killed": killed[-1], "delay_s": delay_s, "write_s": write_s, "fill_s": fill_s,
            "served_bytes": served, **said, "code": process.returncode, "processes_left": len(left),
            "directories_left": directories, "stderr": err.decode(errors="replace")[-1500:],
            "passed": process.returncode == 0 and not left and not directories,
        }  # fmt: skip

    def _command(self, path: Path, here: Path, write_s: float | None) -> list[str]:
        words = [sys.executable, str(READING), str(path), str(self.made), "--here", str(here)]
        words += ["--seconds", str(self.reading_s)]
        return words if write_s is None else [*words, "--write", str(write_s)]

    @staticmethod
    def _through(events: Sequence[tuple[float, Callable[[], object]]], local: Path) -> Iterator[int]:
        """Does each event at its moment, and tells what the program had been served by then."""
        begin = time.monotonic()
        for at, event in events:
            time.sleep(max(0.0, begin + at - time.monotonic()))  # the moment is the point, nothing waits for it
            yield read_of_arriving(local)
            event()


def chosen(ours: Sequence[psutil.Process], victim: str) -> list[psutil.Process]:
    """Whom to kill: the daemon is the oldest, the others are its children."""
    daemons = sorted(ours, key=lambda process: process.create_time())
    return {"daemon": daemons[:1], "copiers": daemons[1:], "both": daemons}[victim]


def fill(local: Path) -> None:
    """Leaves nothing of the disk."""
    fd = os.open(local / "filler", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        length, step, at = os.statvfs(fd).f_bavail * os.statvfs(fd).f_frsize, 1 << 30, 0
        while step >= 1 << 12:
            try:
                os.posix_fallocate(fd, at, min(step, max(length, 1 << 12)))
                at += step
            except OSError:
                step //= 2
    finally:
        os.close(fd)


def read_of_arriving(local: Path) -> int:
    """The bytes that programs have got from the incoming files that are shown now."""
    for path in local.glob(f"**/{ARRIVING_FILE}"):
        with contextlib.suppress(OSError):
            data = path.read_bytes()
            starts = [ARRIVING_HEADER_BYTES + row * ARRIVING_ROW_BYTES for row in range(ARRIVING_ROWS)]
            return sum(ARRIVING_READ.unpack_from(data, start + READ_OFFSET)[0] for start in starts)
    return 0


def until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)


def go(path: Path, text: str) -> None:
    scratch = path.with_suffix(".part")
    scratch.write_text(text)
    scratch.rename(path)


def measure(bench: Bench, options: Options) -> None:
    """The tries, each once."""
    tries = options.reps or (QUICK_TRIES if options.quick else TRIES)
    with place(options) as where:
        runs = Tries(where, options)
        done = {sample["round"] for sample in bench.select("tries", "try")}
        for number in range(MOST_PER_KILL * tries):
            if number not in done and sum(map(_hit, bench.select("tries", "try"))) < tries:
                bench.add("tries", "try", runs.one(number), number)


def _hit(sample: Mapping[str, Any]) -> bool:
    """Whether somebody was killed while the program was served."""
    return bool(sample["killed"]) and sample["served_bytes"] > 0


def figures(bench: Bench, tries: int) -> list[Figure]:
    """All must pass; only those that killed somebody while what had arrived was read count."""
    samples = bench.select("tries", "try")
    passed = sum(_hit(sample) and sample["passed"] for sample in samples)
    return [
        at_least("kills during which every byte was right", passed, tries),
        holds("every byte of all tries was right", all(s["passed"] for s in samples) if samples else None),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = options_of(parser(__doc__).parse_args(argv))
    bench = Bench("arriving", options, {"bandwidth": BANDWIDTH})
    measure(bench, options)
    return bench.finish(figures(bench, options.reps or (QUICK_TRIES if options.quick else TRIES)))


if __name__ == "__main__":
    sys.exit(main())
