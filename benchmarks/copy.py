"""The copy engine against `cp -r`, `rsync -a`, a tar pipe and `rclone copy`, and against reading flat out in C.

20,000 files of 100 kB and 8 files of 256 MB, from the local disk and from emulated storage with 2 ms per operation, to
the local disk. All arms list the source themselves. All times run from the start of a process to its end, ours included
(Python's start takes a tenth of a second). What a sample writes is synchronised and dropped after its clock.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.files import Place, drop_caches, drop_files, make_files, place, touch_memory
from benchmarks.harness import Arm, Bench, Figure, Options, at_least, at_most, divide, holds, options_of, parser
from benchmarks.programs import read_flat_out, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings

MB = 1e6
LATENCY_S = 0.002
IN_FLIGHT = 32
FOLDER_FILES = 1000
MEMORY_BYTES = 6 << 30
"""A copy of 2 GB is in the page cache twice, and what stands behind emulated storage is there too."""
MOST_BEHIND = 1.05
LEAST_OF_CP = 20.0
LEAST_OF_FLAT_OUT = 0.8
OTHERS = ("cp -r", "rsync -a", "tar pipe", "rclone copy")
SLOW = ("cp -r", "rsync -a", "tar pipe")
"""One file at a time: at 2 ms they take minutes, and are measured once."""


@dataclass(frozen=True)
class Cell:
    """What is copied from where."""

    files: int
    file_bytes: int
    source: str

    @property
    def name(self) -> str:
        """In results and for --only."""
        size = f"{self.file_bytes // 1_000_000} MB" if self.file_bytes >= 1_000_000 else f"{self.file_bytes // 1000} kB"
        return f"{self.files} x {size}, {self.source}"

    @property
    def is_small(self) -> bool:
        """Bound by the number of files, not by bytes."""
        return self.file_bytes < 1_000_000


def cells(quick: bool) -> list[Cell]:
    """The four of the issue."""
    sizes = ((400, 100_000), (2, 16_000_000)) if quick else ((20_000, 100_000), (8, 256_000_000))
    return [Cell(files, size, source) for files, size in sizes for source in ("local disk", "2 ms")]


class Copies:
    """Sources, destinations and arms."""

    def __init__(self, where: Place, *, quick: bool) -> None:
        self.where = where
        self._quick = quick
        self._drop = drop_files if quick else drop_caches
        self._made: dict[tuple[int, int, Path], Path] = {}

    @contextlib.contextmanager
    def source(self, cell: Cell) -> Iterator[Path]:
        """The data, with nothing of it cached."""
        if not self._quick:
            touch_memory(MEMORY_BYTES)
        if cell.source == "local disk":
            data = self._root(cell)
            self._drop([p for p in data.rglob("*") if p.is_file()])
            yield data
            return
        settings = Settings(metadata_latency_s=LATENCY_S, data_latency_s=LATENCY_S)
        with Storage(self._root(cell), settings, self.where.memory) as storage:
            yield storage.path

    def arms(self, cell: Cell) -> dict[str, Arm]:
        """Ours, the others, and the flat-out reader."""
        commands = {
            "cp -r": "cp -r SOURCE/. TARGET",
            "rsync -a": "rsync -a SOURCE/ TARGET",
            "tar pipe": "tar -C SOURCE -cf - . | tar -C TARGET -xf -",
            "rclone copy": f"rclone copy --transfers {IN_FLIGHT} --checkers {IN_FLIGHT} SOURCE TARGET",
        }
        made: dict[str, Arm] = {"hpcstage": lambda: self._engine(cell), "flat out": lambda: self._flat_out(cell)}
        for name, text in commands.items():
            if shutil.which(text.split()[0]):
                made[name] = lambda text=text: self._shell(cell, text)  # type: ignore[misc]
        return made

    def _engine(self, cell: Cell) -> dict[str, Any]:
        with self.source(cell) as source, self._target() as target:
            done = run([sys.executable, "-m", "benchmarks.copy", "--engine", source, target], self.where.disk)
            return {
                **json.loads(done.stdout),
                "seconds": done.seconds,
                "complete": self._whole(cell, target / "store"),
            }

    def _shell(self, cell: Cell, text: str) -> dict[str, Any]:
        with self.source(cell) as source, self._target() as target:
            script = text.replace("SOURCE", str(source)).replace("TARGET", str(target))
            done = run(["/bin/bash", "-o", "pipefail", "-c", script], self.where.disk)
            return {"seconds": done.seconds, "complete": self._whole(cell, target)}

    def _flat_out(self, cell: Cell) -> dict[str, Any]:
        with self.source(cell) as source:
            root = self._root(cell)
            paths = [source / p.relative_to(root) for p in sorted(root.rglob("*")) if p.is_file()]
            return dict(read_flat_out(paths, self.where.memory, IN_FLIGHT))

    def _root(self, cell: Cell) -> Path:
        return self._data(cell, self.where.disk if cell.source == "local disk" else self.where.memory)

    def _data(self, cell: Cell, base: Path) -> Path:
        key = (cell.files, cell.file_bytes, base)
        if key not in self._made:
            root = base / f"copy-{cell.files}"
            for start in range(0, cell.files, FOLDER_FILES):
                count = min(FOLDER_FILES, cell.files - start)
                make_files(root / f"folder{start // FOLDER_FILES:03d}", count, cell.file_bytes, spread=0, seed=start)
            self._made[key] = root
        return self._made[key]

    @contextlib.contextmanager
    def _target(self) -> Iterator[Path]:
        target = self.where.local.renew() / "target"
        target.mkdir(mode=0o700)
        try:
            yield target
        finally:
            self.where.local.end()
            self._drop([])

    def _whole(self, cell: Cell, target: Path) -> bool:
        sizes = [p.stat().st_size for p in target.rglob("*") if p.is_file()]
        return len(sizes) == cell.files and sum(sizes) == cell.files * cell.file_bytes


def engine(source: Path, node_dir: Path) -> int:
    """What the daemon does with a dataset, alone: scan, manifest, all files in the manifest's order."""
    from benchmarks.copyall import copy_all
    from hpcstage.plan.dataset.datasets import resolve
    from hpcstage.plan.dataset.scan import scan

    started_s = time.monotonic()
    resolved = resolve([str(source)], Path.cwd())
    manifest = scan(resolved).manifest
    scanned_s = time.monotonic()
    result = copy_all(manifest, None, node_dir, transfers=IN_FLIGHT)
    ended_s = time.monotonic()
    if result.failed or result.refused:
        print(result.errors, file=sys.stderr)
        return 1
    print(json.dumps({"engine_s": ended_s - started_s, "scan_s": scanned_s - started_s, "copy_s": result.seconds}))
    return 0


