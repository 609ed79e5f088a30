"""Owns the anchors: a second name, beside the watched directory, of each link to what the target held.

The rule for which they are there: a file in the target whose anchor has another name is still shown in the watched
directory, under whatever name, and is never replaced, removed or renamed onto, whatever the ledger says. The kernel
counts the names, so no event that was lost or misread can break the rule.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from hpcstage.outputs.target import status_of


def anchors_beside(scratch: str) -> str:
    """Returns the directory of the anchors, which lies beside that of the spare links."""
    return os.path.join(os.path.dirname(scratch), "anchors")


@dataclass(frozen=True)
class Anchors:
    """The anchors of one watched directory: `INODE`, then `INODE.1` … for further names of one file of the target."""

    directory: str

    def anchor(self, link: str, inode: int) -> None:
        """Gives a local link to the target's file of this inode its anchor. Raises OSError."""
        for path in self._paths(inode):
            try:
                os.link(link, path, follow_symlinks=False)
            except FileExistsError:
                continue
            return

    def is_still_shown(self, found: os.stat_result, path: str) -> bool:
        """Tells whether a link in the watched directory leads to what the target has at a path. Where the target has
        a file under several names, the text of the link says which of them is meant."""
        links = list(self._links(found.st_ino))
        return any(status.st_nlink > 1 and (len(links) == 1 or os.readlink(name) == path) for name, status in links)

    def prepare(self, spare: str) -> str:
        """Gives a spare link, which is about to take the place of a local one, a second name. Raises OSError."""
        second = f"{self.directory}/{os.path.basename(spare)}.spare"
        os.link(spare, second, follow_symlinks=False)
        return second

    def follow(self, replaced: str, second: str, inode: int) -> None:
        """Lets the anchor of a replaced link be that of the new one; a link without an anchor gets none."""
        was = os.lstat(replaced).st_ino
        for path, status in self._links(inode):
            if status.st_ino == was:
                os.rename(second, path)
                return

    def _links(self, inode: int) -> Iterator[tuple[str, os.stat_result]]:
        for path in self._paths(inode):
            status = status_of(path)
            if status is None:
                return
            yield path, status

    def _paths(self, inode: int) -> Iterator[str]:
        yield f"{self.directory}/{inode}"
        for number in count(1):
            yield f"{self.directory}/{inode}.{number}"
