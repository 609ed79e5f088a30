"""Does the single tasks of the scan: lists the entries of a directory, or finds out what some names are.

This module owns the kinds of tasks and what a worker gathers from them; `scan` decides which worker does which task
when. FileNames that are not regular files are left out with a reason. The walk follows symbolic links, but never to a
directory above the one that it walks, and behind a link it stays on the file system that the link leads to.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

from hpcstage.plan.dataset.columns import Columns
from hpcstage.plan.dataset.roots import join

Positions = frozenset[int]
"""The components of the pattern that may come next (several because of `**`)."""
EVERYTHING = -1
"""The position below a directory of which all files are taken."""
BATCH = 128
SKIPPED_LIMIT = 100
LATEST_NS = (1 << 63) - 1
"""Times are kept in 64 bits; file systems that hold later ones got them by mistake."""
OF_FILES = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG, errno.EOVERFLOW}
)
"""The errors that say something of a file. Others say that its file system did not answer, and may pass."""
MOST_NAMES = 64
"""Links may give a directory at most this many names: directories that link to each other have endlessly many."""


class Pattern:
    """A glob, split into the components of its path."""

    def __init__(self, text: bytes) -> None:
        self._parts = text.split(b"/")
        self._tests = [_test(part) for part in self._parts]
        self.start: Positions = self._closed({0})

    def into(self, positions: Positions, name: bytes) -> Positions:
        """Returns the positions below a directory of this name; empty: the walk does not enter it."""
        if EVERYTHING in positions:
            return positions
        after = set()
        for position in positions:
            if self._parts[position] == b"**":
                if not name.startswith(b"."):
                    after.add(position)
            elif self._tests[position].match(name):
                after.add(position + 1)
        if len(self._parts) in after:
            return frozenset({EVERYTHING})
        return self._closed(after)

    def takes_file(self, positions: Positions, name: bytes) -> bool:
        """Returns whether the pattern matches a file of this name."""
        if EVERYTHING in positions:
            return True
        last = len(self._parts) - 1
        if last not in positions:
            return False
        return self._parts[last] == b"**" or self._tests[last].match(name) is not None

    def _closed(self, positions: set[int]) -> Positions:
        """Adds the positions that `**` reaches by matching no directory."""
        closed = set(positions)
        for position in sorted(positions):
            while position < len(self._parts) - 1 and self._parts[position] == b"**":
                position += 1
                closed.add(position)
        return frozenset(closed)


@lru_cache(maxsize=256)
def _test(part: bytes) -> re.Pattern[bytes]:
    text = fnmatch.translate(part.decode("latin-1")).encode("latin-1")
    hidden = b"" if part.startswith(b".") else rb"(?!\.)"
    return re.compile(hidden + text, re.DOTALL)


WHOLE = Pattern(b"**")
"""It takes all files."""
WHOLE.start = frozenset({EVERYTHING})


@dataclass
class ScanFindings:
    """The findings of one worker. They are merged at the end, so the walk needs no locks for them."""

    columns: Columns = field(default_factory=Columns)
    skipped: list[tuple[bytes, str]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    stats: int = 0
    listings: int = 0
    size_bytes: int = 0
    """Bytes of the files in `columns`."""
    unanswered: str = ""
    """The first name of which the file system did not tell, and why."""

    def fail(self, path: bytes, error: OSError, why: str) -> None:
        """Leaves out a path that cannot be looked at."""
        if error.errno not in OF_FILES and not self.unanswered:
            self.unanswered = f"{os.fsdecode(path)}: {error.strerror}"
        self.skip(path, why)

    def skip(self, path: bytes, why: str) -> None:
        """Counts a path that is left out, and remembers the first of them with the reason."""
        self.counts[why] += 1
        if len(self.skipped) < SKIPPED_LIMIT:
            self.skipped.append((path, why))


@dataclass(frozen=True)
class Directory:
    """A directory to be listed."""

    dataset: int
    path: bytes
    """The path below the root; empty for the root."""
    ancestors: tuple[tuple[int, int], ...]
    """(device, inode) of the directories above, including those above the dataset."""
    pattern: Pattern
    positions: Positions
    device: int | None = None
    """The file system that the symbolic link leads to, if the directory was found behind one."""


@dataclass(frozen=True)
class FileNames:
    """Files to be looked at: names in a directory, or paths of a list."""

    dataset: int
    parent: bytes
    names: list[bytes]
    directory: Directory | None
    """The directory where the names were listed; None for paths of a list."""

    def part(self, start: int, stop: int) -> FileNames:
        """Returns a task with some of the names."""
        return replace(self, names=self.names[start:stop])


ScanTask = Directory | FileNames


class WalkBounds:
    """Decides which directories a walk enters. `exclude` holds absolute paths that it does not enter."""

    def __init__(self, exclude: frozenset[bytes] = frozenset()) -> None:
        self.exclude = exclude
        self._names: Counter[tuple[int, int]] = Counter()

    def refuses(self, task: Directory, key: tuple[int, int]) -> str:
        """Says why a directory with this (device, inode) is left out; empty if it is not."""
        if key in task.ancestors:
            return "a symbolic link to a directory above it"
        if task.device is None:
            return ""
        if key[0] != task.device:
            return "another file system behind a symbolic link"
        self._names[key] += 1
        return f"more than {MOST_NAMES} names by symbolic links" if self._names[key] > MOST_NAMES else ""


def above(path: bytes) -> tuple[tuple[int, int], ...]:
    """Returns (device, inode) of the directories above a path."""
    found = []
    while (parent := os.path.dirname(path)) != path:
        path = parent
        with contextlib.suppress(OSError):
            itself = os.stat(path)
            found.append((itself.st_dev, itself.st_ino))
    return tuple(found)


def list_directory(
    task: Directory, root: bytes, findings: ScanFindings, push: Callable[[ScanTask], None], bounds: WalkBounds
) -> int:
    """Lists a directory; returns how many entries it has."""
    path = join(root, task.path)
    if path in bounds.exclude:
        return 0
    findings.listings += 1
    findings.stats += 1
    try:
        itself = os.stat(path)
        key = (itself.st_dev, itself.st_ino)
        if why := bounds.refuses(task, key):
            findings.skip(path, why)
            return 0
        here = replace(task, ancestors=(*task.ancestors, key))
        with os.scandir(path) as entries:
            return _sort_entries(entries, here, push)
    except OSError as error:
        findings.fail(path, error, f"directory: {error.strerror}")
        return 0


def _sort_entries(entries: Iterator[os.DirEntry[bytes]], here: Directory, push: Callable[[ScanTask], None]) -> int:
    # This loop does not ask for types: where the file system does not list them, each costs an operation, in sequence.
    names: list[bytes] = []
    count = 0
    for count, entry in enumerate(entries, 1):  # noqa: B007  the last one is the number of entries
        name = entry.name
        if here.pattern.takes_file(here.positions, name) or here.pattern.into(here.positions, name):
            names.append(name)
            if len(names) == BATCH:
                push(FileNames(here.dataset, here.path, names, here))
                names = []
    if names:
        push(FileNames(here.dataset, here.path, names, here))
    return count


def _descend(here: Directory, name: bytes, device: int | None, push: Callable[[ScanTask], None]) -> None:
    positions = here.pattern.into(here.positions, name)
    if positions:
        below = here.path + b"/" + name if here.path else name
        push(replace(here, path=below, positions=positions, device=here.device if device is None else device))


def look(
    task: FileNames, start: int, stop: int, root: bytes, findings: ScanFindings, push: Callable[[ScanTask], None]
) -> float:
    """Looks at some of the names; returns the median time of a look, which a preempted moment does not change."""
    prefix = join(root, task.parent)
    prefix = prefix if prefix.endswith(b"/") else prefix + b"/"
    below = task.parent + b"/" if task.parent else b""
    times = [time.monotonic()]
    for name in task.names[start:stop]:
        is_link = False
        try:
            findings.stats += 1
            found = os.lstat(prefix + name)
            if is_link := stat.S_ISLNK(found.st_mode):
                findings.stats += 1
                found = os.stat(prefix + name)
        except OSError as error:
            if task.directory is None or _takes(task.directory, name):
                findings.fail(prefix + name, error, _why(error, is_link=is_link))
            continue
        finally:
            times.append(time.monotonic())
        if stat.S_ISDIR(found.st_mode):
            _follow(task, name, root, found.st_dev if is_link else None, push)
        elif task.directory is not None and not _takes(task.directory, name):
            continue
        elif abs(found.st_mtime_ns) > LATEST_NS:
            findings.skip(prefix + name, "a modification time after the year 2262")
        elif stat.S_ISREG(found.st_mode):
            behind = task.directory is not None and task.directory.device is not None
            findings.size_bytes += found.st_size
            findings.columns.add(task.dataset, below + name, found, is_link=is_link, behind=behind)
        else:
            findings.skip(prefix + name, "not a regular file")
    return sorted(after - before for before, after in pairwise(times))[(len(times) - 1) // 2]


def _why(error: OSError, *, is_link: bool) -> str:
    if is_link and error.errno == errno.ENOENT:
        return "a dangling symbolic link"
    return error.strerror or "unreadable"


def _takes(directory: Directory, name: bytes) -> bool:
    return directory.pattern.takes_file(directory.positions, name)


def _follow(task: FileNames, name: bytes, root: bytes, device: int | None, push: Callable[[ScanTask], None]) -> None:
    if task.directory is not None:
        _descend(task.directory, name, device, push)
    else:
        push(Directory(task.dataset, name, above(join(root, name)), WHOLE, WHOLE.start, device))
