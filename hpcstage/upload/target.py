"""Owns DIR: the paths in it, the names of temporary files, and how an entry gets its place.

A place that is free is given by a hard link, of which only one can succeed; one that is this run's is taken by a
rename. Between the look at what has the place and the rename lie microseconds. A run that reads another owner in DIR,
since it stood still and was taken for dead, changes nothing there any more.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count

from hpcstage.owner import holder_of
from hpcstage.upload.copying import sync_directory
from hpcstage.upload.facts import Run

TEMPORARY = ".hpcstage-"
"""Names that begin so are never uploaded, and never shown."""
MAKING = f"{TEMPORARY}making-"
"""The names of the directories in which nodes make whole entries begin so; see `making`."""
OWNER_S = 1.0
"""The owner of DIR is read again after so long, before something is changed there."""
NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EMLINK, errno.EXDEV})


class Target:
    """DIR, as one run writes to it."""

    def __init__(self, run: Run, owner: str = "") -> None:
        """`owner` is the run that owns DIR, where it is another one that goes on with this one's files."""
        self.run = run
        self._owner = owner or run.run_id
        self._owned_at = -OWNER_S
        self.root = run.target

    def check(self) -> None:
        """Raises OSError where DIR is not the one of the start, or another run owns it."""
        self.check_same()
        self._check_owner()

    def check_same(self) -> None:
        """Raises OSError where DIR is not the directory of the start: what is mounted over it may be missing."""
        if os.stat(self.root).st_ino != self.run.target_inode:
            raise OSError(errno.ESTALE, "this is not the directory that the run began with", self.root)

    def _check_owner(self) -> None:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if now < self._owned_at + OWNER_S:
            return
        holder = holder_of(self.root)
        if holder and f"run {self._owner} on " not in holder:
            raise OSError(errno.EBUSY, f"it is in use by {holder}", self.root)
        self._owned_at = now

    def path(self, place: str) -> str:
        """Returns the path of a place."""
        return f"{self.root}/{place}"

    def look(self, place: str) -> os.stat_result | None:
        """Returns what lstat says of a place; None if nothing is there. Raises OSError."""
        try:
            return os.lstat(self.path(place))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def temporary(self, name: str) -> str:
        """Returns the place of the temporary file for a name, which is the same for all processes of this node."""
        directory, slash, _ = name.rpartition("/")
        return f"{directory}{slash}{TEMPORARY}{self._digest(name)}"

    @property
    def making(self) -> str:
        """The place of the directory in which this node makes whole entries."""
        return MAKING + self._digest("")

    def create(self, place: str) -> int:
        """Makes a temporary file, in the place of one that a killed process left. Raises OSError."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(self.path(place), flags, 0o600)
        except FileExistsError:
            self.discard(place)
            return os.open(self.path(place), flags, 0o600)

    def discard(self, place: str) -> None:
        """Removes a temporary file, if it is there."""
        with suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self.path(place))

    def places_beside(self, name: str, last: str, inode: int = 0) -> list[str]:
        """Returns where a file, which may have this inode, may lie whose name somebody else's has: where it lay the
        last time, else the first place that is free or its own."""
        places = self.names_beside(name)
        free = next(place for place in places if (found := self.look(place)) is None or found.st_ino == inode)
        return [last, free] if last not in {"", name} else [free]

    def names_beside(self, name: str) -> Iterator[str]:
        """Yields the places beside a name, whatever has them."""
        first = f"{name}.{self.run.suffix}"
        return (f"{first}.{n}" if n else first for n in count())

    def give(
        self,
        temporary: str,
        inode: int,
        places: Iterable[str],
        may_replace: Callable[[str, os.stat_result], bool],
        will: Callable[[str], object] = lambda _: None,
    ) -> str | None:
        """Gives a temporary entry, which has this inode, the first of some places that is free, or where `may_replace`
        lets it replace what is there; `will` is told before. Returns the place. Raises OSError."""
        for place in places:
            found = self.look(place)
            if found is None:
                will(place)
                if self.give_free(temporary, place, inode):
                    return place
            elif may_replace(place, found):
                will(place)
                self.take_over(temporary, place, inode)
                return place
        return None

    def give_free(self, temporary: str, place: str, inode: int) -> bool:
        """Gives a temporary entry, which has this inode, a place that was free. Tells whether it has it now; the
        temporary name is gone then. Raises OSError."""
        self._check_owner()
        if not self.link(temporary, place, inode):
            return False
        self.discard(temporary)
        return True

    def link(self, old: str, new: str, inode: int) -> bool:
        """Gives an entry, which has this inode, another name that was free, which is its only one if it is a directory,
        or the file system has no links. Tells whether it has it. Raises OSError."""
        try:
            os.link(self.path(old), self.path(new), follow_symlinks=False)
        except OSError as error:
            if error.errno in NO_LINKS:
                if self.look(new) is not None:
                    return False
                self.take_over(old, new, inode)
            elif not self._has(new, inode):
                if error.errno == errno.EEXIST:
                    return False
                raise
        return True

    def take_over(self, temporary: str, place: str, inode: int) -> None:
        """Gives a temporary entry, which has this inode, a place that is this run's. Raises OSError."""
        self._check_owner()
        try:
            os.rename(self.path(temporary), self.path(place))
        except FileNotFoundError:
            if not self._has(place, inode):
                raise
        if self._has(temporary, inode):  # a rename onto another name of the same file does nothing
            self.discard(temporary)

    def make(self, place: str) -> int:
        """Makes a directory. Returns its inode, or 0 if it was there. Raises NotADirectoryError if something else has
        the place, or OSError."""
        path = self.path(place)
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not stat.S_ISDIR(os.lstat(path).st_mode):
                raise NotADirectoryError(errno.ENOTDIR, "a file has the name of the directory", path) from None
            return 0
        return os.lstat(path).st_ino

    def remove(self, place: str, *, is_dir: bool = False) -> None:
        """Removes an entry, if it is there. Raises OSError."""
        self._check_owner()
        with suppress(FileNotFoundError):
            (os.rmdir if is_dir else os.unlink)(self.path(place))

    def sync(self, place: str) -> None:
        """Forces a directory to the disk."""
        sync_directory(self.path(place))

    def _digest(self, name: str) -> str:
        owner = f"{self.run.run_id}/{self.run.node}/{name}"
        return hashlib.blake2b(owner.encode("utf-8", "surrogateescape"), digest_size=10).hexdigest()

    def _has(self, place: str, inode: int) -> bool:
        """Tells whether a place has its file, though a call said that it failed: of a call whose reply is lost, NFS
        says what it says to the second try."""
        found = self.look(place)
        return found is not None and found.st_ino == inode
