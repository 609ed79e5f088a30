"""A program that reads files once, in one of several ways, and computes in between; it knows nothing of hpcstage.

    python reading.py WAY LIST COMPUTE_S

COMPUTE_S: what an accelerator computes in all, waited for in equal parts.
"""

from __future__ import annotations

import mmap
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

BATCH = 10
CHUNK_BYTES = 1 << 20
THREADS, PROCESSES = 8, 4


def read(path: str) -> int:
    """All of a file."""
    with open(path, "rb") as file:
        return len(file.read())


def touch(path: str) -> int:
    """All of a file, through a mapping."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as pages:
        return sum(pages[:: mmap.PAGESIZE])


def batches(paths: list[str]) -> Iterator[list[str]]:
    """BATCH paths at a time."""
    for at in range(0, len(paths), BATCH):
        yield paths[at : at + BATCH]


def plain(paths: list[str], compute_s: float, one: Callable[[str], int] = read) -> None:
    """A loop."""
    for batch in batches(paths):
        for path in batch:
            one(path)
        time.sleep(compute_s * len(batch))


def mapped(paths: list[str], compute_s: float) -> None:
    """A loop over mappings."""
    plain(paths, compute_s, touch)


def phases(paths: list[str], compute_s: float) -> None:
    """Threads read a batch, then the program computes."""
    with ThreadPoolExecutor(THREADS) as pool:
        for batch in batches(paths):
            list(pool.map(read, batch))
            time.sleep(compute_s * len(batch))


def _read_and_compute(job: tuple[list[str], float]) -> None:
    plain(*job)


def processes(paths: list[str], compute_s: float) -> None:
    """Processes that each read and compute."""
    jobs = [(batch, compute_s * PROCESSES) for batch in batches(paths)]
    with multiprocessing.Pool(PROCESSES) as pool:
        pool.map(_read_and_compute, jobs, chunksize=1)
        pool.close()
        pool.join()


def chunks(paths: list[str], compute_s: float) -> None:
    """Large files in sequence, a chunk at a time; `compute_s` is that of a chunk."""
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.read(CHUNK_BYTES):
                time.sleep(compute_s)


def loader(workers: int) -> Callable[[list[str], float], None]:
    """PyTorch's loader."""

    def go(paths: list[str], compute_s: float) -> None:
        from torch.utils.data import DataLoader, Dataset

        class Files(Dataset[int]):
            """One file, one sample."""

            def __len__(self) -> int:
                return len(paths)

            def __getitem__(self, index: int) -> int:
                return read(paths[index])

        for batch in DataLoader(Files(), batch_size=BATCH, num_workers=workers):
            time.sleep(compute_s * len(batch))

    return go


WAYS = {
    "loop": plain,
    "mmap": mapped,
    "phases": phases,
    "processes": processes,
    "large": chunks,
    **{f"loader {workers}": loader(workers) for workers in (0, 2)},
}


def main() -> None:
    """As the command line says."""
    way, listed, compute_s = sys.argv[1:]
    paths = Path(listed).read_text(encoding="utf-8").splitlines()
    items = sum(Path(path).stat().st_size for path in paths) / CHUNK_BYTES if way == "large" else len(paths)
    WAYS[way](paths, float(compute_s) / items)


if __name__ == "__main__":
    main()
