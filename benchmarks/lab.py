"""The experiment of paper 000 on emulated storage: its cells, its arms, its terms. For `staging`.

Owns the design. The storage is set so that the case is the one that matters: under high load a network's dataset takes
nine tenths as long to read flat out as to compute (calibrated in the same run; with the same time for both, what cannot
overlap, the program's start and end, is measured and little else). High load is a competing node of weight 4 that reads
the same storage: it leaves a fifth. Computing is real training, whose steps take the time of an emulated accelerator.
One run is one process from its start to its end; its mount is fresh, so nothing of the source is cached.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.files import Place, empty, make_files, total_bytes, write_list
from benchmarks.harness import Arm, Bench, Options, divide, worst
from benchmarks.programs import Done, Training, hpcstage_command, read_flat_out, record, run
from benchmarks.storage import Load, Storage
from hpcstage.emulator import Settings

HIGH_WEIGHT = 4.0
FLIGHT = 32
"""Threads of the flat-out reader: as many as hpcstage keeps transfers in flight."""
FILE_BYTES = 125_000
X1_FILES = 5000
QUICK_X1_FILES = 120
LATENCY_S = 0.002
STEP_S = {"cnn": 0.15, "alexnet": 0.16, "resnet": 0.17}
"""Of the emulated accelerator, per batch. A processor computes the same in a third to two thirds of it, so that a slow
moment does not show; results say which share of steps came late all the same."""
SOURCE_TO_COMPUTE = 0.9
MOST_COMPUTE_EPOCHS = 3
MOST_REPEATED_SIZE = 1.0
"""Above it an epoch takes a minute, in which the machine's moods even out: once is enough."""


@dataclass(frozen=True)
class Cell:
    """One combination of what the paper varies."""

    net: str = "cnn"
    size: float = 1.0
    epochs: int = 1
    load: str = "high"
    prefetch: bool = True

    @property
    def name(self) -> str:
        """In results and for --only."""
        words = [self.net, f"x{self.size:g}", f"E{self.epochs}", self.load]
        return " ".join(words if self.prefetch else [*words, "no-prefetch"])


@dataclass(frozen=True)
class Data:
    """One size of the dataset."""

    path: Path
    names: Path
    """List of names, for the program."""
    order: Path
    """List of full paths in the same order, for `--data @...`."""
    files: int
    size_bytes: int


