"""Declares the values that pass between the watch, the ledger, the uploader and the journal. They have no behaviour.

A name is a path relative to the watched directory, which is also its path relative to the target; the empty name is
the directory itself. Names are strings, with surrogates for bytes that are not UTF-8.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Fingerprint(NamedTuple):
    """The attributes that tell whether a file is still the one that was seen. A rename changes none of them."""

    inode: int
    size_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> Fingerprint:
        """Returns the fingerprint of what was looked at."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class EntryKind(Enum):
    """The kinds of entries that the target holds."""

    FILE = "f"
    DIRECTORY = "d"
    LINK = "l"
    """A symbolic link that was carried over."""
    EARLIER = "e"
    """An entry that the target held at the start; the local directory holds a symbolic link to it."""


@dataclass(frozen=True)
class TargetEntry:
    """An entry of the target as this run last saw or wrote it."""

    kind: EntryKind
    there: Fingerprint
    """The target's entry; of an EARLIER one the size is -1 and the time that of the start, on the target's clock."""
    here: Fingerprint | None = None
    """The local file that the entry is a copy of, also once a link has taken its place."""
    ctime_ns: int = 0
    """The time of the local file's last change, attributes included, when it was copied."""
    mode: int = 0
    shown_as: str = ""
    """The name in the target that the local symbolic link to an EARLIER entry leads to."""
    appending: bool = False
    """Whether bytes are being appended in place: the target's file may be longer and newer than `there`."""
    is_others: bool = False
    """Whether another node wrote it during the run: it is shown here, and never replaced."""
    is_sealed: bool = False
    """Whether nobody could write to the local file when it was copied. Otherwise equal times prove nothing: a store
    into a mapped page that is not on the disk yet changes none."""

    def to_json(self) -> list[Any]:
        """Returns plain data."""
        here = None if self.here is None else list(self.here)
        more = [self.ctime_ns, self.mode, self.shown_as, self.appending, self.is_others, self.is_sealed]
        return [self.kind.value, list(self.there), here, *more]

    @classmethod
    def from_json(cls, data: list[Any]) -> TargetEntry:
        """Reads the data of `to_json`."""
        kind, there, here, *more = data
        found = None if here is None else Fingerprint(*here)
        return cls(EntryKind(kind), Fingerprint(*there), found, *more)


# ---- what the watch sees


class SeenKind(Enum):
    """The kinds of events in the watched directory."""

    MADE = "made"
    WRITTEN = "written"
    """The content changed; the file may still be open."""
    CLOSED = "closed"
    """A descriptor that was open for writing was closed."""
    ATTRIBUTES = "attributes"
    FOUND = "found"
    """A look at a directory found the name; nothing is said of changes."""
    REMOVED = "removed"
    MOVED = "moved"
    MOVED_AWAY = "moved away"
    """The name was moved out of the watched directory."""
    MISSED = "missed"
    """The kernel lost events: everything may have changed."""
    GONE = "gone"
    """The watched directory itself was removed, moved or unmounted."""


class SeenEvent(NamedTuple):
    """One event, in the order in which the kernel reported them."""

    kind: SeenKind
    name: str = ""
    new: str = ""
    """The new name, of MOVED."""
    is_dir: bool = False


class News(NamedTuple):
    """Another node says of a name in the target that it gave the name to what has this inode and time, or that it takes
    the name away from it."""

    name: str
    inode: int
    mtime_ns: int
    is_given: bool
    mode: int = -1
    """The mode of a directory; -1 for all else."""

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.mode >= 0


# ---- what is to be done in the target


class Deed(Enum):
    """The kinds of actions in the target."""

    CARRY = "carry"
    """Bring the target's entry up to what the local one is now; a local entry that is missing changes nothing."""
    MOVE = "move"
    """Rename an entry in the target, as was seen."""
    ERASE = "erase"
    """Remove an entry from the target, as was seen, if the local one is still missing."""
    STAMP = "stamp"
    """Give a directory its exact mode and times."""
    FREE = "free"
    """Put a link to the target's entry in the place of a local file that is the same."""
    SHOW = "show"
    """Give the watched directory a link to what another node wrote, or that directory, unless it has the name."""
    HIDE = "hide"
    """Remove the link to what another node took away."""


