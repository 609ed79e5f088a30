"""Knows what the target holds, as this run last saw or wrote it. It is pure."""

from __future__ import annotations

from hpcstage.outputs.facts import EntryKind, Fingerprint, TargetEntry, is_below
from hpcstage.outputs.namequeue import PendingRename
from hpcstage.outputs.names import Names


class KnownTarget:
    """Owns the entries of the target by name, and the directories that get their exact times at the end."""

    def __init__(self, entries: dict[str, TargetEntry]) -> None:
        self.entries = Names(entries.items())
        self.intents: dict[str, TargetEntry] = {}
        """Entries that were about to be written when the process was killed; filled from a journal only."""
        self.unstamped: set[str] = set()
        """Directories whose times are not the local ones."""

    def has_below(self, name: str) -> bool:
        """Tells whether the target has a name, or something below it."""
        return self.entries.has_below(name)

    def put(self, name: str, entry: TargetEntry) -> None:
        """Notes what a name is now."""
        self.intents.pop(name, None)
        self.entries[name] = entry
        self.touch(name)
        if entry.kind is EntryKind.DIRECTORY:
            self.unstamped.add(name)

    def renamed(self, rename: PendingRename, entry: TargetEntry | None) -> None:
        """Notes that a rename was done, and what the new name is then, if that is said."""
        old, new = rename.old, rename.new
        for name in {*rename.first, new}:
            self.entries.pop(name, None)
        names = self.entries.below(old) if rename.is_dir else [old]
        for name in names:
            if name in self.entries:
                self.entries[new + name[len(old) :]] = self.entries.pop(name)
        if rename.is_dir:
            self.unstamped = {new + name[len(old) :] if is_below(name, old) else name for name in self.unstamped}
        if entry is not None and new in self.entries:
            self.entries[new] = entry

    def removed(self, name: str) -> None:
        """Notes that a name is there no more."""
        self.entries.pop(name, None)
        self.unstamped.discard(name)
        self.touch(name)

    def touch(self, name: str) -> None:
        """Notes that the directory of a name has changed."""
        directory = name.rpartition("/")[0]
        if directory:
            self.unstamped.add(directory)

    def take_unstamped(self, most: int) -> list[str]:
        """Takes directories to give their modes and times, of the deepest that are left: one that is read-only then can
        be entered no more."""
        deepest = max((name.count("/") for name in self.unstamped), default=0)
        names = [name for name in self.unstamped if name.count("/") == deepest][:most]
        self.unstamped.difference_update(names)
        return names

    def inodes_of(self, names: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
        """Returns those of the names which the target has, with their inodes."""
        return tuple((name, self.entries[name].there.inode) for name in names if name in self.entries)

    def name_of_earlier(self, shown: TargetEntry) -> str | None:
        """Returns the name that an entry of the start has now: mostly the one to which the local link leads."""
        near = self.entries.get(shown.shown_as)
        if near is not None and _is_earlier(near, shown.there):
            return shown.shown_as
        return next((name for name, entry in self.entries.items() if _is_earlier(entry, shown.there)), None)


def _is_earlier(entry: TargetEntry, there: Fingerprint) -> bool:
    return entry.kind is EntryKind.EARLIER and entry.there.inode == there.inode
