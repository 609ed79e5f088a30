"""Loading with threads in each worker: samples/s for workers x threads, beside PyTorch's loader in the same run.

Samples that wait (small files on emulated storage with latency) and samples that work (unpacking images, files in
memory). Every arm shuffles, crops and mirrors with the same seeds, and all arms with as many workers must give the same
batches, bit for bit. Seconds are those of a whole epoch, with the start of its workers.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.files import Place, empty, place
from benchmarks.harness import Arm, Bench, Figure, Options, at_least, divide, holds, options_of, parser, worst
from benchmarks.storage import Storage
from benchmarks.workload.threads_load import SIDES, Epoch, make, measure
from hpcstage.emulator import Settings

MB = 1e6
PLAIN = "PyTorch"
WORKERS = (0, 1, 2)
THREADS = (1, 2, 4, 8)
LEAST_GAIN_PERCENT = 24.0
SETTINGS = Settings(bandwidth_bytes_per_s=400 * MB, metadata_latency_s=0.002, data_latency_s=0.004)


@dataclass(frozen=True)
class Cell:
    """One kind of samples, with so many workers."""

    kind: str
    workers: int

    @property
    def name(self) -> str:
        """In results and for --only."""
        return f"{self.kind}, {self.workers} workers"


class Loaders:
    """Data sets, and one epoch at a time."""

    def __init__(self, where: Place, options: Options) -> None:
        self._where = where
        self._count = 64 if options.quick else 320
        for kind in SIDES:
            make(kind, where.memory / kind, self._count)

    def arms(self, cell: Cell) -> dict[str, Arm]:
        """PyTorch's loader, and ours with so many threads."""
        arms: dict[str, Arm] = {PLAIN: partial(self._epoch, cell, None)}
        return arms | {f"{threads} threads": partial(self._epoch, cell, threads) for threads in THREADS}

    def _epoch(self, cell: Cell, threads: int | None) -> dict[str, Any]:
        data = self._where.memory / cell.kind
        if cell.kind == "decode":
            return measure(Epoch(cell.kind, data, self._count, cell.workers, threads))
        with Storage(data, SETTINGS, empty(self._where.memory / "mounts")) as storage:
            return measure(Epoch(cell.kind, storage.path, self._count, cell.workers, threads))


def gain_percent(bench: Bench, cell: Cell, arm: str) -> float | None:
    """By how much an arm loads faster than PyTorch."""
    ratio = divide(bench.median(cell.name, PLAIN), bench.median(cell.name, arm))
    return None if ratio is None else 100 * (ratio - 1)


def best_gain(bench: Bench, cell: Cell) -> float | None:
    """Of the best number of threads."""
    return worst([gain_percent(bench, cell, f"{threads} threads") for threads in THREADS], max)


def figures(bench: Bench, chosen: list[Cell]) -> list[Figure]:
    """Asked of samples that wait; those that work find no more cores than there are."""
    made = [
        at_least(f"{cell.name}: faster than PyTorch", best_gain(bench, cell), LEAST_GAIN_PERCENT, "%")
        for cell in chosen
        if cell.kind == "io"
    ]
    digests = [{s["digest"] for s in bench.samples if s["cell"] == cell.name} for cell in chosen]
    return [*made, holds("the same batches in all arms", all(len(d) == 1 for d in digests) if digests else None)]


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("threads", options, {"cpus": os.cpu_count()})
    chosen = [Cell(kind, workers) for kind in SIDES for workers in WORKERS]
    chosen = [cell for cell in chosen if options.wants(cell.name)]
    with place(options) as where:
        loaders = Loaders(where, options)
        for cell in chosen:
            bench.measure(cell.name, loaders.arms(cell), options.rounds(5))
    return bench.finish(figures(bench, chosen))


if __name__ == "__main__":
    sys.exit(main())
