"""Owns the local symbolic links to what the target held at the start, and how links look from the target."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count

from hpcstage.outputs.anchors import Anchors, anchors_beside
from hpcstage.outputs.facts import EntryKind, TargetEntry
from hpcstage.outputs.places import found_below
from hpcstage.outputs.target import Target, status_of
from hpcstage.renaming import exchange_names, rename_if_free

_WITHDRAWN, _ITS_NAME = ".withdrawn", ".name"
"""The names of links that are being removed end so, and those of links that tell which name they had."""
_STANDS_IN = ".instead"
"""The names of spare links end so that are about to take the place of a file."""


class LocalLinks:
    """Owns the links below the watched directory."""

    def __init__(self, root: str, scratch: str, target: Target) -> None:
        """`scratch` is a directory on the file system of `root`, not below it."""
        self._root = root
        self._roots = tuple(dict.fromkeys((root, os.path.realpath(root))))
        self._scratch = scratch
        self._target = target
        self._anchors = Anchors(anchors_beside(scratch))
        self._numbers = count()

    def as_seen_there(self, name: str, leads_to: str) -> str:
        """Returns a link's text for the target: a path into the local directory, or into the target, is relative."""
        for root in (*self._roots, self._target.root):
            if leads_to == root or leads_to.startswith(root + "/"):
                return posixpath.relpath("/" + leads_to[len(root) :], "/" + posixpath.dirname(name))
        return leads_to

    def inode_shown_by(self, status: os.stat_result) -> int | None:
        """Returns the inode of the target's file for which a local link stands; None for a link of the program's."""
        return self._anchors.inode_shown_by(status)

    def is_still_shown(self, name: str, found: os.stat_result) -> bool:
        """Tells whether a local link, of whatever name, leads to what the target has under a name."""
        return self._anchors.is_still_shown(found, self._target.path(name))

    def show(self, name: str, expected: str, inode: int, *, is_other: bool = False) -> None:
        """Lets the local link to an earlier entry follow a rename of the file of this inode. The two names are
        exchanged, and exchanged back if the program has put something else there in between. `is_other`: the link stood
        for another file."""
        spare = self._spare_link(name)
        second = self._anchors.prepare(spare)
        try:
            exchange_names(spare, f"{self._root}/{name}")
            if not os.path.islink(spare) or os.readlink(spare) != expected:
                exchange_names(spare, f"{self._root}/{name}")
            else:
                self._anchors.follow(spare, second, inode, is_other=is_other)
        finally:
            with suppress(OSError):
                os.unlink(second)
            with suppress(OSError):
                if os.path.islink(spare):
                    os.unlink(spare)

    def recover(self) -> None:
        """Finishes what a process began that was killed while it let a link follow, or put one in the place of a file:
        its spare link has taken the local one's place, or not yet. A file that was replaced is in the target; it stays
        where it is, since a program may have written through the link meanwhile."""
        with suppress(OSError):
            for name in sorted(os.listdir(self._scratch)):
                with suppress(OSError):
                    self._finish(f"{self._scratch}/{name}")

    def _finish(self, spare: str) -> None:
        if spare.endswith(_WITHDRAWN):
            local = os.readlink(spare + _ITS_NAME).removeprefix(self._target.root)
            if self.inode_shown_by(os.lstat(spare)) is None:
                rename_if_free(spare, self._root + local)
                return
        second = self._anchors.second(spare)
        link, found = status_of(second), os.lstat(spare)
        if link is not None and link.st_ino != found.st_ino:
            inode = self._anchors.inode_shown_by(found)
            if inode is not None:
                self._anchors.follow(spare, second, inode)
            elif not spare.endswith(f".{found.st_ino}{_STANDS_IN}"):  # something that the program had put there
                local = os.readlink(second).removeprefix(self._target.root)
                if os.lstat(self._root + local).st_ino != link.st_ino:
                    return
                exchange_names(spare, self._root + local)
        with suppress(OSError):
            os.unlink(second)
        if os.path.islink(spare):
            os.unlink(spare)

    def stand_in(self, name: str, inode: int, file: int, may_go: Callable[[str], bool]) -> bool:
        """Puts a link in the place of a local file that the target has under the same name, with this inode, and
        removes the file, whose own inode `file` is. `may_go` says of the file under its spare name whether that may be;
        where it may not, the file gets its name back. Returns whether the link stands there. Raises OSError."""
        spare = self._spare_link(name, f".{file}{_STANDS_IN}")
        link = os.lstat(spare).st_ino
        second = self._anchors.prepare(spare)
        anchor = self._anchors.add(spare, inode)
        try:
            exchange_names(spare, f"{self._root}/{name}")
            with suppress(OSError):
                if may_go(spare):
                    os.unlink(second)
                    os.unlink(spare)
                    return True
            self._give_back(name, spare, link)
            return False
        finally:
            with suppress(OSError):
                os.unlink(second)
            with suppress(OSError):
                if os.path.islink(spare):
                    os.unlink(spare)
                    self._anchors.drop(anchor)

    def show_new(self, name: str, inode: int) -> bool:
        """Gives the watched directory a link to what another node wrote, with an anchor, unless it has the name, or
        lacks the directory. Returns whether it did. Raises OSError."""
        spare = self._spare_link(name)
        anchor = self._anchors.add(spare, inode)
        try:
            os.link(spare, f"{self._root}/{name}", follow_symlinks=False)
        except (FileExistsError, FileNotFoundError, NotADirectoryError):
            return False
        finally:
            os.unlink(spare)
            self._anchors.drop(anchor)  # it stays if the link has its name
        return True

    def is_shown(self, name: str, inode: int) -> bool:
        """Tells whether a name is that of the local link to what the target has under the same name, or had, with an
        inode."""
        found = status_of(f"{self._root}/{name}")
        return found is not None and self.inode_shown_by(found) == inode

    def readdress(self, name: str, inode: int) -> None:
        """Lets the local link of a name stand for another inode, which another node gave the name. Raises OSError."""
        self.show(name, self._target.path(name), inode, is_other=True)

    def withdraw(self, name: str, inode: int) -> bool:
        """Removes the link to what another node took away, unless the program has put something else there. Returns
        whether it did. Raises OSError."""
        path = f"{self._root}/{name}"
        found = status_of(path)
        if found is None or self.inode_shown_by(found) != inode:
            return False
        spare = f"{self._scratch}/{os.getpid()}.{next(self._numbers)}{_WITHDRAWN}"
        os.symlink(self._target.path(name), spare + _ITS_NAME)
        try:
            os.rename(path, spare)
            return self._is_withdrawn(spare, path, found.st_ino)
        finally:
            os.unlink(spare + _ITS_NAME)

    def _is_withdrawn(self, spare: str, path: str, link: int) -> bool:
        """Removes a link that was taken away; what the program had put in its place gets its name back, unless the
        program has given it to something else since."""
        if os.lstat(spare).st_ino != link:
            with suppress(FileExistsError):
                rename_if_free(spare, path)
                return False
        else:
            self._anchors.forget(link)
        if not os.path.isdir(spare) or os.path.islink(spare):
            os.unlink(spare)
        return True

    def _give_back(self, name: str, spare: str, link: int) -> None:
        """Gives a file its name back from the link that stands there, also if the program has renamed the link; the
        program may have removed it, and the file with it."""
        names = (name, *(event.name for event in found_below(self._root) if not event.is_dir))
        for path in (f"{self._root}/{one}" for one in names):
            found = status_of(path)
            if found is not None and found.st_ino == link:
                exchange_names(spare, path)
                if os.lstat(spare).st_ino == link:
                    return
                exchange_names(spare, path)  # the program has put something else there in between
        os.unlink(spare)

    def _spare_link(self, name: str, suffix: str = "") -> str:
        spare = f"{self._scratch}/{os.getpid()}.{next(self._numbers)}{suffix}"
        os.symlink(self._target.path(name), spare)
        return spare

    def show_moved(self, old: str, new: str, entry: TargetEntry) -> TargetEntry:
        """Lets the local link follow a rename, if it is still what was renamed. Returns the entry as it is then."""
        with suppress(OSError):
            leads_to = os.readlink(f"{self._root}/{new}")
            if leads_to in {self._target.path(old), self._target.path(entry.shown_as)}:
                self.show(new, leads_to, entry.there.inode)
        return self.shown(new, entry)

    def show_below(self, new: str) -> None:
        """Lets the links in a directory that was just renamed follow at once. Until then they lead nowhere."""
        for event in () if not self._anchors.is_any else found_below(self._root, new):
            with suppress(OSError):
                leads_to = os.readlink(f"{self._root}/{event.name}")
                inode = self._anchors.inode_shown_by(os.lstat(f"{self._root}/{event.name}"))
                found = status_of(self._target.path(event.name))
                if inode is not None and found is not None and found.st_ino == inode:
                    self.show(event.name, leads_to, inode)

    def shown(self, name: str, entry: TargetEntry) -> TargetEntry:
        """Returns the entry with the name that the local link shows now."""
        with suppress(OSError):
            if entry.kind is EntryKind.EARLIER and os.readlink(f"{self._root}/{name}") == self._target.path(name):
                return replace(entry, shown_as=name)
        return entry
