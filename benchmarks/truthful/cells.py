"""The cells of the estimate of what was saved: how a program reads, from what source, with how much computing.

Owns the cells and their runs: the program without hpcstage, and with it in one of the modes; nothing of the source is
in memory when either begins.
"""

from __future__ import annotations

import itertools
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.files import Place, empty, make_files, write_list
from benchmarks.programs import hpcstage_command, record, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings

_WORKLOAD = Path(__file__).resolve().parent.parent / "workload"
READING = _WORKLOAD / "reading.py"
STRANGERS = _WORKLOAD / "strangers.py"
MB = 1e6
FILE_BYTES = 125_000
MOST_FILES = 2400
WAY_BYTES = {
    "large": 96 * 1024 * 1024,
    "pieces of 8 kB": 300_000,
    "pieces of 64 kB": 1_000_000,
    "whole": 300_000,
    "spectra": 1_000_000,
    "patches": 1_000_000,
}
"""The size of a file in ways that read larger ones than FILE_BYTES."""
LIMIT_S = 120.0
TOOLS = ("spectra", "checksums", "patches", "archive")
"""Ways of programs that others wrote: they find their files themselves, and compute what they have to."""
ARRAYS = ("spectra",)
"""Ways whose files are arrays of numpy."""
MANY = ("phases", "stream", "processes", "loader 8", "loader 2", "checksums")
"""Ways in which several readers read at a time."""


@dataclass(frozen=True)
class Source:
    """A kind of storage; `turns`: other settings that come in turn, for so many seconds each."""

    name: str
    settings: Settings
    file_s: float
    """About what one reader takes for a file, with which cells are sized."""
    many_s: float
    """The same with many readers."""
    turns: tuple[tuple[float, Settings], ...] = ()


def _settings(bandwidth_mb: float, metadata_ms: float, data_ms: float, per_s: float = 0, load: float = 0) -> Settings:
    return Settings(bandwidth_mb * MB, metadata_ms / 1e3, data_ms / 1e3, per_s, load)


_HIGH, _MIDDLE, _LOW = _settings(80, 1, 1), _settings(30, 1, 1), _settings(15, 1, 1)
SOURCES = {
    source.name: source
    for source in (
        Source("slow", _settings(20, 1, 2), 0.0105, 0.0063),
        Source("fast", _settings(400, 0.3, 0.3), 0.0017, 0.0007),
        Source("far", _settings(200, 8, 8), 0.025, 0.0035),
        Source("limited", _settings(200, 0.5, 0.5, per_s=150), 0.0135, 0.0133),
        Source("loaded", _settings(80, 1, 1, load=3.0), 0.0095, 0.0063),
        Source("alternating", _HIGH, 0.007, 0.0030, turns=((1.5, _HIGH), (1.5, _LOW))),
        Source("fluttering", _HIGH, 0.006, 0.0024, turns=((0.4, _HIGH), (0.4, _MIDDLE))),
    )
}


@dataclass(frozen=True)
class Cell:
    """One program on one source."""

    way: str
    source: str
    compute_s: float
    epochs: int = 1
    mode: str = "runtime"
    read_s: float = 4.0
    """About how long it reads without hpcstage."""

    @property
    def name(self) -> str:
        """In results and for --only."""
        words = [self.way, self.source, *([] if self.way in TOOLS else [f"{self.compute_s:g} s"])]
        words += ["upfront"] if self.mode == "upfront" else []
        return ", ".join([*words, *([f"{self.epochs} epochs"] if self.epochs > 1 else [])])

    @property
    def files(self) -> int:
        """So many that reading takes about as long as it should."""
        source = SOURCES[self.source]
        few = 2 if self.way == "loader 2" else 4
        each_s = max(source.many_s, source.file_s / few) if self.way in MANY else source.file_s
        each_s += (self.file_bytes - FILE_BYTES) / source.settings.bandwidth_bytes_per_s
        return 1 if self.way == "large" else min(MOST_FILES, round(self.read_s / self.epochs / each_s / 10) * 10)

    @property
    def file_bytes(self) -> int:
        """The size of a file."""
        return WAY_BYTES.get(self.way, FILE_BYTES)


