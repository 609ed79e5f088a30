"""Whether the report tells the truth: how long the program computed, and when the source was slow.

Programs that read in several ways compute for a known time; what the record says of it is compared.

In each schedule a program runs for a known time behind `hpcstage run` while the competing load goes on and off; what
the record says of when, and by how much, the source fell is compared with what was done. Without load it must say
nothing.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.files import Place, empty, make_files, place, write_list
from benchmarks.harness import Bench, Figure, Options, at_most, holds, options_of, parser
from benchmarks.programs import hpcstage_command, record, run
from benchmarks.storage import Load, Storage
from benchmarks.truthful import cells
from hpcstage.emulator import Settings

MB = 1e6
BANDWIDTH = 24 * MB
LATENCY_S = 0.001
FILE_BYTES = 125_000
MOST_OFF_S = 2.0
MOST_LOSS_ERROR = 0.15
MOST_SPLIT_ERROR = 0.15
_PACED = """
import pathlib, sys, time
paths = pathlib.Path(sys.argv[1]).read_text().split("\\n")[:-1]
end_s = time.monotonic() + float(sys.argv[2])
for path in paths:
    pathlib.Path(path).read_bytes()
    time.sleep(0.2)
    if time.monotonic() > end_s:
        break
"""


@dataclass(frozen=True)
class Schedule:
    """When the load is on, in seconds from the start of the run."""

    name: str
    length_s: float
    periods: tuple[tuple[float, float], ...] = ()
    weight: float = 3.0

    @property
    def loss(self) -> float:
        """Of the source's bandwidth, while the load is on."""
        return self.weight / (1 + self.weight)


FULL = (
    Schedule("one period", 32, ((10, 20),)),
    Schedule("two periods", 40, ((6, 13), (22, 32)), weight=1.5),
    Schedule("on to the end", 30, ((14, 40),)),
    Schedule("no load", 24),
)
QUICK = (Schedule("one period", 14, ((5, 10),)), Schedule("no load", 8))


class Runs:
    """Runs behind hpcstage on emulated storage."""

    def __init__(self, where: Place, options: Options) -> None:
        self.where = where
        self.options = options

    def schedule(self, schedule: Schedule) -> dict[str, Any]:
        """A program that reads now and then, so that the copiers have the source, and a load by the clock."""
        data = self.where.memory / "long"
        if not data.exists():
            longest = max(s.length_s for s in (QUICK if self.options.quick else FULL))
            make_files(data, round(longest * BANDWIDTH / FILE_BYTES), FILE_BYTES)
        settings = Settings(BANDWIDTH, metadata_latency_s=LATENCY_S, data_latency_s=LATENCY_S)
        switched: list[tuple[float, float]] = []
        with Storage(data, settings, self.where.memory, Load(schedule.weight)) as storage:
            names = [str(storage.path / entry.name) for entry in sorted(data.iterdir())]
            order = write_list(self.where.disk / "order", names)
            words = [sys.executable, "-c", _PACED, str(order), str(schedule.length_s)]
            found, _ = self._run("runtime", f"@{order}", words, lambda: _Switch(storage, schedule, switched))
        start_unix_s = found["run"]["started_unix_s"]
        return {
            "expected": [[on - start_unix_s, off - start_unix_s] for on, off in switched],
            "reported": found["contention"]["periods"],
            "loss": schedule.loss,
            "best_bytes_per_s": found["contention"]["best_bytes_per_s"],
            "ended_s": found["time_split"]["before_s"] + found["time_split"]["wall_s"],
            "split": found["time_split"],
        }

    def _run(self, mode: str, data: str, words: Sequence[str], around: Any = None) -> tuple[dict[str, Any], float]:  # noqa: ANN401
        local, run_dir = self.where.local.renew(), empty(self.where.disk / "run")
        switch = around() if around else None
        try:
            done = run([*hpcstage_command(mode, run_dir, local, data), *words], self.where.disk)
        finally:
            if switch:
                switch.stop()
        return record(run_dir), done.seconds


