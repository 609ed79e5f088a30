"""Data sets, places for them, and caches that are cold: what the measured programs find.

Owns: deterministic files, the directories of one benchmark run (removed at its end), the dropping of caches.
"""

from __future__ import annotations

import compileall
import contextlib
import ctypes
import mmap
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

import hpcstage
from benchmarks.disk import FreshDisk, fresh_disk, unmount_below
from benchmarks.harness import Options

_PACKAGE = Path(hpcstage.__file__).parent
_MEMORY = Path("/dev/shm")
_LIBC = ctypes.CDLL(None, use_errno=True)
_DROP = Path("/proc/sys/vm/drop_caches")
_STAMP_S = 1_600_000_000
_POPULATE = getattr(mmap, "MAP_POPULATE", 0x8000)


@dataclass(frozen=True)
class Place:
    """Where one benchmark run works."""

    memory: Path
    """In memory: what stands behind emulated storage, so that the machine's own disk plays no part in its times."""
    disk: Path
    """On the machine's own disk."""
    local: FreshDisk
    """The node-local disk: new for each sample."""


@contextlib.contextmanager
def place(options: Options) -> Iterator[Place]:
    """Fresh directories; those that dead runs of this user left are removed first.

    hpcstage gets its bytecode, which it has where it is installed: else each start would compile it.
    """
    compileall.compile_dir(_PACKAGE, quiet=2)
    memory = options.memory_dir or (_MEMORY if os.access(_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
    disk = options.work_dir or Path(tempfile.gettempdir())
    made = [_fresh(base) for base in (memory, disk)]
    before = signal.signal(signal.SIGTERM, _end)
    try:
        with fresh_disk(made[1]) as local:
            yield Place(made[0], made[1], local)
    finally:
        signal.signal(signal.SIGTERM, before)
        for path in made:
            shutil.rmtree(path, ignore_errors=True)


def make_files(root: Path, count: int, size_bytes: int, *, spread: float = 0.2, seed: int = 7) -> list[str]:
    """`count` files of random bytes directly below `root`, of size_bytes ± spread; gives the names, shuffled."""
    root.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    names = [f"sample{index:06d}.bin" for index in range(count)]
    for name in names:
        size = round(size_bytes * (1 + spread * (2 * rng.random() - 1)))
        path = root / name
        path.write_bytes(rng.randbytes(size))
        os.utime(path, (_STAMP_S, _STAMP_S))
    rng.shuffle(names)
    return names


def touch_memory(size_bytes: int) -> None:
    """Takes memory once and gives it back: a virtual machine may have handed free memory to its host, and what comes
    first then waits for it, page by page."""
    size_bytes = min(size_bytes, psutil.virtual_memory().available // 2)
    with contextlib.suppress(OSError):
        mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _POPULATE).close()


def empty(path: Path) -> Path:
    """A directory in which nothing is left from the sample before."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    return path


def total_bytes(root: Path) -> int:
    """The bytes of all files directly below `root`."""
    return sum(entry.stat().st_size for entry in os.scandir(root) if entry.is_file())


def write_list(path: Path, lines: Sequence[str]) -> Path:
    """One line each."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def drop_files(paths: Sequence[Path]) -> None:
    """Takes these files out of the page cache."""
    for path in paths:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def write_back(path: Path) -> None:
    """Has nothing left to write to the file system of a path."""
    fd = os.open(path, os.O_RDONLY)
    try:
        if _LIBC.syncfs(fd):
            raise OSError(ctypes.get_errno(), "syncfs", os.fspath(path))
    finally:
        os.close(fd)


def drop_caches(paths: Sequence[Path]) -> None:
    """Writes back and drops the machine's caches where that is permitted; else only those of `paths`."""
    os.sync()
    try:
        _DROP.write_text("3\n")
    except OSError:
        drop_files(paths)


def _end(number: int, _: object) -> None:
    """SIGTERM unwinds: what is running is ended, mounts and directories go."""
    raise SystemExit(128 + number)


def _fresh(base: Path) -> Path:
    prefix = f"hpcstage-bench-{os.geteuid()}-"
    for old in base.glob(prefix + "*"):
        pid = old.name[len(prefix) :].partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and old.stat().st_uid == os.geteuid():
            unmount_below(old)
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base))
