"""Compares all that lies in the local directory with the manifest: the truth, of which events are hints.

It asks the local disk only.
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from hpcstage.upload.facts import Here, Leftover
from hpcstage.upload.manifest import UploadManifest
from hpcstage.upload.target import TEMPORARY

_SPECIAL = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}


@dataclass
class Scan:
    """What a look found."""

    directories: dict[str, os.stat_result] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    """The sizes of files and symbolic links that are not what was copied."""
    unsealed: dict[str, int] = field(default_factory=dict)
    """The sizes of files that look as they were copied, which proves nothing."""
    missing: list[str] = field(default_factory=list)
    """What was copied and is not there any more."""
    moved: dict[str, str] = field(default_factory=dict)
    """New names of links that stand for what DIR held, by their places."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What is never uploaded, and what it is."""
    left: list[Leftover] = field(default_factory=list)
    """Directories that cannot be looked at."""

    def has(self, tree: str, name: str) -> bool:
        """Tells whether something has a name now, in a directory that was found: what a link leads to is elsewhere."""
        above = posixpath.dirname(name)
        return (not above or above in self.directories) and os.path.lexists(f"{tree}/{name}")


def scan(tree: str, manifest: UploadManifest) -> Scan:
    """Looks at everything."""
    found, puts = Scan(), manifest.puts
    place_of = {held.link: place for place, held in manifest.held.items() if held.link}
    moved: dict[str, list[str]] = {}
    copied = 0
    for name, status in _walk(tree, found.left):
        copied += name in puts
        if stat.S_ISDIR(status.st_mode):
            found.directories[name] = status
        elif (place := place_of.get(status.st_ino)) is not None:
            moved.setdefault(place, []).append(name)
        elif (kind := stat.S_IFMT(status.st_mode)) in _SPECIAL:
            found.skipped[name] = _SPECIAL[kind]
        elif (is_sealed := puts.is_sealed(name, Here.of(status))) is None:
            found.changed[name] = status.st_size
        elif not is_sealed:
            found.unsealed[name] = status.st_size
    found.moved = {place: names[0] for place, names in moved.items() if place not in names}
    if copied < len(puts):
        found.missing = [name for name in list(puts) if not found.has(tree, name)]
    return found


def _walk(tree: str, left: list[Leftover]) -> Iterator[tuple[str, os.stat_result]]:
    """Yields all names with what lstat says, directories before what they hold."""
    below = [""]
    while below:
        directory = below.pop()
        above = f"{directory}/" if directory else ""
        try:
            with os.scandir(f"{tree}/{directory}") as children:
                for child in children:
                    if child.name.startswith(TEMPORARY):
                        continue
                    name = above + child.name
                    try:
                        status = child.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if stat.S_ISDIR(status.st_mode):
                        below.append(name)
                    yield name, status
        except FileNotFoundError:
            continue
        except OSError as error:
            left.append(Leftover(directory, error.strerror or str(error)))
