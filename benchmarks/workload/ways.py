"""Programs that read in one way each, with the time of an emulated accelerator between batches. They know nothing of
hpcstage.

Owns the ways. Prints one line, a checksum of everything that was read in the order in which it was read, so that two
runs can be compared. The file or the directory is made by `make` in the form that the way reads.

    python ways.py WAY PATH --compute 10 --delay 3
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import random
import sqlite3
import subprocess
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

BATCHES = 60
BLOCK_BYTES = 256 << 10
READ_BYTES = 1 << 20
ROW_BYTES = 20_000
TENTH = 10
READERS = 2
COMPUTE_VARIABLE = "WAYS_COMPUTE_S"
"""For ways that compute while they read: they do so themselves."""
Batches = Iterator[bytes]


# ---- several large files


def _in_blocks(number: int, root: str, compute_s: float, results: SimpleQueue[tuple[int, int]]) -> None:
    found = 0
    for name in _names(root)[number::READERS]:
        with open(name, "rb", buffering=0) as file:
            while piece := file.read(READ_BYTES):
                found = zlib.crc32(piece, found)
                time.sleep(compute_s)
    results.put((number, found))


def several(root: str) -> Batches:
    """Two processes, each of which reads every other file and computes as it reads."""
    size = sum(os.stat(name).st_size for name in _names(root))
    step_s = float(os.environ[COMPUTE_VARIABLE]) / (size / READERS / READ_BYTES)
    context = multiprocessing.get_context("fork")
    results: SimpleQueue[tuple[int, int]] = context.SimpleQueue()
    started = [context.Process(target=_in_blocks, args=(number, root, step_s, results)) for number in range(READERS)]
    for process in started:
        process.start()
    found = sorted(results.get() for _ in started)
    for process in started:
        process.join()
    yield repr(found).encode()


def children(root: str) -> Batches:
    """One `cat` for each file: programs without the shim."""
    for name in _names(root):
        with subprocess.Popen(["cat", name], stdout=subprocess.PIPE) as cat:
            assert cat.stdout is not None
            while piece := cat.stdout.read(READ_BYTES):
                yield piece


def tar(root: str) -> Batches:
    """Shards one after the other, each in a stream, as webdataset reads them."""
    for name in _names(root):
        with tarfile.open(name, "r|") as shard:
            for member in shard:
                content = shard.extractfile(member)
                assert content is not None
                yield content.read()


# ---- one large file


def pread(path: str) -> Batches:
    """In sequence, from the beginning to the end."""
    fd = os.open(path, os.O_RDONLY)
    for start in range(0, os.fstat(fd).st_size, READ_BYTES):
        yield os.pread(fd, READ_BYTES, start)
    os.close(fd)


def pread_twice(path: str) -> Batches:
    """In sequence, from the beginning to the end, and once more."""
    fd = os.open(path, os.O_RDONLY)
    size = os.fstat(fd).st_size
    for _ in range(2):
        for start in range(0, size, READ_BYTES):
            yield os.pread(fd, READ_BYTES, start)
    os.close(fd)


def pread_random(path: str) -> Batches:
    """Every block once, in any order."""
    fd = os.open(path, os.O_RDONLY)
    blocks = list(range(0, os.fstat(fd).st_size, BLOCK_BYTES))
    random.Random(1).shuffle(blocks)
    for start in blocks:
        yield os.pread(fd, BLOCK_BYTES, start)
    os.close(fd)


def _slices(size: int, share: int) -> list[tuple[int, int]]:
    """Of each batch's part of the file, in any order: where it begins, and how much of it is touched."""
    length = size // BATCHES
    starts = [length * number for number in range(BATCHES)]
    random.Random(1).shuffle(starts)
    return [(start, start + length // share) for start in starts]


def _memmap(path: str) -> Any:  # noqa: ANN401  NumPy's types are not needed for the other ways
    import numpy as np

    return np.memmap(path, dtype=np.uint8, mode="r")


def memmap_kept(path: str, share: int) -> Batches:
    """Mapped once."""
    mapped = _memmap(path)
    for start, end in _slices(len(mapped), share):
        yield mapped[start:end].tobytes()


def memmap_anew(path: str, share: int) -> Batches:
    """Mapped for each batch, as datasets do that must be pickled."""
    for start, end in _slices(os.stat(path).st_size, share):
        yield _memmap(path)[start:end].tobytes()


def hdf5(path: str) -> Batches:
    """One row of a dataset after the other, in any order."""
    import h5py

    with h5py.File(path, "r") as file:
        rows = list(range(BATCHES))
        random.Random(1).shuffle(rows)
        for row in rows:
            yield file["rows"][row].tobytes()


def lmdb(path: str) -> Batches:
    """One value after the other, in any order."""
    import lmdb as library

    with library.open(path, subdir=False, readonly=True, lock=False) as environment, environment.begin() as reading:
        keys = list(range(BATCHES))
        random.Random(1).shuffle(keys)
        for key in keys:
            yield reading.get(b"%d" % key) or b""


def parquet(path: str) -> Batches:
    """One row group after the other, in any order."""
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        groups = list(range(file.num_row_groups))
        random.Random(1).shuffle(groups)
        for group in groups:
            for row in file.read_row_group(group)["rows"]:
                yield row.as_py()


def sqlite(path: str) -> Batches:
    """Many rows after the other, in any order, in one transaction. The file beside it is never opened."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        database.execute("BEGIN")
        (count,) = database.execute("SELECT max(id) FROM rows").fetchone()
        keys = list(range(1, count + 1))
        random.Random(1).shuffle(keys)
        for batch in range(BATCHES):
            rows = (database.execute("SELECT data FROM rows WHERE id = ?", (key,)) for key in keys[batch::BATCHES])
            yield b"".join(row.fetchone()[0] for row in rows)


# ---- many small files


def _names(root: str) -> list[str]:
    return [f"{root}/{name}" for name in sorted(os.listdir(root))]


def loop(root: str) -> Batches:
    """By name."""
    for name in _names(root):
        yield Path(name).read_bytes()


def loop_random(root: str) -> Batches:
    """In any order."""
    names = _names(root)
    random.Random(1).shuffle(names)
    for name in names:
        yield Path(name).read_bytes()


class _Files:
    """A map-style dataset."""

    def __init__(self, root: str) -> None:
        self.samples = _names(root)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> bytes:
        return Path(self.samples[index]).read_bytes()


def loader(root: str, workers: int) -> Batches:
    """PyTorch's loader, shuffled."""
    import torch
    from torch.utils.data import DataLoader

    torch.manual_seed(1)
    files: Any = _Files(root)
    yield from DataLoader(files, batch_size=4, shuffle=True, num_workers=workers, collate_fn=b"".join)


def nothing(root: str) -> Batches:
    """Lists the files and reads none."""
    for name in _names(root):
        yield os.fsencode(os.path.basename(name))


WAYS: dict[str, Callable[[str], Batches]] = {
    "pread": pread,
    "pread-twice": pread_twice,
    "pread-random": pread_random,
    "kept-all": lambda path: memmap_kept(path, 1),
    "kept-tenth": lambda path: memmap_kept(path, TENTH),
    "anew-all": lambda path: memmap_anew(path, 1),
    "anew-tenth": lambda path: memmap_anew(path, TENTH),
    "several": several,
    "children": children,
    "hdf5": hdf5,
    "lmdb": lmdb,
    "parquet": parquet,
    "sqlite": sqlite,
    "tar": tar,
    "loop": loop,
    "loop-random": loop_random,
    "loader-0": lambda root: loader(root, 0),
    "loader-2": lambda root: loader(root, 2),
    "nothing": nothing,
}


# ---- what they read


def make(way: str, path: Path, size_bytes: int) -> None:
    """One large file in the form that the way reads."""
    row = size_bytes // BATCHES
    rng = random.Random(7)
    if way == "hdf5":
        import h5py
        import numpy as np

        with h5py.File(path, "w") as file:
            rows = file.create_dataset("rows", (BATCHES, row), dtype="u1")
            for number in range(BATCHES):
                rows[number] = np.frombuffer(rng.randbytes(row), dtype="u1")
    elif way == "lmdb":
        import lmdb as library

        with library.open(str(path), subdir=False, lock=False, map_size=2 * size_bytes + (1 << 20)) as environment:
            for number in range(BATCHES):
                with environment.begin(write=True) as writing:
                    writing.put(b"%d" % number, rng.randbytes(row))
    elif way == "parquet":
        import pyarrow
        import pyarrow.parquet

        rows = pyarrow.array([rng.randbytes(row) for _ in range(BATCHES)], pyarrow.binary())
        table = pyarrow.table({"rows": rows})
        pyarrow.parquet.write_table(table, path, row_group_size=1, compression="NONE", use_dictionary=False)
    elif way == "sqlite":
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE rows(id INTEGER PRIMARY KEY, data BLOB)")
            rows = ((rng.randbytes(ROW_BYTES),) for _ in range(size_bytes // ROW_BYTES))
            database.executemany("INSERT INTO rows(data) VALUES (?)", rows)
        path.with_name("other.bin").write_bytes(rng.randbytes(size_bytes))
    else:
        with path.open("wb") as file:
            for _ in range(BATCHES):
                file.write(rng.randbytes(row))


def make_shards(root: Path, shards: int, shard_bytes: int) -> None:
    """Tar files with members of READ_BYTES."""
    root.mkdir()
    rng = random.Random(7)
    for number in range(shards):
        with tarfile.open(root / f"shard{number:03d}.tar", "w") as shard:
            for member in range(shard_bytes // READ_BYTES):
                info = tarfile.TarInfo(f"{number:03d}-{member:04d}")
                info.size = READ_BYTES
                shard.addfile(info, io.BytesIO(rng.randbytes(READ_BYTES)))


def forget(path: Path) -> None:
    """Takes a file, or those of a directory, out of the page cache, as if there were more data than memory. What the
    kernel has not written yet stays."""
    for name in [path] if path.is_file() else [*path.iterdir()]:
        fd = os.open(name, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def main() -> None:
    """Reads everything in one way, once or several times; the time of computing is spread evenly over what is read."""
    given = argparse.ArgumentParser()
    given.add_argument("way", choices=sorted(WAYS))
    given.add_argument("path")
    given.add_argument("--compute", type=float, default=0.0, help="seconds, of the whole program")
    given.add_argument("--pieces", type=int, default=BATCHES, help="so many are read, about")
    given.add_argument("--delay", type=float, default=0.0, help="seconds before the first open")
    given.add_argument("--passes", type=int, default=1, help="before each but the first the page cache is emptied")
    given.add_argument("--timings", type=Path, help="a file for the seconds of each pass, one line each")
    options = given.parse_args()
    os.environ[COMPUTE_VARIABLE] = str(options.compute / options.passes)
    time.sleep(options.delay)
    found, step_s = 0, 0.0 if options.way == "several" else options.compute / options.passes / options.pieces
    took: list[float] = []
    for number in range(options.passes):
        if number:
            forget(Path(options.path))
        began = time.monotonic()
        for piece in WAYS[options.way](options.path):
            found = zlib.crc32(piece, found)
            time.sleep(step_s)
        took.append(time.monotonic() - began)
    if options.timings:
        options.timings.write_text("".join(f"{seconds:.6f}\n" for seconds in took))
    print(f"{options.way} {found:08x}", flush=True)


if __name__ == "__main__":
    main()
