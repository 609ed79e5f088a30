"""Makes the local directory and shows in it what DIR holds: directories as directories, all else as symbolic links.

A relative link that leads to the same place in the local directory is shown as it is, everything else as a link to
DIR. Each of these links gets a second name beside the directory. While that counts two names the link is there, under
whatever name, and what it leads to must not be replaced; and its inode is nobody else's.
"""

from __future__ import annotations

import os
import posixpath
import shutil
import stat
from collections.abc import Iterator
from typing import NamedTuple

from hpcstage.owner import time_there
from hpcstage.upload.facts import Place, Run
from hpcstage.upload.manifest import Fact, UploadManifest
from hpcstage.upload.target import TEMPORARY

MOST_ENTRIES = 100_000
LONG_AGO_S = 946_684_800
"""The first second of the year 2000."""


class CannotShow(Exception):
    """DIR cannot be shown in a local directory; the message says why. The program writes to DIR itself."""


def start(place: Place, target: str, run_id: str, node: str = "", most_entries: int = MOST_ENTRIES) -> UploadManifest:
    """Makes the local directory for a DIR, which is made if it is missing. `node` is this node's name where others
    upload to the same DIR. Raises CannotShow, after which nothing is left on the local disk."""
    path = os.path.realpath(target)
    try:
        os.makedirs(path, exist_ok=True)
        run = Run(run_id, path, os.stat(path).st_ino, time_there(path), os.uname().nodename, node, place.tree)
        found = list(_listed(path, most_entries))
    except OSError as error:
        raise CannotShow(f"{error.filename or path}: {error.strerror}") from None
    try:
        for directory in (place.base, place.tree, place.links):
            os.mkdir(directory, 0o700)
        with open(place.marker, "xb"):
            os.utime(place.marker, (LONG_AGO_S, LONG_AGO_S))
        manifest = UploadManifest(place.manifest, run)
        manifest.note(*_show(place, path, found))
    except OSError as error:
        shutil.rmtree(place.base, ignore_errors=True)
        raise CannotShow(f"{error.filename or place.base}: {error.strerror}") from None
    return manifest


def link_path(place: Place, link: int) -> str:
    """Returns the second name of a link that stands for what DIR held, by its inode."""
    return f"{place.links}/{link}"


class _Listed(NamedTuple):
    name: str
    inode: int
    text: str
    """The text of a symbolic link."""
    directory: os.stat_result | None
    """What stat says of a directory."""


def _show(place: Place, target: str, found: list[_Listed]) -> list[Fact]:
    facts: list[Fact] = []
    for name, inode, text, directory in found:
        local = f"{place.tree}/{name}"
        if directory is not None:
            os.mkdir(local, 0o700)
            facts.append(["held", name, 0, 0])
            continue
        os.symlink(text if _stays_inside(name, text) else f"{target}/{name}", local)
        link = os.lstat(local).st_ino
        os.link(local, link_path(place, link), follow_symlinks=False)
        facts.append(["held", name, inode, link])
    for name, _, _, directory in reversed(found):
        if directory is not None:
            local, mode = f"{place.tree}/{name}", stat.S_IMODE(directory.st_mode)
            os.utime(local, ns=(directory.st_atime_ns, directory.st_mtime_ns))
            os.chmod(local, mode)
            facts.append(["stamp", name, mode, directory.st_mtime_ns])
    return facts


def _listed(target: str, most: int) -> Iterator[_Listed]:
    """Yields all that lies below DIR, directories before what they hold. Of a file the listing has all that is needed,
    where it has the same inodes as lstat."""
    below, number = [""], 0
    lists_inodes: bool | None = None
    while below:
        directory = below.pop()
        with os.scandir(f"{target}/{directory}") as children:
            for child in children:
                if child.name.startswith(TEMPORARY):
                    continue
                number += 1
                if number > most:
                    raise CannotShow(f"{target} has more than {most:,} entries")
                name = posixpath.join(directory, child.name)
                if child.is_dir(follow_symlinks=False):
                    below.append(name)
                    yield _Listed(name, 0, "", child.stat(follow_symlinks=False))
                    continue
                if lists_inodes is None:
                    lists_inodes = child.inode() == os.lstat(child.path).st_ino
                inode = child.inode() if lists_inodes else os.lstat(child.path).st_ino
                yield _Listed(name, inode, os.readlink(child.path) if child.is_symlink() else "", None)


def _stays_inside(name: str, text: str) -> bool:
    """Tells whether a link's text leads to the same place in the local directory."""
    if not text or text.startswith("/"):
        return False
    return not posixpath.normpath(posixpath.join(posixpath.dirname(name), text)).startswith("..")
