"""Programs that read in one way each and compute for a known time, behind hpcstage on slow storage."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.files import Place, empty, make_files, write_list
from benchmarks.programs import hpcstage_command, record, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings

READING = Path(__file__).resolve().parent.parent / "workload" / "reading.py"
SOURCE = Settings(20e6, 1e-3, 2e-3)
FILE_BYTES, LARGE_BYTES = 125_000, 96 * 1024 * 1024
FILE_S, MANY_FILE_S = 0.0105, 0.0063
"""About what a file takes at the source for one reader, and what it takes where several read at a time."""
MANY = ("phases", "processes", "loader 2")
"""Ways in which several readers read at a time."""
LIMIT_S = 120.0


@dataclass(frozen=True)
class Cell:
    """A way to read, and the seconds that the program computes."""

    way: str
    compute_s: float
    read_s: float = 4.0
    """About how long it reads without hpcstage."""

    @property
    def name(self) -> str:
        """In results and for --only."""
        return f"{self.way}, {self.compute_s:g} s"

    @property
    def files(self) -> int:
        """So many that reading takes about as long as it should."""
        return (
            1 if self.way == "large" else round(self.read_s / (MANY_FILE_S if self.way in MANY else FILE_S) / 10) * 10
        )


CELLS = (
    *(Cell(way, 1.0) for way in ("loop", "loader 0", "loader 2", "processes", "large", "mmap")),
    Cell("phases", 0.4),
    *(Cell(way, 4.0) for way in ("loop", "loader 0", "loader 2")),
)
QUICK = (Cell("loop", 0.5, read_s=1.0),)


def staged(where: Place, cell: Cell) -> dict[str, Any]:
    """Runs the program, and returns how the record divides its time."""
    local, run_dir = where.local.renew(), empty(where.disk / "run")
    with Storage(_data(where, cell), SOURCE, where.memory) as storage:
        names = [str(path) for path in sorted(storage.path.iterdir())]
        listed = write_list(where.disk / "names", names)
        words = [sys.executable, str(READING), cell.way, str(listed), str(cell.compute_s)]
        command = hpcstage_command("runtime", run_dir, local, str(storage.path))
        done = run([*command, *words], where.disk, limit_s=LIMIT_S)
    return {"seconds": done.seconds, "split": record(run_dir)["time_split"]}


def _data(where: Place, cell: Cell) -> Path:
    """Makes the files, one set at a time."""
    size_bytes = LARGE_BYTES if cell.way == "large" else FILE_BYTES
    data = where.memory / f"data-{cell.files}-{size_bytes}"
    if not data.exists():
        for old in where.memory.glob("data-*"):
            shutil.rmtree(old)
        make_files(data, cell.files, size_bytes)
    return data
