"""Losses and final weights, bit for bit: without hpcstage and in its three modes, num_workers 0, 2 (fork), 2 (spawn).

Owns the comparison of what the program printed (all losses with all their bits, a digest of the weights) and of the
file of weights that it wrote.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.files import Place, empty, make_files, place, write_list
from benchmarks.harness import Arm, Bench, Figure, Options, holds, options_of, parser
from benchmarks.programs import Training, hpcstage_command, record, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings

MB = 1e6
MODES = ("direct", "upfront", "runtime")
ALONE = "without hpcstage"
FILE_BYTES = 60_000
SETTINGS = Settings(bandwidth_bytes_per_s=20 * MB, metadata_latency_s=0.002, data_latency_s=0.002)
EPOCHS = 2


@dataclass(frozen=True)
class Loader:
    """How the program reads."""

    workers: int
    start_method: str = "fork"

    @property
    def name(self) -> str:
        """In results and for --only."""
        return f"workers {self.workers}" + (f" {self.start_method}" if self.workers else "")


LOADERS = (Loader(0), Loader(2, "fork"), Loader(2, "spawn"))


class Runs:
    """One dataset, and the program on it."""

    def __init__(self, where: Place, files: int) -> None:
        self.where = where
        self.data = where.memory / "data"
        names = make_files(self.data, files, FILE_BYTES)
        self.names = write_list(where.disk / "names", names)
        self.order = write_list(where.disk / "order", [str(where.memory / "shared" / name) for name in names])

    def arms(self, loader: Loader) -> dict[str, Arm]:
        """Alone, and behind each mode."""
        made: dict[str, Arm] = {ALONE: lambda: self._run(loader, None)}
        for mode in MODES:
            made[mode] = lambda mode=mode: self._run(loader, mode)  # type: ignore[misc]
        return made

    def _run(self, loader: Loader, mode: str | None) -> dict[str, Any]:
        weights = self.where.disk / "weights.pt"
        weights.unlink(missing_ok=True)
        local, run_dir = self.where.local.renew(), empty(self.where.disk / "run")
        training = Training(
            data=self.data,
            names=self.names,
            epochs=EPOCHS,
            workers=loader.workers,
            start_method=loader.start_method,
            weights=weights,
        )
        with Storage(self.data, SETTINGS, self.where.memory) as storage:
            command = replace(training, data=storage.path).command()
            if mode:
                command = [*hpcstage_command(mode, run_dir, local, f"@{self.order}"), *command]
            done = run(command, self.where.disk)
        found = record(run_dir)["coverage"] if mode else {}
        return {
            "seconds": done.seconds,
            "stdout": done.stdout,
            "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "opens": found.get("opens"),
            "swapped": found.get("swapped"),
        }


def figures(bench: Bench, chosen: list[Loader]) -> list[Figure]:
    """Identical, and not because nothing was staged."""
    made = []
    for loader in chosen:
        alone = bench.select(loader.name, ALONE)
        for mode in MODES:
            samples = bench.select(loader.name, mode)
            same = all(_same(s, alone[0]) for s in [*samples, *alone]) if samples and alone else None
            made.append(holds(f"{loader.name}, {mode}: losses and weights identical", same))
        for mode in ("upfront", "runtime"):
            swapped = [bool(s["swapped"]) for s in bench.select(loader.name, mode)]
            made.append(holds(f"{loader.name}, {mode}: staged copies were read", all(swapped) if swapped else None))
    return made


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("stdout", "weights_sha256"))


def measure(bench: Bench, options: Options, chosen: list[Loader]) -> None:
    """Each arm twice in a full run: chance would show."""
    with place(options) as where:
        runs = Runs(where, 64 if options.quick else 400)
        for loader in chosen:
            bench.measure(loader.name, runs.arms(loader), options.rounds(2))


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("identity", options)
    loaders = LOADERS[:2] if options.quick else LOADERS
    chosen = [loader for loader in loaders if options.wants(loader.name)]
    measure(bench, options, chosen)
    return bench.finish(figures(bench, chosen))


if __name__ == "__main__":
    sys.exit(main())