@dataclass(frozen=True)
class Action:
    """One action in the target. The entries are those of the ledger, None where the run knows of none."""

    deed: Deed
    name: str
    new: str = ""
    is_dir: bool = False
    entry: TargetEntry | None = None
    new_entry: TargetEntry | None = None
    is_written: bool = False
    """Whether events said that the content changed, so that equal times are no proof that it did not."""
    is_open: bool = False
    """Whether a program may still be writing."""
    is_last_try: bool = False
    """Whether a file that changes while it is copied is carried as it is."""
    is_late: bool = False
    """Whether the run is over: the target may have been changed by others since."""
    beside: str = ""
    """The name beside that the local entry got the last time."""
    first: tuple[tuple[str, int], ...] = ()
    """Names that are removed before a directory is renamed to their directory, with the inodes last seen."""

    def to_json(self) -> list[Any]:
        """Returns plain data."""
        entries = [None if entry is None else entry.to_json() for entry in (self.entry, self.new_entry)]
        flags = [self.is_dir, self.is_written, self.is_open, self.is_last_try, self.is_late]
        return [self.deed.value, self.name, self.new, entries, flags, self.beside, list(self.first)]

    @classmethod
    def from_json(cls, data: list[Any]) -> Action:
        """Reads the data of `to_json`."""
        deed, name, new, entries, flags, beside, first = data
        entry, new_entry = (None if one is None else TargetEntry.from_json(one) for one in entries)
        is_dir, is_written, is_open, is_last_try, is_late = flags
        told = (is_written, is_open, is_last_try, is_late, beside, tuple((one, inode) for one, inode in first))
        return cls(Deed(deed), name, new, is_dir, entry, new_entry, *told)


class Ending(Enum):
    """The ways in which an action ends."""

    DONE = "done"
    ABSENT = "absent"
    """There is no local entry: nothing was done."""
    BESIDE = "beside"
    """The target's entry is not the one that the run last saw: the local one lies beside it."""
    KEPT = "kept"
    """The target's entry was not removed or renamed: it is not the one that the run last saw, or the local directory
    says otherwise. Of FREE: the local file stays."""
    SKIPPED = "skipped"
    """The entry is of a kind that is not carried over: a FIFO, a socket, a device."""
    CHANGED = "changed"
    """The file changed while it was copied. Of FREE: the target's entry is not known any more."""
    HELD = "held"
    """A local link of another name shows what would be replaced, and has to be followed first."""
    MISPLACED = "misplaced"
    """The local link stands for an entry of the start which the target has under another name."""
    FAILED = "failed"


@dataclass(frozen=True)
class ActionResult:
    """The end of one action."""

    deed: Deed
    name: str
    ending: Ending
    entry: TargetEntry | None = None
    """The target's entry, if it was brought up to date; of BESIDE, that of the name beside; of MISPLACED, the one that
    the local link stands for."""
    errno: int = 0
    text: str = ""
    """The name beside, of BESIDE; the kind, of SKIPPED; the reason, of FAILED; of MISPLACED, a name that what has the
    name in the target may take meanwhile, since it is shown under another local name."""
    bytes_carried: int = 0
    took_s: float = 0.0

    @property
    def has_copied(self) -> bool:
        """Tells whether it brought content of a file to the target, or an empty file."""
        if self.deed is not Deed.CARRY or self.entry is None or self.entry.kind is not EntryKind.FILE:
            return False
        return self.bytes_carried > 0 or self.entry.there.size_bytes == 0

    def to_json(self) -> list[Any]:
        """Returns plain data."""
        entry = None if self.entry is None else self.entry.to_json()
        facts = [self.errno, self.text, self.bytes_carried, self.took_s]
        return [self.deed.value, self.name, self.ending.value, entry, *facts]

    @classmethod
    def from_json(cls, data: list[Any]) -> ActionResult:
        """Reads the data of `to_json`."""
        deed, name, ending, entry, *facts = data
        return cls(Deed(deed), name, Ending(ending), None if entry is None else TargetEntry.from_json(entry), *facts)


@dataclass(frozen=True)
class Leftover:
    """A name whose drain needs saying: what it is, and why."""

    name: str
    why: str


def is_below(name: str, directory: str) -> bool:
    """Tells whether a name is the directory's or below it."""
    return name == directory or name.startswith(directory + "/") or not directory


def ancestors(name: str) -> list[str]:
    """Returns the name and the directories above it, without the watched directory."""
    found = []
    while name:
        found.append(name)
        name = name.rpartition("/")[0]
    return found
