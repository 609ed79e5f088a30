"""Makes and finds the directories on the local disk that hold a command's output files.

Such a directory is `<local>/hpcstage-out-<uid>/<run id>`; no start deletes it. The module owns names, permissions and
locks. Everybody who works with one holds a shared lock on its `lock`; who can take the exclusive one knows that wrapper
and daemon of its run are dead. A program that outlived them has the directory in its environment.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.errors import LocalDiskProblem

if TYPE_CHECKING:
    from hpcstage.job.localdir import LocalDir

OUT = "HPCSTAGE_OUT"
"""The variable with which a program finds its output directory."""
_LOCK = "lock"
_NEW = "."
"""The names of directories whose lock is not held yet begin so."""


@dataclass(frozen=True)
class KeptPlace:
    """The directory of one run's output files."""

    path: Path

    @property
    def output(self) -> Path:
        """The base of the watched directory; see `outputs.prepare`."""
        return self.path / "out"

    @property
    def watched(self) -> Path:
        """A file that the daemon makes when it watches; where it cannot, the file holds the reason."""
        return self.path / "watched"

    @property
    def was_watched(self) -> bool:
        """Whether the daemon watched; no command starts before that."""
        try:
            return self.watched.stat().st_size == 0
        except OSError:
            return False

    @property
    def drained(self) -> Path:
        """A file with the result of the drain."""
        return self.path / "drained"

    def hold(self) -> int:
        """Takes the shared lock, for as long as the returned descriptor is open. Raises OSError."""
        return self._lock(fcntl.LOCK_SH)

    def take(self) -> int | None:
        """Takes the exclusive lock and returns its descriptor; None if the run's wrapper, daemon or command lives, or
        somebody else drains it."""
        try:
            fd = self._lock(fcntl.LOCK_EX)
        except OSError:
            return None
        if _is_used(os.fspath(self.output)):
            os.close(fd)
            return None
        return fd

    def _lock(self, how: int) -> int:
        fd = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise
        return fd

    def remove(self) -> None:
        """Deletes the directory, all of whose files are drained, and the one above it if it is empty."""
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()


def parent(local: LocalDir, host: str) -> Path:
    """Returns the directory of all runs' output directories on a disk; `host` keeps nodes apart that see the same."""
    name = f"hpcstage-out-{os.geteuid()}"
    return local.path / (f"{name}-{host}" if local.is_network else name)


def make(above: Path, run_id: str) -> tuple[KeptPlace, int]:
    """Makes the directory of a run; returns it and the descriptor of its shared lock. Raises LocalDiskProblem."""
    place = KeptPlace(above / run_id)
    try:
        with suppress(FileExistsError):
            above.mkdir(mode=0o700)
        _require_own(above)
        new = KeptPlace(above / f"{_NEW}{run_id}-{os.urandom(4).hex()}")
        new.path.mkdir(mode=0o700)
        held = new.hold()
        try:
            new.path.rename(place.path)
        except OSError:
            os.close(held)
            new.remove()
            raise
        return place, held
    except OSError as error:
        raise LocalDiskProblem(f"cannot make {place.path}: {error.strerror or error}", "give --local-dir") from None


def places(above: Path) -> Iterator[KeptPlace]:
    """Yields the directories of all runs of this user, by name."""
    try:
        _require_own(above)
        names = sorted(os.listdir(above))
    except OSError:
        return
    for name in names:
        if not name.startswith(_NEW) and (above / name).is_dir() and not (above / name).is_symlink():
            yield KeptPlace(above / name)


def _require_own(above: Path) -> None:
    found = os.lstat(above)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(1, "it is not a directory of this user", os.fspath(above))
    if found.st_mode & 0o077:
        os.chmod(above, 0o700)


def _is_used(output: str) -> bool:
    """Tells whether a program still has the directory as its output directory."""
    wanted = os.fsencode(f"{OUT}={output}/")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if any(entry.startswith(wanted) for entry in entries):
                return True
    return False
