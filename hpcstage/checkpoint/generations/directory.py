"""The directory of a store: who may write to it, which generations it has, what a process that was killed left there.

Owns the lock. A generation whose manifest has no final name is removed when the directory is opened, unless a committed
one needs it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from hpcstage.checkpoint.generations.files import (
    Files,
    GenerationId,
    generation_number,
    generation_path,
    is_number,
)
from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.errors import HpcstageError


class StoreInUse(HpcstageError):
    """Another process writes generations to the same directory."""


class StaleNumber(HpcstageError):
    """A new generation cannot have this number."""


class UnsafeStore(HpcstageError):
    """The directory of a store is a link, or another user's."""


class StoreDirectory:
    """A directory with generations, which is made if it is not there, and locked until it is closed."""

    def __init__(self, files: Files, directory: Path) -> None:
        """Raises StoreInUse if another process holds it, UnsafeStore if it is a link or another user's."""
        self._directory = directory
        self._files = files
        self._pid = os.getpid()
        self._lock = _opened_directory(files, directory)
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Lets other processes write to the directory."""
        if self._lock >= 0:
            self._files.call(os.close, self._lock)
            self._lock = -1

    def check_held(self) -> None:
        """Raises StoreInUse after the directory was closed, and in a process that was forked from the one that opened
        it."""
        if self._pid != os.getpid() or self._lock < 0:
            raise StoreInUse(f"this process does not hold the store {self._directory}")

    def path(self, number: int) -> Path:
        """Returns the directory of a generation."""
        return generation_path(self._directory, number)

    def source(self) -> LocalSource:
        """Returns the generations for reading."""
        return LocalSource(self._directory, self._files)

    def numbers(self) -> list[int]:
        """Returns the committed generations, oldest first."""
        with self.source() as source:
            return source.numbers()

    def next_number(self) -> int:
        """Returns the number after all that a name of the directory has."""
        return max(self._taken(), default=0) + 1

    def identity(self, given: GenerationId | None) -> GenerationId:
        """Returns what the next generation is called. Raises StaleNumber if it cannot be called as is given."""
        lowest = self.next_number()
        if given is not None and given.number < lowest:
            what = f"generation {given.number} cannot be made: {lowest - 1} is there"
            raise StaleNumber(what, "take a higher number")
        if not is_number(lowest):
            raise StaleNumber(f"there are no numbers after {lowest - 1}", f"move {self._directory} away")
        return given or GenerationId.new(lowest)

    def needed(self, committed: Sequence[int]) -> set[int]:
        """Returns what committed generations need; of one whose manifest cannot be read all that is older."""
        needed: set[int] = set()
        with self.source() as source:
            reader = GenerationReader(source)
            for number in committed:
                try:
                    needed.update(reader.manifest(number).needs)
                except DamagedGeneration:
                    needed.update(n for n in self._taken() if n < number)
        return needed

    def remove(self, number: int) -> None:
        """Removes a generation."""
        self._files.remove_generation(self.path(number))

    def _take_over(self) -> None:
        try:
            self._files.call(fcntl.flock, self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreInUse(f"another process writes checkpoints to {self._directory}") from error
        committed = self.numbers()
        for number in committed:  # a process that was killed may have left the name of a manifest in memory only
            with contextlib.suppress(OSError):
                self._files.sync_directory(self.path(number))
        left = [number for number in self._taken() if number not in committed]
        needed = self.needed(committed) if left else set()
        for number in left:
            with contextlib.suppress(OSError):  # no generation gets the number of what stays
                if number not in needed and stat.S_ISDIR(self._files.call(os.lstat, self.path(number)).st_mode):
                    self.remove(number)

    def _taken(self) -> list[int]:
        """Returns the numbers that a name of the directory has, whatever it is."""
        names = self._files.call(os.listdir, self._directory)
        return [number for name in names if (number := generation_number(name)) is not None]


def _opened_directory(files: Files, directory: Path) -> int:
    """Returns a descriptor of a store's directory, which is made if it is missing and is private then.

    Raises UnsafeStore if it is a link or another user's.
    """
    with contextlib.suppress(FileExistsError):
        files.call(os.mkdir, directory, 0o700)
        files.sync_directory(directory.parent)
    if stat.S_ISLNK(files.call(os.lstat, directory).st_mode):
        raise UnsafeStore(f"{directory} is a symbolic link, which is not followed", "give the directory itself")
    fd = files.call(os.open, directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = files.call(os.fstat, fd)
        if status.st_uid != os.geteuid():
            raise UnsafeStore(f"{directory} belongs to user {status.st_uid}", "give another directory")
        if status.st_mode & 0o077:
            files.call(os.fchmod, fd, 0o700)
    except BaseException:
        files.call(os.close, fd)
        raise
    return fd