def _cells() -> Iterator[Cell]:
    ways = ("loop", "loader 0", "loader 2", "loader 8", "processes")
    for way, source in itertools.product(ways, ("slow", "fast", "limited", "fluttering")):
        yield Cell(way, source, 1.0)
    for way in ("loop", "loader 0", "loader 2", "loader 8"):
        yield Cell(way, "slow", 4.0)
    for way in ways:
        yield Cell(way, "far", 2.0)
    for way in ("loop", "loader 2", "processes"):
        yield Cell(way, "loaded", 2.0 if way != "processes" else 0.5)
        yield Cell(way, "slow", 1.0, mode="upfront")
        yield Cell(way, "slow", 2.0 if way != "processes" else 0.5, epochs=3)
    for way in ("loop", "loader 2"):
        yield Cell(way, "alternating", 1.0)
        yield Cell(way, "limited", 1.0, epochs=2)
    for source in ("slow", "fast"):
        yield Cell("phases", source, 0.4)
        yield Cell("large", source, 1.0)
        yield Cell("mmap", source, 1.0)
    yield Cell("large", "slow", 1.0, mode="upfront")
    yield Cell("stream", "slow", 1.0)
    yield Cell("stream", "slow", 4.0)
    for way in ("pieces of 8 kB", "pieces of 64 kB", "whole"):
        yield Cell(way, "slow", 2.0)
    yield Cell("pieces of 8 kB", "slow", 6.0)
    for way in TOOLS:
        yield Cell(way, "slow", 0.0)
    for way in ("spectra", "checksums"):
        yield Cell(way, "far", 0.0)


CELLS = tuple(_cells())
QUICK = (Cell("loop", "slow", 0.5, read_s=1.0),)


class Runs:
    """The data, and the two runs of a cell."""

    def __init__(self, where: Place, kept: Path | None) -> None:
        """`kept`: where the parts of each record stay, to look at the estimate again."""
        self.where = where
        self.kept = kept

    def direct(self, cell: Cell) -> dict[str, Any]:
        """The program by itself."""
        with self._storage(cell) as storage:
            done = run(self._words(cell, storage), self.where.disk, limit_s=LIMIT_S)
        return {"seconds": done.seconds}

    def staged(self, cell: Cell) -> dict[str, Any]:
        """The same behind `hpcstage run`, and what its record says."""
        local, run_dir = self.where.local.renew(), empty(self.where.disk / "run")
        with self._storage(cell) as storage:
            command = hpcstage_command(cell.mode, run_dir, local, str(storage.path))
            done = run([*command, *self._words(cell, storage)], self.where.disk, limit_s=LIMIT_S)
        found = record(run_dir)
        self._keep(run_dir, cell)
        estimate = found["savings"]["vs_direct"]
        split = found["time_split"]
        wall_s = split["wall_s"] + (split["before_s"] if cell.mode == "upfront" else 0.0)
        return {
            "seconds": done.seconds,
            "wall_s": wall_s,
            "saved_s": estimate["saved_s"],
            "direct_s": None if estimate["saved_s"] is None else wall_s + estimate["saved_s"],
            "reason": estimate["reason"],
            "inputs": estimate["inputs"],
            "split": split,
        }

    def _words(self, cell: Cell, storage: Storage) -> list[str]:
        if cell.way in TOOLS:
            return [sys.executable, str(STRANGERS), cell.way, str(storage.path)]
        data = self._data(cell)
        names = [str(storage.path / entry.name) for entry in sorted(data.iterdir())]
        listed = write_list(self.where.disk / "names", names)
        return [
            sys.executable,
            str(READING),
            cell.way,
            str(listed),
            str(cell.files),
            str(cell.epochs),
            str(cell.compute_s),
        ]

    def _data(self, cell: Cell) -> Path:
        """One set of files at a time."""
        kind = "arrays" if cell.way in ARRAYS else "bytes"
        data = self.where.memory / f"data-{cell.files}-{cell.file_bytes}-{kind}"
        if not data.exists():
            for old in self.where.memory.glob("data-*"):
                shutil.rmtree(old)
            make_files(data, cell.files, cell.file_bytes)
            if kind == "arrays":
                _make_arrays(data)
        return data

    @contextmanager
    def _storage(self, cell: Cell) -> Iterator[Storage]:
        source = SOURCES[cell.source]
        with Storage(self._data(cell), source.settings, self.where.memory) as storage, _turning(storage, source):
            yield storage

    def _keep(self, run_dir: Path, cell: Cell) -> None:
        if self.kept is None:
            return
        kept = self.kept / cell.name.replace(", ", "-").replace(" ", "_")
        (kept / "nodes").mkdir(parents=True, exist_ok=True)
        for path in (*run_dir.glob("*.json"), *run_dir.glob("nodes/*.json")):
            (kept / path.relative_to(run_dir)).write_bytes(path.read_bytes())


def _make_arrays(data: Path) -> None:
    """Turns each file into an array of numpy with the same bytes."""
    for path in sorted(data.iterdir()):
        saved = path.with_suffix(".npy")
        np.save(saved, np.fromfile(path, np.uint8))
        shutil.copystat(path, saved)
        path.unlink()


@contextmanager
def _turning(storage: Storage, source: Source) -> Iterator[None]:
    """Other settings in turn, by the clock, while the block runs."""
    over = threading.Event()

    def turn() -> None:
        for seconds, settings in itertools.cycle(source.turns):
            storage.mount.state.set(settings)
            if over.wait(seconds):
                return

    thread = threading.Thread(target=turn) if source.turns else None
    if thread:
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread:
            thread.join()