class _Switch:
    """Turns the load on and off by the clock while the run goes on."""

    def __init__(self, storage: Storage, schedule: Schedule, switched: list[tuple[float, float]]) -> None:
        self._storage = storage
        self._schedule = schedule
        self._switched = switched
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go)
        self._started_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """The run has ended."""
        self._over.set()
        self._thread.join()

    def _go(self) -> None:
        for on_s, off_s in self._schedule.periods:
            self._wait_until(on_s)
            if self._over.is_set():
                return
            on_unix_s = time.time()
            self._storage.load_on()
            self._wait_until(off_s)
            self._storage.load_off()
            self._switched.append((on_unix_s, time.time()))

    def _wait_until(self, at_s: float) -> None:
        self._over.wait(max(0.0, self._started_s + at_s - time.monotonic()))


def computing(bench: Bench, chosen: Sequence[cells.Cell]) -> list[Figure]:
    """Where the record tells computing from waiting, it is what the program computed, but for start and end."""
    if not chosen:
        return []
    off = [
        abs(split["compute_s"] - cell.compute_s) / split["wall_s"]
        for cell in chosen
        for split in (s["split"] for s in bench.select(cell.name, "runtime"))
        if split["compute_s"] is not None
    ]
    return [at_most("time split: compute off by, of the wall time", max(off, default=None), MOST_SPLIT_ERROR)]


def figures(bench: Bench, chosen: Sequence[Schedule]) -> list[Figure]:
    """Times and losses."""
    made: list[Figure] = []
    for schedule in chosen:
        samples = bench.select(schedule.name, "runtime")
        if not schedule.periods:
            quiet = all(not s["reported"] for s in samples) if samples else None
            made.append(holds(f"{schedule.name}: no contention reported", quiet))
            continue
        off = [times_off_s(s["expected"], s["reported"], s["ended_s"]) for s in samples]
        loss = [loss_error(s["reported"], s["loss"]) for s in samples]
        made.append(at_most(f"{schedule.name}: periods off by", _median(off), MOST_OFF_S, "s"))
        made.append(at_most(f"{schedule.name}: loss of bandwidth off by", _median(loss), MOST_LOSS_ERROR))
    return made


def times_off_s(
    expected: Sequence[Sequence[float]], reported: Sequence[dict[str, float]], ended_s: float
) -> float | None:
    """The largest distance of an edge; None if the numbers of periods differ. Load after the end counts to the end."""
    if len(expected) != len(reported) or not expected:
        return None
    edges = [
        max(abs(on - said["start_s"]), abs(min(off, ended_s) - min(said["end_s"], ended_s)))
        for (on, off), said in zip(expected, reported, strict=True)
    ]
    return max(edges)


def loss_error(reported: Sequence[dict[str, float]], loss: float) -> float | None:
    """The largest relative error of a period's loss."""
    return max((abs(said["loss"] / loss - 1) for said in reported), default=None)


def _median(values: Sequence[float | None]) -> float | None:
    """None if any is: a run whose periods were missed does not vanish behind the others."""
    known = [v for v in values if v is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("truth", options, {"load": "real", "bandwidth": BANDWIDTH})
    chosen = [s for s in (QUICK if options.quick else FULL) if options.wants(s.name)]
    split = [c for c in (cells.QUICK if options.quick else cells.CELLS) if options.wants(c.name)]
    with place(options) as where:
        runs = Runs(where, options)
        for cell in split:
            bench.measure(cell.name, {"runtime": lambda c=cell: cells.staged(where, c)}, options.rounds(1))  # type: ignore[misc]
        for schedule in chosen:
            bench.measure(schedule.name, {"runtime": lambda s=schedule: runs.schedule(s)}, options.rounds(3))  # type: ignore[misc]
    return bench.finish([*figures(bench, chosen), *computing(bench, split)])


if __name__ == "__main__":
    sys.exit(main())
