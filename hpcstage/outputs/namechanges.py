"""Carries renames and removals over that were seen, and the times of directories: what changes names, not contents."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import TypeGuard

from hpcstage.outputs.facts import Action, ActionResult, Deed, Ending, EntryKind, Fingerprint, TargetEntry, ancestors
from hpcstage.outputs.guard import has_inode, is_last_seen
from hpcstage.outputs.journal import Charter
from hpcstage.outputs.links import LocalLinks
from hpcstage.outputs.target import Target, change_mode, is_same, status_of


class NameChanges:
    """Owns the ways of names from a watched directory to its target."""

    def __init__(
        self,
        root: str,
        charter: Charter,
        target: Target,
        links: LocalLinks,
        taking: Callable[[str, os.stat_result], None],
    ) -> None:
        """`taking` is called before a name is taken from what has it in the target."""
        self._taking = taking
        self._root = root
        self._root_inode = charter.root_inode
        self._target = target
        self._links = links

    def move(self, action: Action) -> ActionResult:
        """Renames an entry. Raises OSError."""
        old, new, entry = action.name, action.new, action.entry
        found = status_of(self._target.path(old))
        if found is None or stat.S_ISDIR(found.st_mode) != action.is_dir or (entry is None and not action.is_dir):
            if found is None and entry is not None and self._is_moved(new, entry):
                return ActionResult(Deed.MOVE, old, Ending.DONE, self._follow(action, entry))
            return ActionResult(Deed.MOVE, old, Ending.ABSENT)
        refusal = self._refusal(action, found)
        if refusal is not None:
            self._target.remove_temporary(new)  # a process that was killed may have left it
            return ActionResult(Deed.MOVE, old, refusal[0], text=refusal[1])
        self._remove_first(action)
        if _is_copy(entry) and not self._may_take(new, entry):
            return ActionResult(Deed.MOVE, old, Ending.CHANGED)
        self._taking(old, found)
        try:
            if entry is not None and entry.kind is EntryKind.EARLIER:
                return ActionResult(Deed.MOVE, old, Ending.DONE, self._move_earlier(old, new, entry))
            self._target.in_parents(new, lambda: os.rename(self._target.path(old), self._target.path(new)))
            if action.is_dir:
                self._links.show_below(new)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}:
                return ActionResult(Deed.MOVE, old, Ending.KEPT, text=f"{new} is in the way")
            raise
        self._target.sync_directory(new)
        return ActionResult(Deed.MOVE, old, Ending.DONE)

    def _refusal(self, action: Action, found: os.stat_result) -> tuple[Ending, str] | None:
        """Returns why an entry is not renamed. A copy of a local file may be made anew under the new name instead."""
        if action.is_late and not self._may_move(action, found):
            return Ending.KEPT, "the target's was changed by others"
        instead = Ending.CHANGED if _is_copy(action.entry) else Ending.KEPT
        other = status_of(self._target.path(action.new))
        if other is not None and other.st_ino != found.st_ino:
            if self._links.is_still_shown(action.new, other):
                instead = Ending.HELD if instead is Ending.KEPT and not action.is_dir else instead
                return instead, f"a local link of another name leads to {action.new}"
            is_others = action.new_entry is not None and action.new_entry.is_others
            if not stat.S_ISDIR(other.st_mode) and (is_others or not has_inode(action.new_entry, other)):
                return instead, f"{action.new} is in the way"
        if not action.is_dir and not has_inode(action.entry, found):
            return instead, "the target's is another file by now"
        return None

    def _move_earlier(self, old: str, new: str, entry: TargetEntry) -> TargetEntry:
        """Renames a file to which the local directory has a link. It has both names until the link shows the new one,
        where the file system has hard links, so that the link leads somewhere at any moment."""
        temporary = self._target.path(self._target.temporary(new))
        self._target.remove_temporary(new)
        try:
            self._target.in_parents(new, lambda: os.link(self._target.path(old), temporary, follow_symlinks=False))
        except OSError:
            self._target.in_parents(new, lambda: os.rename(self._target.path(old), self._target.path(new)))
            return self._links.show_moved(old, new, entry)
        try:
            os.rename(temporary, self._target.path(new))
        finally:
            self._target.remove_temporary(new)  # it is still there, too, if the new name was one of the same file
        shown = self._links.show_moved(old, new, entry)
        os.unlink(self._target.path(old))
        self._target.sync_directory(new)
        return shown

    def _follow(self, action: Action, entry: TargetEntry) -> TargetEntry:
        """Lets the local links follow a rename after which the process that did it was killed."""
        if action.is_dir:
            self._links.show_below(action.new)
        elif entry.kind is EntryKind.EARLIER:
            return self._links.show_moved(action.name, action.new, entry)
        return entry

    def _remove_first(self, action: Action) -> None:
        """Removes what had the new name before, unless the rename replaces it, a local link leads to it, or it may be
        others' by now."""
        for name, inode in () if action.is_late else action.first:
            found = status_of(self._target.path(name))
            if found is None or self._links.is_still_shown(name, found):
                continue
            is_directory = stat.S_ISDIR(found.st_mode)
            is_replaced = name == action.new and not (is_directory or action.is_dir)
            if not is_replaced and (is_directory or found.st_ino == inode):
                with suppress(OSError):
                    self._target.remove(name)

    def _is_moved(self, new: str, entry: TargetEntry) -> bool:
        found = status_of(self._target.path(new))
        return found is not None and is_same(entry, found) and found.st_ino == entry.there.inode

    def _may_move(self, action: Action, found: os.stat_result) -> bool:
        if action.entry is not None and not is_same(action.entry, found):
            return False
        other = status_of(self._target.path(action.new))
        if other is not None and other.st_ino == found.st_ino:
            return True
        return other is None or (action.new_entry is not None and is_same(action.new_entry, other))

    def _may_take(self, new: str, entry: TargetEntry) -> bool:
        """Tells whether the target's entry may have the new name: only if it is what the local one is now, so that no
        incomplete file takes the place of a complete one; or if the local one has moved on, and there is none."""
        found = status_of(f"{self._root}/{new}")
        if found is None:
            return status_of(self._target.path(new)) is None
        is_sealed = entry.kind is EntryKind.LINK or entry.is_sealed
        return is_sealed and not entry.appending and Fingerprint.of(found) == entry.here

    def erase(self, action: Action) -> ActionResult:
        """Removes an entry, if the local one is still missing. Raises OSError."""
        name = action.name
        root = status_of(self._root)
        if root is None or root.st_ino != self._root_inode:
            return ActionResult(Deed.ERASE, name, Ending.KEPT, text="the local directory has gone")
        if self._is_local(name):
            return ActionResult(Deed.ERASE, name, Ending.KEPT)
        found = status_of(self._target.path(name))
        if found is None or action.entry is None:
            return ActionResult(Deed.ERASE, name, Ending.ABSENT)
        if self._links.is_still_shown(name, found):
            return ActionResult(Deed.ERASE, name, Ending.KEPT, text="a link in the local directory leads to it")
        is_dir = stat.S_ISDIR(found.st_mode)
        if is_dir != action.is_dir or not (is_dir or has_inode(action.entry, found)):
            return ActionResult(Deed.ERASE, name, Ending.KEPT, text="the target's is another file by now")
        if action.is_late and not is_last_seen(action, found):
            return ActionResult(Deed.ERASE, name, Ending.KEPT, text="it was removed here, and changed there by others")
        self._taking(name, found)
        try:
            self._target.remove(name)
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                text = "holds files that this run did not remove"
                return ActionResult(Deed.ERASE, name, Ending.KEPT, errno=errno.ENOTEMPTY, text=text)
            raise
        return ActionResult(Deed.ERASE, name, Ending.DONE)

    def _is_local(self, name: str) -> bool:
        """Tells whether the watched directory has a name; what a link in it leads to does not count."""
        *above, last = (status_of(f"{self._root}/{one}") for one in reversed(ancestors(name)))
        return last is not None and all(status is not None and stat.S_ISDIR(status.st_mode) for status in above)

    def stamp(self, action: Action) -> ActionResult:
        """Gives a directory the mode and the times of the local one. Raises OSError."""
        status = status_of(f"{self._root}/{action.name}")
        if status is None or not stat.S_ISDIR(status.st_mode):
            return ActionResult(Deed.STAMP, action.name, Ending.ABSENT)
        path = self._target.path(action.name)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        change_mode(path, os.lstat(path), stat.S_IMODE(status.st_mode))
        return ActionResult(Deed.STAMP, action.name, Ending.DONE)


def _is_copy(entry: TargetEntry | None) -> TypeGuard[TargetEntry]:
    return entry is not None and entry.kind in {EntryKind.FILE, EntryKind.LINK}
