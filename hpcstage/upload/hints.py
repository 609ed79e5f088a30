"""Says in which names of the local directory something happened, by the kernel's events. A name too many or too few
costs time, never a file: the scan is the truth.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator

from hpcstage.inotify import (
    ATTRIB,
    CLOSE_WRITE,
    CREATE,
    DONT_FOLLOW,
    EXCL_UNLINK,
    IGNORED,
    IS_DIR,
    MODIFY,
    MOVED_TO,
    ONLYDIR,
    OVERFLOW,
    EventQueue,
    events,
)

_MASK = ATTRIB | CLOSE_WRITE | CREATE | MODIFY | MOVED_TO | ONLYDIR | DONT_FOLLOW | EXCL_UNLINK


class Hints:
    """The events of one local directory."""

    def __init__(self, tree: str) -> None:
        """Begins to watch. Raises OSError where the user or the system has no queue left."""
        self._tree = os.fsencode(tree)
        self._queue = EventQueue()
        self._names: dict[int, str] = {}
        """The name of each watched directory, by the number of its watch."""
        self.is_complete = True
        """Whether all directories are watched, and no event was lost; reset by who has looked at everything."""
        for _ in self._watch(""):
            pass

    @property
    def fd(self) -> int:
        """The descriptor to watch for reading."""
        return self._queue.fd

    def read(self) -> set[str]:
        """Returns names in which something happened since the last time, without directories."""
        found: set[str] = set()
        for number, mask, _, child in events(self._queue.read()):
            if mask & OVERFLOW:
                self.is_complete = False
            elif mask & IGNORED:
                self._names.pop(number, None)
            elif child and (directory := self._names.get(number)) is not None:
                name = posixpath.join(directory, os.fsdecode(child))
                if not mask & IS_DIR:
                    found.add(name)
                elif mask & (CREATE | MOVED_TO):
                    found.update(self._watch(name))
        return found

    def watch_all(self) -> None:
        """Watches what is not watched yet, before everything is looked at."""
        self.is_complete = True
        for _ in self._watch(""):
            pass

    def close(self) -> None:
        """Ends the watches."""
        self._queue.close()

    def _watch(self, directory: str) -> Iterator[str]:
        """Watches a directory and those below it, and yields the names of what else they hold."""
        below = [directory]
        while below:
            name = below.pop()
            path = b"%s/%s" % (self._tree, os.fsencode(name))
            try:
                self._names[self._queue.add(path, _MASK)] = name
                with os.scandir(path) as children:
                    for child in children:
                        inside = posixpath.join(name, os.fsdecode(child.name))
                        if child.is_dir(follow_symlinks=False):
                            below.append(inside)
                        else:
                            yield inside
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:
                self.is_complete = False
