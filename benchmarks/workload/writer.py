"""Programs that write output files at random: each operation is done below one directory and below another, the twin.

Several processes work at once, in directories of their own and in a common one. Before and after each operation its
names are noted in a file elsewhere, so that a process that is killed leaves what it was doing.

    python -m benchmarks.workload.writer OUT TWIN NOTES --seed N --processes N --operations N [--pause-s S]

At the end the times of the files and directories in OUT are written beside the notes, as NOTES.times.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import stat
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

COMMON = "common"
EARLIER = ("earlier0", "earlier1", "earlier2", "earlier3")
"""Files that both directories hold at the start; each process has those whose number is its own."""
SIZES = (0, 1, 5_000, 70_000, 1_000_000)
MODES = (0o600, 0o644, 0o755, 0o640)


def content(seed: str, size_bytes: int) -> bytes:
    """Bytes that are told apart by their seed."""
    return (f"{seed}:{size_bytes} " * (size_bytes // 4 + 1)).encode()[:size_bytes]


class Writer:
    """One process: its names, and what it may do to them."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self._rng = rng
        own = f"p{number}"
        self._own = own
        names = [f"{own}.{letter}" for letter in "ab"] + [f"{COMMON}/{own}{letter}" for letter in "ab"]
        names += [f"{own}/{letter}" for letter in "abc"] + [f"{own}/d/{letter}" for letter in "ab"]
        self._files = [*names, *(name for index, name in enumerate(EARLIER) if index % 3 == number)]
        self._directories = [own, f"{own}/d", f"{own}/e", f"{own}/e/f"]
        self._ways: list[tuple[Callable[..., None], int]] = [
            (create, 1), (append, 1), (replace, 1), (replace, 1), (overwrite, 1), (truncate, 1), (remove, 1),
            (chmod, 1), (touch, 1), (sparse, 1), (symlink, 2), (link, 2), (rename, 2), (rename, 2), (make_directory, 0),
            (make_directory, 0), (remove_tree, 0), (rename_directory, 0),
        ]  # fmt: skip

    def operation(self, index: int) -> tuple[Callable[..., None], list[str], str]:
        """What is done next: the way, its names, and what tells its content apart."""
        way, names = self._rng.choice(self._ways)
        if names:
            return way, [self._rng.choice(self._files) for _ in range(names)], f"{self._own}-{index}"
        return way, [self._rng.choice(self._directories), self._rng.choice(self._directories)], f"{self._own}-{index}"

    def argument(self) -> int:
        """A number for the operation: a size, or what a mode follows from."""
        return self._rng.randrange(1 << 30)


def create(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Writes a file from its beginning."""
    (root / names[0]).write_bytes(content(seed, SIZES[number % len(SIZES)]))


def append(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Adds to a file, in two writes."""
    with (root / names[0]).open("ab") as file:
        file.write(content(seed, 300))
        file.flush()
        file.write(content(seed, SIZES[number % 3]))


def replace(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Writes a file under another name and renames it."""
    temporary = root / f"{names[0]}.tmp"
    temporary.write_bytes(content(seed, SIZES[number % len(SIZES)]))
    temporary.replace(root / names[0])


def overwrite(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Writes into a file that is there."""
    with (root / names[0]).open("r+b") as file:
        file.seek(number % 1000)
        file.write(content(seed, 200))


def truncate(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Cuts a file, or lengthens it."""
    del seed
    os.truncate(root / names[0], number % 9000)


def sparse(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Writes a file that is mostly hole."""
    with (root / names[0]).open("wb") as file:
        file.seek(number % (8 << 20))
        file.write(content(seed, 100))


def remove(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Removes a file."""
    del seed, number
    (root / names[0]).unlink()


def chmod(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Changes a mode."""
    del seed
    (root / names[0]).chmod(MODES[number % len(MODES)])


def touch(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Changes the times of a file."""
    del seed
    os.utime(root / names[0], (1_600_000_000 + number % 1000, 1_700_000_000 + number % 1000))


def symlink(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Makes a symbolic link, relative or absolute."""
    del seed
    leads_to = root / names[1] if number % 2 else Path(names[1]).name
    (root / names[0]).symlink_to(leads_to)


def link(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Gives a file a second name."""
    del seed, number
    os.link(root / names[0], root / names[1])


def rename(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Renames a file, onto another one if it is there."""
    del seed, number
    (root / names[0]).rename(root / names[1])


def make_directory(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Makes a directory."""
    del seed, number
    (root / names[0]).mkdir()


def remove_tree(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Removes a directory with all that it holds, now and then."""
    del seed
    if number % 3 == 0:
        shutil.rmtree(root / names[0])


def rename_directory(root: Path, names: Sequence[str], seed: str, number: int) -> None:
    """Renames a directory with all that it holds."""
    del seed, number
    (root / names[0]).rename(root / names[1])


def start_with(root: Path) -> None:
    """What both directories hold before the program begins."""
    root.mkdir(parents=True)
    for name in EARLIER:
        (root / name).write_bytes(content(name, 5_000))


def work(out: Path, twin: Path, notes: Path, number: int, seed: int, operations: int, pause_s: float) -> int:
    """One process. Returns how many operations ended otherwise below the two directories."""
    rng = random.Random(f"{seed}/{number}")
    writer, differ = Writer(number, rng), 0
    fd = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for index in range(operations):
        way, names, text = writer.operation(index)
        argument = writer.argument()
        if way is link and (out / names[0]).is_symlink():
            continue  # a second name of a link is not one of the file to which it leads
        os.write(fd, json.dumps(["begins", number, index, way.__name__, names]).encode() + b"\n")
        ended = [_errno(way, root, names, text, argument) for root in (out, twin)]
        if ended[0] != ended[1]:
            differ += 1
            os.write(fd, json.dumps(["differs", number, index, way.__name__, names, ended]).encode() + b"\n")
        os.write(fd, json.dumps(["ended", number, index]).encode() + b"\n")
        time.sleep(rng.uniform(0, 2 * pause_s))  # so that the drain is sometimes ahead and sometimes behind
    return differ


def _errno(way: Callable[..., None], root: Path, names: Sequence[str], seed: str, number: int) -> int | str | None:
    try:
        way(root, names, seed, number)
    except OSError as error:
        return error.errno
    except shutil.Error:
        return "shutil"
    return None


def times(root: Path) -> dict[str, int]:
    """The times of all files and directories below one, without what symbolic links lead to."""
    found = {}
    for path in root.rglob("*"):
        status = path.lstat()
        if not stat.S_ISLNK(status.st_mode):
            found[os.fspath(path.relative_to(root))] = status.st_mtime_ns
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command: exit code 0 if all operations ended alike."""
    parser = argparse.ArgumentParser()
    for name in ("out", "twin", "notes"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--operations", type=int, default=60)
    parser.add_argument("--pause-s", type=float, default=0.01)
    given = parser.parse_args(argv)
    for root in (given.out, given.twin):
        (root / COMMON).mkdir(exist_ok=True)
    print("started", flush=True)
    pids = []
    for number in range(given.processes):
        pid = os.fork()
        if not pid:
            code = 70
            with contextlib.suppress(Exception):
                code = min(
                    9, work(given.out, given.twin, given.notes, number, given.seed, given.operations, given.pause_s)
                )
            os._exit(code)
        pids.append(pid)
    code = max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    given.notes.with_name(f"{given.notes.name}.times").write_text(json.dumps(times(given.out)))
    return code


if __name__ == "__main__":
    sys.exit(main())