def measure(bench: Bench, options: Options, copies: Copies) -> None:
    """All cells; slow arms last and once, so that a run that is cut off has the rest."""
    for cell in cells(options.quick):
        if not options.wants(cell.name):
            continue
        arms = copies.arms(cell)
        slow = SLOW if cell.source == "2 ms" and cell.is_small else ()
        bench.measure(cell.name, {n: a for n, a in arms.items() if n not in slow}, options.rounds(5))
        bench.measure(cell.name, {n: a for n, a in arms.items() if n in slow}, options.rounds(1))


def figures(bench: Bench, chosen: list[Cell]) -> list[Figure]:
    """Per cell."""
    made: list[Figure] = []
    for cell in chosen:
        ours = bench.median(cell.name, "hpcstage")
        others = [s for arm in OTHERS if (s := bench.median(cell.name, arm)) is not None]
        best = divide(ours, min(others)) if others else None
        made.append(at_most(f"{cell.name}: time / that of the best other", best, MOST_BEHIND))
        if cell.source == "2 ms":
            made.append(_of_flat_out(bench, cell))
            if cell.is_small:
                cp = divide(bench.median(cell.name, "cp -r"), ours)
                made.append(at_least(f"{cell.name}: times as fast as cp -r", cp, LEAST_OF_CP))
    samples = [s["complete"] for s in bench.samples if "complete" in s]
    return [*made, holds("every copy is complete", all(samples) if samples else None)]


def _of_flat_out(bench: Bench, cell: Cell) -> Figure:
    """Without the scan: the C program is given the names."""
    share = divide(bench.median(cell.name, "flat out"), bench.median(cell.name, "hpcstage", "copy_s"))
    return at_least(f"{cell.name}: share of what a C program reads flat out, names given", share, LEAST_OF_FLAT_OUT)


def main() -> int:
    """Measures, prints, checks."""
    made = parser(__doc__)
    made.add_argument("--engine", nargs=2, type=Path, metavar=("SOURCE", "NODE_DIR"), help=argparse.SUPPRESS)
    given = made.parse_args()
    if given.engine:
        return engine(*given.engine)
    options = options_of(given)
    bench = Bench(
        "copy", options, {"latency_s": LATENCY_S, "in_flight": IN_FLIGHT, "cpus": os.cpu_count(), "clock": "process"}
    )
    with place(options) as where:
        measure(bench, options, Copies(where, quick=options.quick))
    chosen = [c for c in cells(options.quick) if options.wants(c.name)]
    return bench.finish(figures(bench, chosen))


if __name__ == "__main__":
    sys.exit(main())
