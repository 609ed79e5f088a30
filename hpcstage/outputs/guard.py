"""Decides whether what the target has may be replaced or removed.

Owns the rule: nothing is replaced or removed that is not known to be what this run last saw or wrote there, or that a
link in the watched directory still shows. While the command runs, a file is known by its inode: it may be written to in
place, through a link. Afterwards others may have changed it, and its size and time count, too.
"""

from __future__ import annotations

import os
import stat

from hpcstage.outputs.facts import Action, EntryKind, TargetEntry
from hpcstage.outputs.links import LocalLinks
from hpcstage.outputs.target import Target, is_same


class TargetGuard:
    """Owns the answers for the entries of one target."""

    def __init__(self, target: Target, links: LocalLinks) -> None:
        self._target = target
        self._links = links
        self.was_written: dict[str, TargetEntry] = {}
        """By name: what a process was about to write when it died."""

    def is_held(self, action: Action, found: os.stat_result | None) -> bool:
        """Tells whether what the target has under a name waits for its rename, or for that of what it holds. At the
        last try it waits no longer: it keeps the name."""
        if found is None or action.is_last_try:
            return False
        if action.is_late and stat.S_ISDIR(found.st_mode):
            return bool(os.listdir(self._target.path(action.name)))
        return self._links.is_still_shown(action.name, found)

    def is_in_the_way(self, action: Action, found: os.stat_result) -> bool:
        """Tells whether what the target has under a name keeps it, so that the local entry lands beside. What
        another node wrote does, until the end of the run decides."""
        if self._links.is_still_shown(action.name, found):
            return True
        is_directory = stat.S_ISDIR(found.st_mode)
        if action.entry is not None and action.entry.is_others:
            return True
        if not action.is_late:
            known = (action.entry, action.new_entry, self.was_written.get(action.name))
            return not is_directory and not any(self._is_ours(entry, found) for entry in known)
        if is_directory and is_last_seen(action, found):
            try:
                os.rmdir(self._target.path(action.name))
            except OSError:
                return True
            return False
        return not is_last_seen(action, found)

    def _is_ours(self, entry: TargetEntry | None, found: os.stat_result) -> bool:
        """Tells whether what the target has is the file that is known. Where other nodes write there, too, one of them
        may have written into a copy of a local file."""
        if entry is not None and entry.kind is EntryKind.FILE and self._target.is_shared:
            return is_same(entry, found)
        return has_inode(entry, found)

    def may_become_directory(self, action: Action, found: os.stat_result) -> bool:
        """Tells whether a directory may take the place of a file."""
        if self._links.is_still_shown(action.name, found):
            return False
        if action.is_late or (action.entry is not None and action.entry.kind is EntryKind.FILE):
            return is_last_seen(action, found)
        return has_inode(action.entry, found)


def has_inode(entry: TargetEntry | None, found: os.stat_result) -> bool:
    """Tells whether what the target has is the file that is known."""
    return entry is not None and found.st_ino == entry.there.inode


def is_last_seen(action: Action, found: os.stat_result) -> bool:
    """Tells whether what the target has is what the run last saw, or was about to write."""
    return any(entry is not None and is_same(entry, found) for entry in (action.entry, action.new_entry))
