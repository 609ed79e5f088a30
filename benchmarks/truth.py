"""Whether the report tells the truth: how long the program computed, when the source was slow, and what was read.

Programs that read in several ways compute for a known time; what the record says of it is compared.

In each schedule a program runs for a known time behind `hpcstage run` while the competing load goes on and off; what
the record says of when, and by how much, the source fell is compared with what was done. Without load it must say
nothing. The counters are compared over runs that read everything once.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.files import Place, empty, make_files, place, write_list
from benchmarks.harness import Bench, Figure, Options, Row, at_most, holds, options_of, parser
from benchmarks.programs import Training, hpcstage_command, record, run
from benchmarks.storage import Load, Storage
from benchmarks.truthful import cells, patterns
from hpcstage.emulator import Settings

MB = 1e6
BANDWIDTH = 24 * MB
LATENCY_S = 0.001
FILE_BYTES = 125_000
MOST_OFF_S = 2.0
MOST_LOSS_ERROR = 0.15
MOST_COUNT_ERROR = 0.01
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
PATTERN_S = 40
"""At the full bandwidth the files last so long."""
QUICK = (Schedule("one period", 14, ((5, 10),)), Schedule("no load", 8))
MOST_SILENT = 0.25
COUNTED = ("direct", "upfront", "runtime")


class Runs:
    """Runs behind hpcstage on emulated storage."""

    def __init__(self, where: Place, options: Options, load_kind: str) -> None:
        self.where = where
        self.options = options
        self.load_kind = load_kind

    def schedule(self, schedule: Schedule) -> dict[str, Any]:
        """A program that reads now and then, so that the copiers have the source, and a load by the clock."""
        data = self.where.memory / "long"
        if not data.exists():
            longest = max(s.length_s for s in (QUICK if self.options.quick else FULL))
            make_files(data, round(longest * BANDWIDTH / FILE_BYTES), FILE_BYTES)
        settings = Settings(BANDWIDTH, metadata_latency_s=LATENCY_S, data_latency_s=LATENCY_S)
        switched: list[tuple[float, float]] = []
        with Storage(data, settings, self.where.memory, Load(schedule.weight, self.load_kind)) as storage:
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
            **_split(found),
        }

    def pattern(self, pattern: patterns.Pattern) -> dict[str, Any]:
        """The same program on a source that follows a pattern."""
        data = self.where.memory / "long"
        if not data.exists():
            make_files(data, round(PATTERN_S * BANDWIDTH / FILE_BYTES), FILE_BYTES)
        settings = Settings(BANDWIDTH, metadata_latency_s=LATENCY_S, data_latency_s=LATENCY_S)
        with Storage(data, settings, self.where.memory) as storage:
            names = [str(storage.path / entry.name) for entry in sorted(data.iterdir())]
            order = write_list(self.where.disk / "order", names)
            words = [sys.executable, "-c", _PACED, str(order), str(pattern.length_s)]
            with patterns.played(storage, pattern, settings):
                found, _ = self._run("runtime", f"@{order}", words)
        part = found["contention"]
        return {"verdict": part["verdict"], "reported": part["periods"]}

    def counted(self, mode: str) -> dict[str, Any]:
        """Everything read once or twice by a training, and both sides' counters."""
        data = self.where.memory / "counted"
        files = 100 if self.options.quick else 800
        names = (
            [entry.name for entry in sorted(data.iterdir())] if data.exists() else make_files(data, files, FILE_BYTES)
        )
        settings = Settings(100 * MB, metadata_latency_s=LATENCY_S, data_latency_s=LATENCY_S)
        with Storage(data, settings, self.where.memory) as storage:
            timings = self.where.disk / "timings.json"
            listed = write_list(self.where.disk / "names", names)
            order = write_list(self.where.disk / "order", [str(storage.path / name) for name in names])
            words = Training(storage.path, listed, epochs=2, timings=timings).command()
            given = str(storage.path) if mode == "upfront" else f"@{order}"
            before = storage.counters()
            found, seconds = self._run(mode, given, words)
            asked = storage.counters() - before
        totals = found["totals"]
        own = json.loads(timings.read_text(encoding="utf-8"))
        return {
            "seconds": seconds,
            "bytes": [totals["source_bytes"], asked.read_bytes],
            "opens": [totals["source_opens"], asked.opens],
            "operations": [_add(totals["source_opens"], totals["source_listings"]), asked.opens + asked.listings],
            "own_s": own["end_s"] - own["start_s"],
            **_split(found),
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


def _split(found: dict[str, Any]) -> dict[str, Any]:
    """The time split."""
    split = found["time_split"]
    return {"split": split, "split_wall_s": split["wall_s"]}


def _add(count: int | None, more: int | None) -> int | None:
    """Unknown if the first is; the second counts as none."""
    return None if count is None else count + (more or 0)


def verdicts(bench: Bench, chosen: Sequence[patterns.Pattern]) -> list[Figure]:
    """A source that is slow for a second at times is never called free of contention, a steady one never contended."""
    made: list[Figure] = []
    unknown = 0
    for pattern in chosen:
        said = [s["verdict"] for s in bench.select(_name(pattern), "runtime")]
        wrong = "none" if pattern.is_slow else "periods"
        made.append(holds(f"{_name(pattern)}: not taken for the contrary", wrong not in said if said else None))
        unknown += "unknown" in said
    if chosen:
        made.append(at_most("patterns: share of which nothing is said", unknown / len(chosen), MOST_SILENT))
    return made


def _name(pattern: patterns.Pattern) -> str:
    return f"pattern, {pattern.name}"


def pattern_table(bench: Bench, chosen: Sequence[patterns.Pattern]) -> None:
    """What was done beside what was said."""
    rows: list[Row] = []
    for pattern in chosen:
        for s in bench.select(_name(pattern), "runtime"):
            said = ", ".join(f"{p['start_s']:.1f} to {p['end_s']:.1f} (-{p['loss']:.0%})" for p in s["reported"])
            rows.append([pattern.name, s["verdict"], said])
    bench.sheet("Patterns of a source", ["", "verdict", "reported [s]"], rows)


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


def figures(bench: Bench, chosen: Sequence[Schedule], modes: Sequence[str]) -> list[Figure]:
    """Times, losses, counters, sums."""
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
    for mode in modes:
        samples = bench.select("counters", mode)
        for key in ("bytes", "opens", "operations"):
            errors = [abs(s[key][0] / s[key][1] - 1) for s in samples if s[key][0] is not None and s[key][1]]
            made.append(at_most(f"counters, {mode}: {key} off by", _median(errors), MOST_COUNT_ERROR))
    # The command's wall time holds the program's own clock, and is held by that of the whole run.
    walls = [
        max(s["own_s"] - s["split_wall_s"], s["split_wall_s"] - s["seconds"]) for s in bench.samples if "own_s" in s
    ]
    if modes:
        made.append(at_most("time split: wall time outside of what is possible by", max(walls, default=None), 0.0, "s"))
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


def tables(bench: Bench, chosen: Sequence[Schedule], modes: Sequence[str]) -> None:
    """What was done beside what was said."""
    rows: list[Row] = []
    for schedule in chosen:
        for s in bench.select(schedule.name, "runtime"):
            done = ", ".join(f"{on:.1f} to {off:.1f}" for on, off in s["expected"])
            said = ", ".join(f"{p['start_s']:.1f} to {p['end_s']:.1f} (-{p['loss']:.0%})" for p in s["reported"])
            rows.append([schedule.name, f"{done or 'none'} (-{s['loss']:.0%})", said or "none"])
    bench.sheet("Contention", ["", "load [s]", "reported [s]"], rows)
    counts: list[Row] = []
    for mode in modes:
        for s in bench.select("counters", mode)[:1]:
            counts += [[f"{mode}, {key}", *s[key]] for key in ("bytes", "opens", "operations")]
    bench.sheet("Counters", ["", "reported", "emulator"], counts)


def main() -> int:
    """Measures, prints, checks."""
    made = parser(__doc__)
    made.add_argument("--load", choices=("real", "virtual"), default="real", help="who makes the competing load")
    given = made.parse_args()
    options = options_of(given)
    bench = Bench("truth", options, {"load": given.load, "bandwidth": BANDWIDTH})
    chosen = [s for s in (QUICK if options.quick else FULL) if options.wants(s.name)]
    modes = COUNTED if options.wants("counters") else ()
    split = [c for c in (cells.QUICK if options.quick else cells.CELLS) if options.wants(c.name)]
    played = [p for p in patterns.PATTERNS if options.wants(_name(p)) and not options.quick]
    with place(options) as where:
        runs = Runs(where, options, given.load)
        for cell in split:
            bench.measure(cell.name, {"runtime": lambda c=cell: cells.staged(where, c)}, options.rounds(1))  # type: ignore[misc]
        if modes:
            bench.measure("counters", {m: lambda m=m: runs.counted(m) for m in modes}, options.rounds(3))  # type: ignore[misc]
        for pattern in played:
            bench.measure(_name(pattern), {"runtime": lambda p=pattern: runs.pattern(p)}, options.rounds(1))  # type: ignore[misc]
        for schedule in chosen:
            bench.measure(schedule.name, {"runtime": lambda s=schedule: runs.schedule(s)}, options.rounds(3))  # type: ignore[misc]
    tables(bench, chosen, modes)
    pattern_table(bench, played)
    return bench.finish([*figures(bench, chosen, modes), *computing(bench, split), *verdicts(bench, played)])


if __name__ == "__main__":
    sys.exit(main())
