"""States of programs, small and quick to make, and what must be the same after a restore."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import BlockSource
from hpcstage.checkpoint.generations.restoring import restore
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.generations.terms import GenerationPolicy
from hpcstage.checkpoint.job.plain import give_newer
from hpcstage.wrapper.checkpointcommand import making_in

BLOCK = 4096
SMALL = GenerationPolicy(block_bytes=BLOCK)
"""Small blocks, so that small states have many."""

Tree = dict[str, tuple[object, ...]]


def tree(directory: Path) -> Tree:
    """Everything below a directory that a restore must bring back."""
    found: Tree = {}
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        content: object = None
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        found[os.fspath(path.relative_to(directory))] = (status.st_mode, status.st_mtime_ns, content)
    return found


def noise(size: int, seed: int) -> bytes:
    """Bytes that do not compress and are the same for the same seed."""
    return random.Random(seed).randbytes(size)


def nudged(content: bytes, seed: int) -> bytes:
    """The content with a low bit of every fourth byte changed by chance, as dense training does with weights."""
    flips = random.Random(seed).randbytes(len(content) // 4 + 1)
    changed = bytearray(content)
    changed[::4] = bytes(a ^ (b & 3) for a, b in zip(content[::4], flips, strict=False))
    return bytes(changed)


def varied_state(directory: Path) -> Path:
    """Files and directories of all sorts."""
    directory.mkdir()
    (directory / "step_1.pt").write_bytes(noise(10 * BLOCK + 17, 1))
    (directory / "empty.json").write_bytes(b"")
    below = directory / "sharded"
    (below / "none").mkdir(parents=True)
    (below / "rank0.bin").write_bytes(noise(3 * BLOCK, 2))
    (below / "rank0.bin").chmod(0o640)
    (below / "latest").symlink_to("rank0.bin")
    (below / "dangling").symlink_to("../gone/\udcff")
    (below / os.fsdecode(b"not-\xff-utf8")).write_bytes(b"x" * 100)
    with open(below / "sparse", "wb") as file:
        file.truncate(200 * BLOCK)
        file.seek(100 * BLOCK)
        file.write(noise(BLOCK, 3))
    below.chmod(0o500)
    for path in (below / "rank0.bin", below, directory / "step_1.pt"):
        os.utime(path, ns=(1_600_000_000_123_456_789, 1_600_000_000_123_456_789))
    os.utime(below / "latest", ns=(1, 1_500_000_000_000_000_001), follow_symlinks=False)
    return directory


def overwrite(path: Path, offset: int, content: bytes) -> None:
    """Changes a part of a file in place."""
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(content)


def flip(path: Path, offset: int) -> None:
    """Flips one bit of a byte."""
    content = path.read_bytes()[offset]
    overwrite(path, offset, bytes([content ^ 0x10]))


def restore_to(source: BlockSource, number: int, directory: Path) -> list[str]:
    """Restores a generation as `hpcstage checkpoint restore` does; returns the entries that got their names."""
    with making_in(directory) as making:
        return give_newer(making, restore(source, number, making.path))


def restore_newest(source: BlockSource, directory: Path) -> int:
    """Restores the newest generation that can be, and returns its number; of several refusals the last is raised."""
    refused = None
    for number in sorted(source.numbers(), reverse=True):
        try:
            restore_to(source, number, directory)
            return number
        except DamagedGeneration as error:
            refused = error
    raise refused or AssertionError("there is no generation")


def prune(store: GenerationStore) -> list[int]:
    """Drops all but the newest generation and those that it needs; returns the dropped."""
    return store.drop_all_but(store.numbers()[-1:])
