"""Whether the order of an unmodified PyTorch program is known before its first batch, and what that costs.

Every form of sampler and loader runs alone and behind hpcstage, on emulated storage. Of each: whether copies followed
its samplers, and that data, weights and random states are the same to the bit. A list of 1.28 million
samples shows what an announcement takes.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.files import Place, empty, make_files, place
from benchmarks.harness import Arm, Bench, Figure, Options, Row, at_most, holds, options_of, parser
from benchmarks.programs import hpcstage_command, record, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings

MB = 1e6
LOADERS = Path(__file__).resolve().parent / "workload" / "loaders.py"
MANY = Path(__file__).resolve().parent / "workload" / "many.py"
ALONE, OURS = "without hpcstage", "runtime"
KNOWN = (
    "sequential", "random", "generator", "replacement", "subset-random", "weighted", "distributed",
    "distributed-ordered", "batch-sampler", "drop-last", "persistent", "spawn", "subset", "concat",
    "train-and-validation", "image-and-mask", "one-by-one", "list-of-batches",
)  # fmt: skip
UNKNOWN = ("unknown-sampler", "changed-sampler")
WORKERS = (0, 2)
FILES, QUICK_FILES, FILE_BYTES = 600, 120, 20_000
EPOCHS = 2
SETTINGS = Settings(bandwidth_bytes_per_s=20 * MB, metadata_latency_s=0.001, data_latency_s=0.001)
MANY_SAMPLES, QUICK_SAMPLES, MANY_FILES = 1_280_000, 20_000, 1280
MOST_ANNOUNCING_S = 0.5
MOST_MEMORY_MB = 50.0
KEYS = ("samples", "read", "states", "weights")


@dataclass(frozen=True)
class Cell:
    """One program."""

    form: str
    workers: int

    @property
    def name(self) -> str:
        """In results and for --only."""
        return f"{self.form}, workers {self.workers}"


def cells(quick: bool) -> list[Cell]:
    """All forms without and with workers."""
    forms = ("random", "distributed", "unknown-sampler") if quick else (*KNOWN, *UNKNOWN)
    made = [Cell(form, workers) for form in forms for workers in WORKERS]
    return [cell for cell in made if cell.workers or cell.form not in ("persistent", "spawn")]


class Runs:
    """One dataset, and the programs on it."""

    def __init__(self, where: Place, files: int) -> None:
        self.where = where
        self.data = where.memory / "data"
        make_files(self.data, files, FILE_BYTES)

    def arms(self, cell: Cell) -> dict[str, Arm]:
        """Alone, and behind `hpcstage run`."""
        return {ALONE: lambda: self._run(cell, staged=False), OURS: lambda: self._run(cell, staged=True)}

    def _run(self, cell: Cell, *, staged: bool) -> dict[str, Any]:
        run_dir, local = empty(self.where.disk / "run"), self.where.local.renew()
        shutil.rmtree(self.where.disk / "state", ignore_errors=True)  # no trace of the sample before
        with Storage(self.data, SETTINGS, self.where.memory) as storage:
            command = [sys.executable, str(LOADERS), "--data", str(storage.path), "--form", cell.form]
            command += ["--workers", str(cell.workers), "--epochs", str(EPOCHS)]
            if staged:
                command = [*hpcstage_command("runtime", run_dir, local, str(storage.path)), *command]
            done = run(command, self.where.disk)
        sample = {"seconds": done.seconds, **json.loads(done.stdout)}
        return {**sample, **(_order(run_dir) if staged else {})}

    def many_arms(self, samples: int) -> dict[str, Arm]:
        """A program with a long list of samples that asks for one batch."""
        return {
            ALONE: lambda: self._many(samples, staged=False),
            OURS: lambda: self._many(samples, staged=True),
        }

    def _many(self, samples: int, *, staged: bool) -> dict[str, Any]:
        data = self.where.disk / "many"
        if not data.exists():
            make_files(data, MANY_FILES, 100)
        run_dir, local = empty(self.where.disk / "run"), self.where.local.renew()
        with Storage(data, Settings(), self.where.memory) as storage:
            command = [sys.executable, str(MANY), str(storage.path), str(samples)]
            if staged:
                command = [*hpcstage_command("runtime", run_dir, local, str(storage.path)), *command]
            done = run(command, self.where.disk)
        return {**json.loads(done.stdout), **(_order(run_dir) if staged else {})}


def _order(run_dir: Path) -> dict[str, Any]:
    found = record(run_dir)
    order = found["order"]
    return {
        "provenance": order["provenance"],
        "announcements": order["announcements"],
        "unknown_samples": order["unknown_samples"],
        "lead": order["lead"],
        "swapped": found["coverage"]["swapped"],
    }


def figures(bench: Bench, chosen: list[Cell]) -> list[Figure]:
    """Per cell: the order was known, and nothing changed."""
    made: list[Figure] = []
    for cell in chosen:
        samples = bench.select(cell.name, OURS)
        alone = bench.select(cell.name, ALONE)
        both = samples and alone
        same = all(s[key] == alone[0][key] for s in [*samples, *alone] for key in KEYS) if both else None
        made.append(holds(f"{cell.name}: data, weights and random states identical", same))
        if cell.form in UNKNOWN:
            fact = all(s["announcements"] == 0 for s in samples) if samples else None
            made.append(holds(f"{cell.name}: left alone", fact))
            continue
        fact = all(s["provenance"] == "sampler" and not s["unknown_samples"] for s in samples) if samples else None
        made.append(holds(f"{cell.name}: copied in the announced order", fact))
    return made


def many_figures(bench: Bench, name: str) -> list[Figure]:
    """What the announcement of a long list takes."""
    ours, alone = bench.select(name, OURS), bench.select(name, ALONE)
    if not ours or not alone:
        return [holds(f"{name}: measured", None)]

    def middle(samples: list[dict[str, Any]], key: str) -> float:
        return float(statistics.median(s[key] for s in samples))

    seconds = middle(ours, "first_batch_s") - middle(alone, "first_batch_s")
    memory = (middle(ours, "peak_kib") - middle(alone, "peak_kib")) * 1024 / MB
    return [
        at_most(f"{name}: time from iter(loader) to the announcement", seconds, MOST_ANNOUNCING_S, "s"),
        at_most(f"{name}: memory in the program", memory, MOST_MEMORY_MB, "MB"),
        holds(f"{name}: was announced", all(s["announcements"] for s in ours)),
    ]


def table(bench: Bench, chosen: list[Cell], many: str) -> None:
    """What was known of each program."""
    rows: list[Row] = []
    for cell in chosen:
        for s in bench.select(cell.name, OURS)[:1]:
            alone = bench.median(cell.name, ALONE)
            rows.append([cell.name, s["provenance"], s["announcements"], alone, s["seconds"]])
    columns = ["program", "order", "announcements", "alone [s]", "behind hpcstage [s]"]
    bench.sheet("The order of an unmodified program", columns, rows, f"{EPOCHS} epochs; start-up of PyTorch included")
    rows = [
        [f"{many}, {arm}", bench.median(many, arm, "first_batch_s"), bench.median(many, arm, "peak_kib")]
        for arm in (ALONE, OURS)
    ]
    bench.sheet("A long list of samples", ["", "to the first index [s]", "peak memory [KiB]"], rows)


def measure(bench: Bench, options: Options, chosen: list[Cell], many: str) -> None:
    """All forms once or twice, the long list five times."""
    with place(options) as where:
        runs = Runs(where, QUICK_FILES if options.quick else FILES)
        for cell in chosen:
            bench.measure(cell.name, runs.arms(cell), options.rounds(2))
        if options.wants(many):
            bench.measure(many, runs.many_arms(many_samples(options)), options.rounds(5))


def many_samples(options: Options) -> int:
    """In a long list."""
    return QUICK_SAMPLES if options.quick else MANY_SAMPLES


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("order", options)
    samples = many_samples(options)
    many = f"{samples} samples"
    chosen = [cell for cell in cells(options.quick) if options.wants(cell.name)]
    measure(bench, options, chosen, many)
    table(bench, chosen, many)
    long = many_figures(bench, many) if options.wants(many) else []
    return bench.finish([*figures(bench, chosen), *long])


if __name__ == "__main__":
    sys.exit(main())
