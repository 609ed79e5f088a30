"""Makes the watched directory and fills it with what the target holds at the start.

Owns the layout below a base directory on the local disk: `tree` is the watched directory, `journal`, `scratch` and
`anchors` lie beside it, on the same file system. Directories become directories, relative links that stay in the
directory the same links, everything else a symbolic link into the target.
"""

from __future__ import annotations

import os
import posixpath
import stat
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcstage.outputs.anchors import Anchors, anchors_beside
from hpcstage.outputs.facts import EntryKind, Fingerprint, TargetEntry
from hpcstage.outputs.journal import Charter, Journal
from hpcstage.outputs.target import TEMPORARY

MOST_ENTRIES = 100_000


class CannotMirror(Exception):
    """The target cannot be shown in a local directory; the message says why. The program uses the target itself."""


@dataclass(frozen=True)
class OutputPlace:
    """The directories of one watched directory."""

    base: Path

    @property
    def root(self) -> str:
        """The watched directory."""
        return os.fspath(self.base / "tree")

    @property
    def journal(self) -> str:
        """The journal beside it."""
        return os.fspath(self.base / "journal")

    @property
    def scratch(self) -> str:
        """A directory for links that are about to take the place of others."""
        return os.fspath(self.base / "scratch")


@dataclass(frozen=True)
class PreparedPlace:
    """A watched directory that is ready to be used."""

    place: OutputPlace
    charter: Charter
    entries: dict[str, TargetEntry]


@dataclass(frozen=True)
class _Shown:
    """An entry that is no directory; `link` is the text of a symbolic link that is shown as it is."""

    inode: int
    link: str


def prepare(
    place: OutputPlace, target: Path, run_id: str, most_entries: int = MOST_ENTRIES, node: str = ""
) -> PreparedPlace:
    """Makes the watched directory for a target, which is made if it is missing. `node` is this node's name where others
    drain to the same target. Raises CannotMirror, after which nothing is left on the local disk."""
    path = os.path.realpath(target)
    try:
        os.makedirs(path, exist_ok=True)
        started_ns = time_there(path)
        found = list(_listed(path, most_entries))
    except OSError as error:
        raise CannotMirror(f"{error.filename or path}: {error.strerror}") from None
    try:
        return _make(place, path, (run_id, node), started_ns, found)
    except OSError as error:
        import shutil

        shutil.rmtree(place.base, ignore_errors=True)
        raise CannotMirror(f"{error.filename or place.base}: {error.strerror}") from None


def _make(
    place: OutputPlace,
    target: str,
    owner: tuple[str, str],
    started_ns: int,
    found: list[tuple[str, os.stat_result | _Shown]],
) -> PreparedPlace:
    os.makedirs(place.base, mode=0o700)
    os.mkdir(place.scratch, 0o700)
    os.mkdir(place.root, 0o700)
    anchors = Anchors(anchors_beside(place.scratch))
    os.mkdir(anchors.directory, 0o700)
    entries = {}
    names: Counter[int] = Counter()
    for name, known in found:
        local = f"{place.root}/{name}"
        if isinstance(known, os.stat_result):
            os.mkdir(local, 0o700)
            mode = stat.S_IMODE(known.st_mode)
            entries[name] = TargetEntry(EntryKind.DIRECTORY, Fingerprint(known.st_ino, -1, -1), mode=mode)
        elif known.link:
            os.symlink(known.link, local)
            there = Fingerprint.of(os.lstat(f"{target}/{name}"))
            entries[name] = TargetEntry(EntryKind.LINK, there, Fingerprint.of(os.lstat(local)))
        else:
            os.symlink(f"{target}/{name}", local)
            anchors.anchor(local, known.inode, names[known.inode])
            names[known.inode] += 1
            earlier = Fingerprint(known.inode, -1, started_ns)
            entries[name] = TargetEntry(EntryKind.EARLIER, earlier, shown_as=name)
    for name, known in reversed(found):
        if isinstance(known, os.stat_result):
            os.utime(f"{place.root}/{name}", ns=(known.st_atime_ns, known.st_mtime_ns))
            os.chmod(f"{place.root}/{name}", stat.S_IMODE(known.st_mode))
    inodes = os.stat(target).st_ino, os.stat(place.root).st_ino
    run_id, node = owner
    charter = Charter(run_id, target, *inodes, os.uname().nodename, node)
    journal = Journal.open(place.journal)
    try:
        journal.begin(charter, entries)
    finally:
        journal.close()
    return PreparedPlace(place, charter, entries)


def _listed(target: str, most: int) -> Iterator[tuple[str, os.stat_result | _Shown]]:
    """Yields all names below the target, directories before what they hold: of a directory what stat says, of a file
    the inode, which costs no further request."""
    below, count = [""], 0
    is_listed_truly: bool | None = None
    while below:
        directory = below.pop()
        with os.scandir(f"{target}/{directory}") as children:
            for child in children:
                if child.name.startswith(TEMPORARY):
                    continue
                count += 1
                if count > most:
                    raise CannotMirror(f"{target} has more than {most:,} entries")
                name = f"{directory}/{child.name}" if directory else child.name
                if child.is_dir(follow_symlinks=False):
                    below.append(name)
                    yield name, child.stat(follow_symlinks=False)
                else:
                    link = os.readlink(child.path) if child.is_symlink() else ""
                    if is_listed_truly is None:  # some file systems list other inodes than lstat tells
                        is_listed_truly = child.inode() == os.lstat(child.path).st_ino
                    inode = child.inode() if is_listed_truly else os.lstat(child.path).st_ino
                    yield name, _Shown(inode, link if _stays_inside(name, link) else "")


def _stays_inside(name: str, link: str) -> bool:
    """Tells whether a link's text leads to the same place in the local directory."""
    return not link.startswith("/") and not posixpath.normpath(
        posixpath.join(posixpath.dirname(name), link)
    ).startswith("..")


def time_there(target: str) -> int:
    """Returns the time by the clock of the target's file system; it shows, too, whether the target can be written."""
    probe = f"{target}/{TEMPORARY}{uuid.uuid4().hex}"
    fd = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)
        with suppress(OSError):
            os.unlink(probe)
