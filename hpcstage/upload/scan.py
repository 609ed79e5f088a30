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
from hpcstage.upload.manifest import Manifest
from hpcstage.upload.target import TEMPORARY

_SPECIAL = ((stat.S_ISFIFO, "FIFO"), (stat.S_ISSOCK, "socket"), (stat.S_ISCHR, "device"), (stat.S_ISBLK, "device"))


@dataclass
class Scan:
    """What a look found."""

    names: set[str] = field(default_factory=set)
    """All that are there."""
    directories: dict[str, os.stat_result] = field(default_factory=dict)
    changed: dict[str, os.stat_result] = field(default_factory=dict)
    """Files and symbolic links that are not what was copied."""
    unsealed: dict[str, os.stat_result] = field(default_factory=dict)
    """Files that look as they were copied, which proves nothing."""
    moved: dict[str, str] = field(default_factory=dict)
    """New names of links that stand for what DIR held, by their places."""
    skipped: dict[str, str] = field(default_factory=dict)
    """What is never uploaded, and what it is."""
    left: list[Leftover] = field(default_factory=list)
    """Directories that cannot be looked at."""


def scan(tree: str, manifest: Manifest) -> Scan:
    """Looks at everything."""
    found = Scan()
    place_of = {held.link: place for place, held in manifest.held.items() if held.link}
    moved: dict[str, list[str]] = {}
    for name, status in _walk(tree, found.left):
        found.names.add(name)
        if stat.S_ISDIR(status.st_mode):
            found.directories[name] = status
        elif (place := place_of.get(status.st_ino)) is not None:
            moved.setdefault(place, []).append(name)
        elif kind := next((kind for test, kind in _SPECIAL if test(status.st_mode)), None):
            found.skipped[name] = kind
        elif (put := manifest.puts.get(name)) is None or Here.of(status) != put.here:
            found.changed[name] = status
        elif not put.is_sealed:
            found.unsealed[name] = status
    found.moved = {place: names[0] for place, names in moved.items() if place not in names}
    return found


def _walk(tree: str, left: list[Leftover]) -> Iterator[tuple[str, os.stat_result]]:
    """Yields all names with what lstat says, directories before what they hold."""
    below = [""]
    while below:
        directory = below.pop()
        try:
            with os.scandir(f"{tree}/{directory}") as children:
                for child in children:
                    if child.name.startswith(TEMPORARY):
                        continue
                    name = posixpath.join(directory, child.name)
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