class Lab:
    """Datasets, storage and arms of one benchmark run."""

    def __init__(
        self,
        bench: Bench,
        options: Options,
        where: Place,
        compute: str = "accelerator",
        source_to_compute: float = SOURCE_TO_COMPUTE,
    ) -> None:
        """`compute`: `accelerator`, a step takes its time whatever the processors do; `processor`, they are all there
        is.
        `source_to_compute`: the time of reading the source once under high load, in computing times of one epoch.
        """
        self.compute_kind = compute
        self.source_to_compute = source_to_compute
        self.bench = bench
        self.options = options
        self.where = where
        self._data: dict[float, Data] = {}
        self._bandwidths: dict[str, float] = {}
        self._is_warm = False

    def data(self, size: float) -> Data:
        """The dataset of a size, made on first use, in memory."""
        if size not in self._data:
            files = round((QUICK_X1_FILES if self.options.quick else X1_FILES) * size)
            root = self.where.memory / f"data-x{size:g}"
            names = make_files(root, files, FILE_BYTES)
            mounted = self.where.memory / "shared"
            self._data[size] = Data(
                root,
                write_list(self.where.disk / f"names-x{size:g}", names),
                write_list(self.where.disk / f"order-x{size:g}", [str(mounted / name) for name in names]),
                files,
                total_bytes(root),
            )
        return self._data[size]

    def bandwidth(self, net: str) -> float:
        """Of the storage that is as slow for this network, in bytes per second: calibrated once per result file."""
        if net not in self._bandwidths:
            compute_s = self.compute_terms(Cell(net))["seconds"]
            share = self.data(1.0).size_bytes / (compute_s * self.source_to_compute)
            self._bandwidths[net] = share * (1 + HIGH_WEIGHT)
        return self._bandwidths[net]

    def storage(self, cell: Cell) -> Storage:
        """The source of one sample, with its load going."""
        settings = Settings(
            bandwidth_bytes_per_s=self.bandwidth(cell.net), metadata_latency_s=LATENCY_S, data_latency_s=LATENCY_S
        )
        load = Load(HIGH_WEIGHT) if cell.load == "high" else None
        return Storage(self.data(cell.size).path, settings, self.where.memory, load)

    def training(self, cell: Cell, data: Path, **more: Any) -> Training:  # noqa: ANN401  passed on to Training
        """The program of a cell."""
        return Training(
            data=data,
            names=self.data(cell.size).names,
            epochs=cell.epochs,
            net=cell.net,
            step_s=STEP_S[cell.net] if self.compute_kind == "accelerator" else 0.0,
            prefetch=cell.prefetch,
            timings=self.where.disk / "timings.json",
            **more,
        )

    # ---- arms

    def direct(self, cell: Cell) -> dict[str, Any]:
        """The program alone, on the source."""
        with self.storage(cell) as storage:
            storage.load_on()
            done = run(self.training(cell, storage.path).command(), self.where.disk)
        return self._sample(done)

    def hpcstage(self, cell: Cell, mode: str) -> dict[str, Any]:
        """The same program behind `hpcstage run --mode ...`."""
        local, run_dir = self.where.local.renew(), self._empty("run")
        self._empty("state")  # no trace of the sample before
        with self.storage(cell) as storage:
            storage.load_on()
            head = hpcstage_command(mode, run_dir, local, f"@{self.data(cell.size).order}")
            done = run([*head, *self.training(cell, storage.path).command()], self.where.disk)
            asked = storage.counters()
        return {**self._sample(done), "source_read_bytes": asked.read_bytes, **_from_record(run_dir)}

    def cp(self, cell: Cell) -> dict[str, Any]:
        """`cp -r`, then the program on the copy: what a job script does today."""
        local = self.where.local.renew()
        with self.storage(cell) as storage:
            storage.load_on()
            copied = run(["cp", "-r", f"{storage.path}/.", local], self.where.disk)
            done = run(self.training(cell, local).command(), self.where.disk)
        sample = self._sample(done)
        return {**sample, "copy_s": copied.seconds, "seconds": copied.seconds + done.seconds}

    # ---- terms, each alone

    def compute(self, cell: Cell) -> dict[str, Any]:
        """The program with its files in memory, from its start to its end, the reading of them taken out."""
        epochs = min(cell.epochs, MOST_COMPUTE_EPOCHS)
        training = self.training(Cell(cell.net, cell.size, epochs, cell.load, cell.prefetch), self.data(cell.size).path)
        done = run([*training.command(), "--compute-only"], self.where.disk)
        times = self._times()
        epoch_s = [end - start for start, end in times["epochs_s"]]
        later_s = sorted(epoch_s[1:] or epoch_s)[len(epoch_s[1:] or epoch_s) // 2]
        whole_s = done.seconds - times["preload_s"]
        return {
            "seconds": whole_s - sum(epoch_s[1:]),
            "late_steps": divide(times["late_steps"], times["steps"]),
            "later_s": later_s,
            "startup_s": whole_s - sum(epoch_s),
        }

    def compute_terms(self, cell: Cell) -> dict[str, float]:
        """Medians of what `compute` gave for this net and size."""
        name = f"compute {cell.net} x{cell.size:g}" + ("" if cell.prefetch else " no-prefetch")
        self._warm_up()
        alone = Cell(cell.net, cell.size, 1, cell.load, cell.prefetch)
        rounds = self.options.rounds(1 if cell.size > MOST_REPEATED_SIZE else 3)
        self.bench.measure(name, {"compute": lambda: self.compute(alone)}, rounds, needed=True)
        keys = ("seconds", "later_s", "startup_s")
        return {key: value for key in keys if (value := self.bench.median(name, "compute", key)) is not None}

    def source(self, cell: Cell) -> dict[str, Any]:
        """A C program reads the dataset flat out from the source under the cell's load."""
        data = self.data(cell.size)
        with self.storage(cell) as storage:
            storage.load_on()
            paths = [storage.path / name for name in data.names.read_text().split()]
            return dict(read_flat_out(paths, self.where.memory, FLIGHT))

    def local(self, cell: Cell) -> dict[str, Any]:
        """One reader reads a copy on the local disk, as the program does from the second epoch on."""
        data, local = self.data(cell.size), self.where.local.renew()
        shutil.copytree(data.path, local, dirs_exist_ok=True)
        result = read_flat_out([local / name for name in data.names.read_text().split()], self.where.memory, 1)
        return dict(result)

    def terms(self, cell: Cell) -> dict[str, Arm]:
        """The three terms of the bound, as arms."""
        return {
            "compute": lambda: self.compute(cell),
            "source": lambda: self.source(cell),
            "local": lambda: self.local(cell),
        }

    def bound(self, cell: Cell) -> float | None:
        """max(compute, source) + (E - 1) max(compute, local), each term alone in the same cell."""
        median = self.bench.median
        first = worst([median(cell.name, "compute"), median(cell.name, "source")], max)
        later = worst([median(cell.name, "compute", "later_s"), median(cell.name, "local")], max)
        return None if first is None or later is None else first + (cell.epochs - 1) * later

    # ---- helpers

    def _warm_up(self) -> None:
        """PyTorch's own files come from the page cache in all samples, not in all but the first."""
        if not self._is_warm:
            run([sys.executable, "-c", "import torch, torch._dynamo, torch.utils.data"], self.where.disk)
            self._is_warm = True

    def _empty(self, name: str) -> Path:
        return empty(self.where.disk / name)

    def _times(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((self.where.disk / "timings.json").read_text(encoding="utf-8"))
        return loaded

    def _sample(self, done: Done) -> dict[str, Any]:
        times = self._times()
        return {
            "seconds": done.seconds,
            "late_steps": divide(times["late_steps"], times["steps"]),
            "first_batch_s": times["first_batch_s"] - times["start_s"],
            "epochs_s": [round(end - start, 4) for start, end in times["epochs_s"]],
            "output": done.stdout.splitlines()[-1],
        }


def _from_record(run_dir: Path) -> dict[str, Any]:
    found = record(run_dir)
    totals: Mapping[str, Any] = found.get("totals") or {}
    split = found.get("time_split") or {}
    coverage = found.get("coverage") or {}
    order = found.get("order") or {}
    return {
        "mode_done": (found.get("run") or {}).get("mode"),
        "recorded_source_bytes": totals.get("source_bytes"),
        "coverage": coverage.get("share"),
        "hidden_s": split.get("hidden_s"),
        "order": order.get("provenance"),
    }
