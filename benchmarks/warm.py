"""The warm path: later epochs against local files without hpcstage, the shim's cost per open, interpreter start.

An open's cost is the difference between the same calls in a process behind `hpcstage run` and in one without it; on a
hit the latter opens a local file at a path of the same depth. All arms alternate; of epochs, those of two programs do:
one runs behind hpcstage and one without it, and each epoch of one waits for that of the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.files import Place, empty, make_files, place, write_list
from benchmarks.harness import Arm, Bench, Figure, Options, at_most, holds, options_of, parser
from benchmarks.programs import Training, hpcstage_command, record, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings

MB = 1e6
OPENS = Path(__file__).resolve().parent / "workload" / "opens.py"
FILE_BYTES = 125_000
SETTINGS = Settings(bandwidth_bytes_per_s=200 * MB, metadata_latency_s=0.001, data_latency_s=0.001)
MOST_OF_LOCAL = 1.02
MOST_START_MS = 15.0
MOST_US = {("native", "outside"): 0.3, ("native", "below"): 0.5}
LAYERS = ("native",)
CALLS = ("os_open", "file_open")
ALONE = "without hpcstage"
PAIR = "in turn"


class Warm:
    """The data, and the two experiments."""

    def __init__(self, where: Place, options: Options) -> None:
        self.where = where
        self.quick = options.quick
        self.data = where.memory / "data"
        self.names = make_files(self.data, 60 if options.quick else 1000, FILE_BYTES)
        self.listed = write_list(where.disk / "names", self.names)
        self.order = write_list(where.disk / "order", [str(where.memory / "shared" / name) for name in self.names])
        self.epochs = 3 if options.quick else 5

    def epochs_arms(self, workers: int) -> dict[str, Arm]:
        """Later epochs on local files, and on what hpcstage staged in the first."""
        return {PAIR: lambda: self._in_turn(workers)}

    def open_arms(self) -> dict[str, Arm]:
        """The same calls without hpcstage and in each layer."""
        made: dict[str, Arm] = {ALONE: self._opens_alone}
        for layer in LAYERS:
            made[layer] = lambda layer=layer: self._opens(layer)  # type: ignore[misc]
        return made

    def _in_turn(self, workers: int) -> dict[str, Any]:
        local = self.where.disk / "copy"
        shutil.copytree(self.data, local)
        with Storage(self.data, SETTINGS, self.where.memory) as storage, self._turns() as (mine, others):
            staged = self._training("staged", storage.path, workers, (mine, others))
            alone = self._training("local", local, workers, (others, mine))
            with ThreadPoolExecutor(1) as beside:
                ended = beside.submit(run, alone.command(), self.where.disk)
                found, _ = self._behind("runtime", (), staged.command())
                ended.result()
        shutil.rmtree(local)
        times = {"staged_s": self._later("staged"), "local_s": self._later("local")}
        return {"seconds": statistics.median(times["staged_s"]), **times, "share": _swapped(found["coverage"])}

    @contextlib.contextmanager
    def _turns(self) -> Iterator[tuple[Path, Path]]:
        """Two FIFOs; who reads the first may begin. What is in one is gone when nobody has it open."""
        folder = empty(self.where.disk / "turns")
        ends = folder / "first", folder / "second"
        for end in ends:
            os.mkfifo(end)
        kept = os.open(ends[0], os.O_RDWR)
        try:
            os.write(kept, b".")
            yield ends
        finally:
            os.close(kept)

    def _training(self, name: str, data: Path, workers: int, turns: tuple[Path, Path]) -> Training:
        timings = self.where.disk / f"{name}.json"
        return Training(data, self.listed, epochs=self.epochs, workers=workers, timings=timings, turns=turns)

    def _opens_alone(self) -> dict[str, Any]:
        store = self.where.local.renew() / "hpcstage-0" / "20260101-000000-abcdef" / "store" / "0-shared"
        store.mkdir(parents=True)
        shutil.copy(self.data / self.names[0], store)
        done = run(self._open_words(store / self.names[0]), self.where.disk)
        return dict(json.loads(done.stdout))

    def _opens(self, layer: str) -> dict[str, Any]:
        with Storage(self.data, SETTINGS, self.where.memory) as storage:
            words = self._open_words(storage.path / self.names[0])
            run_words = ("--intercept", layer)
            found, _ = self._behind("upfront", run_words, words)
            stdout = self._stdout
        coverage = found["coverage"]
        return {**json.loads(stdout), "layers": sorted(coverage["layers"]), "swapped": _swapped(coverage)}

    def _open_words(self, below: Path) -> list[str]:
        outside = self.where.disk / "outside.bin"
        outside.write_bytes(b"x" * 100)
        return [sys.executable, str(OPENS), str(outside), str(below), "3" if self.quick else "20"]

    def _behind(self, mode: str, options: tuple[str, ...], words: list[str]) -> tuple[dict[str, Any], float]:
        local, run_dir = self.where.local.renew(), empty(self.where.disk / "run")
        done = run([*hpcstage_command(mode, run_dir, local, f"@{self.order}", options), *words], self.where.disk)
        self._stdout = done.stdout
        return record(run_dir), done.seconds

    def _later(self, name: str) -> list[float]:
        times = json.loads((self.where.disk / f"{name}.json").read_text(encoding="utf-8"))
        return [end - start for start, end in times["epochs_s"]][1:]


def _swapped(coverage: Mapping[str, Any]) -> float | None:
    """Returns the share of the opens that got a copy."""
    return coverage["swapped"] / coverage["opens"] if coverage["opens"] else None


def of_local(bench: Bench, cell: str) -> float | None:
    """Of all pairs of later epochs, one right after the other: the staged one's time / the local one's."""
    samples = bench.select(cell, PAIR)
    ratios = [ours / local for s in samples for ours, local in zip(s["staged_s"], s["local_s"], strict=True)]
    return statistics.median(ratios) if ratios else None


def epoch_s(bench: Bench, cell: str, key: str) -> float | None:
    """Of all later epochs of a program."""
    values = [value for sample in bench.select(cell, PAIR) for value in sample[key]]
    return statistics.median(values) if values else None


def extra_us(bench: Bench, layer: str, path: str, call: str) -> float | None:
    """What an open costs more in a layer than without hpcstage: the difference of medians."""
    key = f"{path}_{call}_ns"
    ours, alone = bench.median("opens", layer, key), bench.median("opens", ALONE, key)
    return None if ours is None or alone is None else (ours - alone) / 1e3


def start_ms(bench: Bench, arm: str) -> float | None:
    """Of all interpreter starts of an arm."""
    values = [value for sample in bench.select("opens", arm) for value in sample["start_ms"]]
    return statistics.median(values) if values else None


def figures(bench: Bench, options: Options) -> list[Figure]:
    """Of item 2."""
    made = [
        at_most(f"{cell}: later epochs / local files", of_local(bench, cell), MOST_OF_LOCAL)
        for cell in epoch_cells()
        if options.wants(cell)
    ]
    shares = [s["share"] for cell in epoch_cells() for s in bench.select(cell, PAIR)]
    if any(options.wants(cell) for cell in epoch_cells()):
        made.append(holds("epochs: all opens were of staged copies", all(s == 1 for s in shares) if shares else None))
    if not options.wants("opens"):
        return made
    for (layer, path), limit in MOST_US.items():
        worst = max((v for call in CALLS if (v := extra_us(bench, layer, path, call)) is not None), default=None)
        where = "on a hit" if path == "below" else "outside the datasets"
        made.append(at_most(f"{layer} layer: an open {where} costs", worst, limit, "us"))
    for layer in LAYERS:
        behind, alone = start_ms(bench, layer), start_ms(bench, ALONE)
        more = None if behind is None or alone is None else behind - alone
        made.append(at_most(f"{layer} layer: interpreter start costs", more, MOST_START_MS, "ms"))
        used = [layer in s["layers"] for s in bench.select("opens", layer)]
        made.append(holds(f"{layer} layer: was the one in use", all(used) if used else None))
    return made


def epoch_cells() -> dict[str, int]:
    """Name → num_workers."""
    return {"epochs, workers 2": 2, "epochs, workers 0": 0}


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("warm", options)
    with place(options) as where:
        warm = Warm(where, options)
        if options.wants("opens"):
            bench.measure("opens", warm.open_arms(), options.rounds(7))
        for cell, workers in epoch_cells().items():
            if options.wants(cell):
                bench.measure(cell, warm.epochs_arms(workers), options.rounds(7))
    return bench.finish(figures(bench, options))


if __name__ == "__main__":
    sys.exit(main())
