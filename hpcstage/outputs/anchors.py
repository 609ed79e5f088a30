"""Owns the anchors: a second name, beside the watched directory, of each link to what the target held at the start.

The rule for which they are there: a file in the target whose anchor has another name is still shown in the watched
directory, under whatever name, and is never replaced, removed or renamed onto, whatever the ledger says. The kernel
counts the names, so no event that was lost or misread can break the rule. An anchor keeps the link's inode in use, too:
a link that is found under any name tells which file of the target it stands for.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import count

from hpcstage.outputs.target import status_of

_SPARE = ".spare"


def anchors_beside(scratch: str) -> str:
    """Returns the directory of the anchors, which lies beside that of the spare links."""
    return os.path.join(os.path.dirname(scratch), "anchors")


class Anchors:
    """The anchors of one watched directory: `INODE`, then `INODE.1` … for further names of one file of the target, or
    of one that had its inode before."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._inodes: dict[int, int] | None = None
        """By the inode of a local link: that of the target's file. It is read when it is first asked for."""
        self._lock = threading.Lock()

    def anchor(self, link: str, inode: int, number: int) -> None:
        """Gives a local link its anchor; `number` says how many names of the target's file have one. Raises OSError."""
        os.link(link, self._path(inode, number), follow_symlinks=False)

    def add(self, link: str, inode: int) -> str:
        """Gives a link that is about to take the place of a local file its anchor, and returns it. Raises OSError."""
        with self._lock:
            path = self._path(inode, sum(1 for _ in self._links(inode)))
            os.link(link, path, follow_symlinks=False)
            self._known()[os.lstat(path).st_ino] = inode
            return path

    def drop(self, anchor: str) -> None:
        """Removes an anchor that was added last, if its link has no other name. Raises OSError."""
        with self._lock:
            status = os.lstat(anchor)
            if status.st_nlink == 1:
                os.unlink(anchor)
                self._known().pop(status.st_ino, None)

    def forget(self, link: int) -> None:
        """Removes the anchor of a link that has lost its name, by the link's own inode; if it is the last of those that
        the target's file has, since they are found by counting."""
        with self._lock:
            inode = self._known().get(link)
            links = [] if inode is None else list(self._links(inode))
            if links and links[-1][1].st_ino == link:
                os.unlink(links[-1][0])
                self._known().pop(link, None)

    def is_still_shown(self, found: os.stat_result, path: str) -> bool:
        """Tells whether a link in the watched directory leads to what the target has at a path. Where the target has
        a file under several names, a link that leads to another one of them does not count."""
        links = list(self._links(found.st_ino))
        return any(
            status.st_nlink > 1 and (len(links) == 1 or not _leads_to_another(anchor, path, found))
            for anchor, status in links
        )

    def inode_shown_by(self, link: os.stat_result) -> int | None:
        """Returns the inode of the target's file for which a local link stands; None for a link of the program's."""
        with self._lock:
            return self._known().get(link.st_ino)

    @property
    def is_any(self) -> bool:
        """Whether the target held anything at the start."""
        with self._lock:
            return bool(self._known())

    def prepare(self, spare: str) -> str:
        """Gives a spare link, which is about to take the place of a local one, a second name. Raises OSError."""
        second = self.second(spare)
        os.link(spare, second, follow_symlinks=False)
        return second

    def second(self, spare: str) -> str:
        """Returns the path of the second name of a spare link."""
        return f"{self.directory}/{os.path.basename(spare)}{_SPARE}"

    def follow(self, replaced: str, second: str, inode: int, *, is_other: bool = False) -> None:
        """Lets the anchor of a replaced link be that of the new one; a link without an anchor gets none. `is_other`:
        the new one stands for another inode, and gets an anchor of its own."""
        was, now = os.lstat(replaced).st_ino, os.lstat(second).st_ino
        if is_other:
            self.add(second, inode)
            self.forget(was)
            return
        with self._lock:
            for path, status in self._links(inode):
                if status.st_ino == was:
                    os.rename(second, path)
                    self._known()[now] = inode
                    if os.lstat(replaced).st_nlink == 1:  # what gets its inode next is another link
                        self._known().pop(was, None)
                    return

    def _known(self) -> dict[int, int]:
        if self._inodes is None:
            self._inodes = dict(self._listed())
        return self._inodes

    def _links(self, inode: int) -> Iterator[tuple[str, os.stat_result]]:
        for number in count():
            path = self._path(inode, number)
            status = status_of(path)
            if status is None:
                return
            yield path, status

    def _listed(self) -> Iterator[tuple[int, int]]:
        with suppress(OSError), os.scandir(self.directory) as anchors:
            for anchor in anchors:
                if not anchor.name.endswith(_SPARE):
                    yield anchor.stat(follow_symlinks=False).st_ino, int(anchor.name.partition(".")[0])

    def _path(self, inode: int, number: int) -> str:
        return f"{self.directory}/{inode}" + (f".{number}" if number else "")


def _leads_to_another(link: str, path: str, found: os.stat_result) -> bool:
    """Tells whether a link leads to the same file under another name; one that leads nowhere may stand for any."""
    leads_to = os.readlink(link)
    there = status_of(leads_to)
    return leads_to != path and there is not None and there.st_ino == found.st_ino
