"""Restores a generation into a directory, bit for bit; a damaged one is refused by name.

Each entry directly below the directory is one checkpoint, and is placed by one rename. Nothing of a generation that
turns out to be damaged ever stands there: all of it is restored below a name of its own, and placed when the last block
was verified and all is on the disk. An entry that is there already and is not older stays. What a killed restore left,
the next one removes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Collection, Container, Iterator
from pathlib import Path

from hpcstage.checkpoint.generations.files import LOCK, RESTORING, Files, lock_file
from hpcstage.checkpoint.generations.manifest import EntryType, GenerationManifest, SavedEntry
from hpcstage.checkpoint.generations.reading import BlockSource, GenerationReader, OpenGeneration
from hpcstage.errors import HpcstageError
from hpcstage.renaming import KNOWS_NOT, exchange_names, rename_if_free

NEWEST_NS = 1 << 63
"""A time for `place` after all others: an entry that has it takes the place of any."""


class UnusableTarget(HpcstageError):
    """A state cannot be restored to the directory that was named."""


def restore(source: BlockSource, number: int, directory: Path, names: Collection[str] | None = None) -> tuple[str, ...]:
    """Places the entries of a generation in a directory, which is made if it is missing; with `names` those alone.
    Returns the placed: entries that were there and are not older stay.

    Raises DamagedGeneration or UnusableTarget, after which the directory is as before.
    """
    is_new = _is_missing(directory)
    if is_new:
        directory.mkdir(0o700)
    try:
        remove_leftovers(directory)
        with making_in(directory) as beside:
            reader = GenerationReader(source)
            opened = reader.generation(number)
            times = times_of(opened.manifest)
            chosen = times if names is None else names
            _restore_entries(reader, opened, beside, chosen)
            sync_directory(beside)
            placed = tuple(name for name in chosen if place(beside / name, directory / name, times[name]))
            sync_directory(directory)
            if is_new:
                sync_directory(directory.parent)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                directory.rmdir()
        raise
    return placed


def remove_leftovers(directory: Path) -> list[str]:
    """Removes what killed restores left in a directory; returns the names. A restore that goes on is left alone, and an
    entry that had stepped aside for another has its name again before anything is deleted."""
    removed = []
    for name in sorted(name for name in os.listdir(directory) if name.startswith(RESTORING)):
        left = directory / name
        with contextlib.suppress(OSError):
            with _locked(left, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_locked:
                if os.lstat(left).st_uid != os.geteuid():
                    continue
                for aside in left.glob(f"{RESTORING}*"):
                    with contextlib.suppress(FileExistsError):
                        _take(aside, directory / aside.name.removeprefix(RESTORING))
                if is_locked:  # whoever has just made it and waits for the lock sees that it is gone
                    left = left.rename(_new_name(directory))
            if is_locked:  # NFS removes no directory of which a file is open
                _remove(left)
                removed.append(name)
    return removed


def _is_missing(directory: Path) -> bool:
    """Tells whether there is no such directory; refuses what is none, before anything is read."""
    try:
        mode = os.lstat(directory).st_mode
    except FileNotFoundError:
        return True
    if not stat.S_ISDIR(mode):
        raise UnusableTarget(f"{directory} is no directory", "name one that is there, or can be made")
    return False


@contextlib.contextmanager
def making_in(directory: Path) -> Iterator[Path]:
    """Gives a directory below another that is locked while it is used, and removed at the end."""
    while True:
        made = _new_name(directory)
        made.mkdir(0o700)
        try:
            with contextlib.ExitStack() as held:
                with contextlib.suppress(FileNotFoundError):
                    held.enter_context(_locked(made, fcntl.LOCK_EX))
                if made.exists():  # else another node took it for a leftover before it was locked
                    yield made
                    return
        finally:
            _remove(made)


def _new_name(directory: Path) -> Path:
    return directory / f"{RESTORING}{os.urandom(6).hex()}"


@contextlib.contextmanager
def _locked(made: Path, how: int) -> Iterator[bool]:
    """Locks a file in a directory; gives whether the file system has locks. A lock of a directory is one of this node
    alone on many shared file systems, or is refused: it takes a file that is open for writing."""
    fd = os.open(made / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        yield lock_file(fd, how)
    finally:
        os.close(fd)


def times_of(manifest: GenerationManifest) -> dict[str, int]:
    """Returns the checkpoints of a generation, the entries directly below its directory: by name the latest time at
    which one, or anything below it, was modified."""
    times: dict[str, int] = {}
    for entry in manifest.entries:
        top = entry.name.partition("/")[0]
        times[top] = max(times.get(top, entry.mtime_ns), entry.mtime_ns)
    return times


def place(made: Path, target: Path, time_ns: int) -> bool:
    """Renames an entry to its name; returns False if one that is not older has it. An older one changes places with it
    and goes with the directory in which the entry was made."""
    try:
        _take(made, target)
    except FileExistsError:
        if newest_ns(target) >= time_ns:
            return False
        _take_over(made, target)
    return True


def _take(old: Path, new: Path) -> None:
    """Renames to a free name, also where the file system knows plain renames only. Raises FileExistsError."""
    try:
        rename_if_free(old, new)
    except OSError as error:
        if error.errno not in KNOWS_NOT:
            raise
        if os.path.lexists(new):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(new)) from None
        old.rename(new)


def _take_over(old: Path, new: Path) -> None:
    """Exchanges two names. Where the file system cannot, a file takes the place of another in one rename, and a
    directory steps aside first."""
    try:
        exchange_names(old, new)
    except OSError as error:
        if error.errno not in KNOWS_NOT:
            raise
        try:
            old.rename(new)
        except OSError as full:
            if full.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR):
                raise
            new.rename(old.with_name(f"{RESTORING}{new.name}"))
            old.rename(new)


def newest_ns(path: Path) -> int:
    """Returns the latest time at which an entry, or anything below it, was modified."""
    newest, pending = os.lstat(path).st_mtime_ns, [os.fspath(path)] if path.is_dir() and not path.is_symlink() else []
    while pending:
        with os.scandir(pending.pop()) as found:
            for entry in found:
                newest = max(newest, entry.stat(follow_symlinks=False).st_mtime_ns)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
    return newest


def verify(source: BlockSource, number: int) -> None:
    """Reads every block of a generation. Raises DamagedGeneration if one cannot be restored."""
    reader = GenerationReader(source)
    opened = reader.generation(number)
    for file in range(len(opened.manifest.entries)):
        for _ in reader.pieces(opened, file):
            pass


def _restore_entries(reader: GenerationReader, opened: OpenGeneration, directory: Path, names: Container[str]) -> None:
    """Makes entries in a directory and has all of them on the disk; what is zero of a file stays a hole."""
    files = Files()
    entries = [(i, one) for i, one in enumerate(opened.manifest.entries) if one.name.partition("/")[0] in names]
    for index, entry in entries:
        path = directory / entry.name
        if entry.type is EntryType.DIRECTORY:
            path.mkdir(0o700)
        elif entry.type is EntryType.LINK:
            path.symlink_to(entry.target)
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)
        else:
            with files.created(path) as fd:
                os.ftruncate(fd, entry.size_bytes)
                for offset, content in reader.pieces(opened, index):
                    files.write(fd, content, offset)
                _finish(fd, entry)
    for _, entry in reversed(entries):  # a directory's times and mode come after all below it
        if entry.type is EntryType.DIRECTORY:
            with files.opened(directory / entry.name) as fd:
                _finish(fd, entry)


def _finish(fd: int, entry: SavedEntry) -> None:
    """Gives a file or directory its mode and time and has it on the disk."""
    os.fchmod(fd, entry.mode)
    os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
    os.fsync(fd)


def sync_directory(path: Path) -> None:
    """Has the names of a directory on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove(directory: Path) -> None:
    """Removes what was restored in part, also below directories that the program made unwritable."""
    pending = [os.fspath(directory)]
    while pending:
        with contextlib.suppress(OSError):
            path = pending.pop()
            os.chmod(path, 0o700)
            with os.scandir(path) as found:
                pending += [entry.path for entry in found if entry.is_dir(follow_symlinks=False)]
    shutil.rmtree(directory, ignore_errors=True)
