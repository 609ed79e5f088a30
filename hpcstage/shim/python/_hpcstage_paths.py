"""Owns the path rules of the hook: is this name below a dataset, and where is its copy? They are the same as in C.

A name is taken apart from the left, and every link is replaced by what it says, until a dataset's directory is reached.
"""

from __future__ import annotations

import os
from errno import EINVAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Place = tuple[str, str]
    """A name below a dataset, as the daemon knows it, and the place of its copy in the store."""

LINKS_MAX = 40
_getcwd = os.getcwd
_readlink = os.readlink
_fspath = os.fspath
_fsdecode = os.fsdecode


class Paths:
    """The maps of this process."""

    def __init__(self, maps: list[tuple[bytes, bytes]]) -> None:
        self.roots = sorted(((_fsdecode(s), _fsdecode(d)) for s, d in maps), key=lambda m: -len(m[0]))
        """The names of the datasets, and their directories in the store."""
        self._prefixes = tuple(source + "/" for source, _ in self.roots)

    def find(self, name: Any, dir_fd: int | None = None, follows: bool = True) -> Place | None:
        """Returns where a name (str, bytes, PathLike) leads that is read; anything else leads nowhere."""
        return self._resolve(_absolute(name, dir_fd), follows)

    def changed(self, name: Any, dir_fd: int | None, follows: bool) -> set[Place]:
        """Returns what a change of a name changes: by that name, and by where links in the dataset lead."""
        text = _absolute(name, dir_fd)
        found = {self._resolve(text, follows, changes=True), self._resolve(text, follows, changes=True, inside=True)}
        return {place for place in found if place is not None}

    def source_of(self, local: str) -> str | None:
        """Returns the source of a copy, by the copy's own name."""
        for source, store in self.roots:
            if local.startswith(store + "/"):
                return source + local[len(store) :]
        return None

    def _place(self, name: str) -> Place | None:
        for source, store in self.roots:
            if name == source or name.startswith(source + "/"):
                return name, store + name[len(source) :]
        return None

    def _resolve(self, name: str, follows: bool, changes: bool = False, inside: bool = False) -> Place | None:
        """Returns where a name leads; with `inside` the links in the datasets are followed, too."""
        if not inside and name.startswith(self._prefixes) and "/." not in name and "//" not in name:
            return self._place(name)
        last = name.rpartition("/")[2]
        follows = follows or last in ("", ".")
        left = [part for part in name.split("/")[::-1] if part not in ("", ".")]
        at, links = "", 0
        while left and (inside or ".." in left or not self._place(at)):
            part, parent = left.pop(), at
            if part == "..":
                at = parent.rpartition("/")[0]
                continue
            at = parent + "/" + part
            if not left and not (follows and (changes or not at.startswith("/proc/"))):
                break  # a link to an open file means that file, whatever has its name by now
            try:
                says = _readlink(at)
            except OSError as error:
                if error.errno != EINVAL:
                    break
                continue
            links += 1
            if links > LINKS_MAX:
                return None
            at = "" if says[:1] == "/" else parent
            left.extend(part for part in says.split("/")[::-1] if part not in ("", "."))
        if ".." in left:
            return None
        return self._place("/".join([at, *left[::-1]]) + ("/" if last in ("", ".") else ""))


def _absolute(name: Any, dir_fd: int | None) -> str:
    """Returns a name from the root on; nothing for what is no name."""
    try:
        text = _fsdecode(name if type(name) is str else _fspath(name))
        if text and text[0] != "/":
            base = _getcwd() if dir_fd is None else _readlink("/proc/self/fd/%d" % dir_fd)
            text = base + "/" + text if base[:1] == "/" else ""
    except (OSError, TypeError, ValueError):
        return ""
    return "" if "\0" in text else text
