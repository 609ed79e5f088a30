"""Gives whole entries, files or directories, their names in DIR, each in one step.

Owns a directory in DIR for each node, in which entries are made. What is on the disk there gets its name by a link or a
rename (see Target). A directory cannot be replaced in one step: it steps aside first, into the same directory, and has
its name again if a killed process left it there. All else that is left there goes when the node makes entries again, or
the next owner of DIR begins.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from hpcstage.upload.target import MAKING, TEMPORARY, Target

_ASIDE, _GONE = f"{TEMPORARY}aside", f"{TEMPORARY}gone"
"""The directories in it of what stepped aside, and of what was removed."""


class Making:
    """The directory in which this node makes entries, while it does."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._place = target.making
        self.path = Path(target.path(self._place))

    def __enter__(self) -> Making:
        """Raises OSError, also where another run owns DIR."""
        self.target.check()
        _clear(self.target, self._place)
        self.path.mkdir(0o700)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.target.sync("")
        finally:
            with suppress(OSError):  # what stepped aside stays there
                _clear(self.target, self._place)

    def give(
        self, name: str, places: Iterable[str], may_replace: Callable[[str], bool] = lambda _: False
    ) -> str | None:
        """Gives an entry that was made the first of some places that is free, or where `may_replace` lets it replace
        what is there. Returns the place. Raises OSError."""
        made = os.lstat(self.path / name)

        def replaces(place: str, found: os.stat_result) -> bool:
            if not may_replace(place):
                return False
            if stat.S_ISDIR(found.st_mode) or stat.S_ISDIR(made.st_mode):
                self._move(place, found.st_ino, _ASIDE)
            return True

        return self.target.give(f"{self._place}/{name}", made.st_ino, places, replaces)

    def remove(self, place: str) -> None:
        """Removes an entry of DIR, which loses its name in one step. Raises OSError."""
        if (found := self.target.look(place)) is not None:
            self._move(place, found.st_ino, _GONE)

    def _move(self, place: str, inode: int, to: str) -> None:
        with suppress(FileExistsError):
            os.mkdir(self.path / to, 0o700)
        self.target.take_over(place, f"{self._place}/{to}/{posixpath.basename(place)}", inode)


def sweep(target: Target) -> None:
    """Removes what killed processes left in DIR, which nobody else writes to. Raises OSError."""
    for name in os.listdir(target.root):
        if name.startswith(MAKING):
            with suppress(OSError):
                _clear(target, name)


def remove_tree(path: str | os.PathLike[str]) -> None:
    """Removes an entry, if it is there, also below directories that the program made unwritable; what cannot be removed
    stays."""
    if os.path.islink(path) or not os.path.isdir(path):
        with suppress(OSError):
            os.unlink(path)
        return
    pending = [os.fspath(path)]
    while pending:
        with suppress(OSError):
            directory = pending.pop()
            os.chmod(directory, 0o700)
            with os.scandir(directory) as found:
                pending += [one.path for one in found if one.is_dir(follow_symlinks=False)]
    shutil.rmtree(path, ignore_errors=True)


def _clear(target: Target, place: str) -> None:
    """Gives what stepped aside its name again, if that is free, and removes all else. Raises OSError."""
    aside = f"{place}/{_ASIDE}"
    with suppress(FileNotFoundError):
        for name in os.listdir(target.path(aside)):
            found = target.look(f"{aside}/{name}")
            if found is not None and target.look(name) is None:
                target.take_over(f"{aside}/{name}", name, found.st_ino)
    remove_tree(target.path(place))
