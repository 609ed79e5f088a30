"""What learning costs a program where it gains nothing: the order cannot be known, or it is that of the manifest.

Owns two cells of `benchmarks.order`. The same training, its data in memory, runs with learning, with `--no-learn`, and
with clocks around everything that learning does in the program. One per cent cannot be seen in wall times: what is held
against it is the time by those clocks; the ratio of wall times stands beside.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.files import Place, empty, make_files, write_list
from benchmarks.harness import Arm, Bench, Figure, Options, Row, at_most, holds
from benchmarks.programs import Training, hpcstage_command, record, run

MB = 1e6
MANY = Path(__file__).resolve().parent / "workload" / "many.py"
TIMED = Path(__file__).resolve().parent / "workload" / "timed.py"
LEARNING, OFF, CLOCKED = "learning", "--no-learn", "learning, with clocks"
FILES, QUICK_FILES, FILE_BYTES = 1500, 100, 50_000
EPOCHS = 3
MANY_FILES = 1280
MOST_SHARE = 1.0
MOST_MEMORY_MB = 50.0


@dataclass(frozen=True)
class Cell:
    """One training program."""

    name: str
    own_sampler: bool
    layer: str = "native"

    @property
    def order(self) -> str:
        """As many.py names it."""
        return "own" if self.own_sampler else "manifest"


CELLS = (
    Cell("of no use: order unknown", own_sampler=True),
    Cell("of no use: manifest order", own_sampler=False),
    Cell("of no use: manifest order, python layer", own_sampler=False, layer="python"),
)


def long_name(cell: Cell, samples: int) -> str:
    """The cell of a long list of samples."""
    return f"{cell.name}, {samples} samples"


def chosen(options: Options) -> list[Cell]:
    """What --only lets through; --quick takes one."""
    cells = CELLS[:1] if options.quick else CELLS
    return [cell for cell in cells if options.wants(cell.name)]


class Runs:
    """The data, and the programs on it."""

    def __init__(self, where: Place, files: int) -> None:
        self.where = where
        self.data = where.memory / "plain"
        self.names = sorted(make_files(self.data, files, FILE_BYTES))
        self.listed = write_list(where.disk / "names", self.names)
        self.many = where.memory / "many-plain"
        make_files(self.many, MANY_FILES, 100)

    def arms(self, cell: Cell) -> dict[str, Arm]:
        """The training in three ways."""
        return {
            LEARNING: lambda: self._train(cell),
            OFF: lambda: self._train(cell, "--no-learn"),
            CLOCKED: lambda: self._clocked(cell),
        }

    def many_arms(self, cell: Cell, samples: int) -> dict[str, Arm]:
        """One batch of a long list."""
        return {
            LEARNING: lambda: self._many(cell, samples),
            OFF: lambda: self._many(cell, samples, "--no-learn"),
        }

    def _train(self, cell: Cell, *options: str) -> dict[str, Any]:
        sample, _ = self._behind(self.data, ("--intercept", cell.layer, *options), self._training(cell))
        times = json.loads((self.where.disk / "timings.json").read_text(encoding="utf-8"))
        epochs_s = sum(end - start for start, end in times["epochs_s"])
        return {**sample, "epochs_s": epochs_s, "sample_s": epochs_s / EPOCHS / len(self.names)}

    def _training(self, cell: Cell) -> list[str]:
        timings = self.where.disk / "timings.json"
        made = Training(self.data, self.listed, epochs=EPOCHS, own_sampler=cell.own_sampler, timings=timings)
        return made.command()

    def _clocked(self, cell: Cell) -> dict[str, Any]:
        out = self.where.disk / "clocks.json"
        timed = [sys.executable, str(TIMED), str(out), str(self.data / self.names[0]), *self._training(cell)[1:]]
        sample, _ = self._behind(self.data, ("--intercept", cell.layer), timed)
        clocks = json.loads(out.read_text(encoding="utf-8"))
        spent_s = clocks["epochs_s"] + clocks["batches_s"]
        spent_s += clocks["samples"] * (clocks["mark_us"] + clocks["log_us"]) / 1e6
        return {**sample, "clocks": clocks, "spent_s": spent_s, "share": 100 * spent_s / clocks["program_s"]}

    def _many(self, cell: Cell, samples: int, *options: str) -> dict[str, Any]:
        command = [sys.executable, str(MANY), str(self.many), str(samples), cell.order]
        sample, stdout = self._behind(self.many, ("--intercept", cell.layer, *options), command)
        return {**sample, **json.loads(stdout)}

    def _behind(self, data: Path, options: Sequence[str], command: Sequence[str]) -> tuple[dict[str, Any], str]:
        where, before_s = self.where, _children_cpu_s()
        run_dir, local = empty(where.disk / "run"), where.local.renew()
        done = run([*hpcstage_command("runtime", run_dir, local, str(data), options), *command], where.disk)
        found = record(run_dir)
        return {
            "seconds": done.seconds,
            "announcements": found["order"]["announcements"],
            "swapped": found["coverage"]["swapped"],
            "layers": sorted(found["coverage"]["by_layer"]),
            "daemon_cpu_s": _children_cpu_s() - before_s - found["run"]["child_cpu_s"],
        }, done.stdout


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(bench: Bench, options: Options, runs: Runs, samples: int) -> None:
    """Each cell, and its long list."""
    for cell in chosen(options):
        bench.measure(cell.name, runs.arms(cell), options.rounds(5))
        bench.measure(long_name(cell, samples), runs.many_arms(cell, samples), options.rounds(3))


def figures(bench: Bench, options: Options, samples: int) -> list[Figure]:
    """The share of the run, and the memory."""
    made: list[Figure] = []
    for cell in chosen(options):
        name, long = cell.name, long_name(cell, samples)
        made.append(at_most(f"{name}: time of the run", bench.median(name, CLOCKED, "share"), MOST_SHARE, "%"))
        made.append(at_most(f"{long}: time of an epoch", long_share(bench, cell, samples), MOST_SHARE, "%"))
        memory = _more(bench, long, "peak_kib")
        memory_mb = None if memory is None else memory * 1024 / MB
        made.append(at_most(f"{long}: memory in the program", memory_mb, MOST_MEMORY_MB, "MB"))
        made.append(holds(f"{name}: measured what it says", _as_meant(bench, cell)))
    return made


def long_share(bench: Bench, cell: Cell, samples: int) -> float | None:
    """Of an epoch with so many samples, at the training's time for each: one announcement, and each sample's cost."""
    announcing_s, sample_s = _more(bench, long_name(cell, samples), "first_batch_s"), sample_time_s(bench, cell)
    clocks = [s["clocks"] for s in bench.select(cell.name, CLOCKED)]
    if announcing_s is None or sample_s is None or not clocks:
        return None
    each_s: list[float] = [
        float(c["mark_us"] + c["log_us"]) / 1e6 + c["batches_s"] / max(c["samples"], 1) for c in clocks
    ]
    spent_s = max(announcing_s, 0.0) + samples * statistics.median(each_s)
    return 100 * spent_s / (samples * sample_s)


def sample_time_s(bench: Bench, cell: Cell) -> float | None:
    """What one sample takes in the training."""
    return bench.median(cell.name, OFF, "sample_s")


def _more(bench: Bench, cell: str, key: str) -> float | None:
    ours, off = bench.median(cell, LEARNING, key), bench.median(cell, OFF, key)
    return None if ours is None or off is None else ours - off


def _as_meant(bench: Bench, cell: Cell) -> bool | None:
    """Learning learnt, or left alone what it does not know; without it nothing was announced; the layer is that one."""
    ours, off = bench.select(cell.name, LEARNING), bench.select(cell.name, OFF)
    clocked = bench.select(cell.name, CLOCKED)
    if not (ours and off and clocked):
        return None
    # An epoch that begins when all is staged and known is not announced any more.
    right = all((s["announcements"] > 0) is not cell.own_sampler for s in [*ours, *clocked])
    right &= all(s["announcements"] == 0 for s in off)
    right &= all(s["clocks"]["samples"] > 0 for s in clocked)
    return right and all(s["swapped"] and cell.layer in s["layers"] for s in [*ours, *off, *clocked])


def table(bench: Bench, options: Options, samples: int) -> None:
    """Where the time goes; wall times beside."""
    rows: list[Row] = []
    for cell in chosen(options):
        clocks = [s["clocks"] for s in bench.select(cell.name, CLOCKED)]
        if not clocks:
            continue
        middle = sorted(clocks, key=lambda c: float(c["epochs_s"] + c["batches_s"]))[len(clocks) // 2]
        epochs_ms, batches_ms = middle["epochs_s"] * 1e3, middle["batches_s"] * 1e3
        rows.append([cell.name, epochs_ms, batches_ms, middle["samples"], middle["mark_us"], middle["log_us"]])
    columns = ["", "epochs [ms]", "batches [ms]", "samples marked", "a mark [us]", "a logged open [us]"]
    bench.sheet("Learning where it is of no use: time in the program", columns, rows, f"{EPOCHS} epochs")
    rows = []
    for cell in chosen(options):
        name, long = cell.name, long_name(cell, samples)
        on_s, off_s = bench.median(name, LEARNING), bench.median(name, OFF)
        sample_s = sample_time_s(bench, cell)
        sample_ms = None if sample_s is None else sample_s * 1e3
        daemon_s = _more(bench, name, "daemon_cpu_s")
        rows.append([name, on_s, off_s, bench.ratio(name, LEARNING, OFF), daemon_s, sample_ms])
        first = [bench.median(long, arm, "first_batch_s") for arm in (LEARNING, OFF)]
        rows.append([f"{long}, first batch", *first, None, None, None])
    columns = ["", "learning [s]", "--no-learn [s]", "ratio", "daemon, more [cpu s]", "a sample [ms]"]
    bench.sheet("The same, wall times", columns, rows, "the noise of wall times is larger than what is sought")
