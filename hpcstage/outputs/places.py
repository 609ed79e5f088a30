"""Knows which directory each watch stands for, and finds what the directories hold.

Owns the watches (inotify) of a directory and of all below it, where each watched directory is, and the looks at those
in which something may have happened before their watch was set. A watch stands for an inode: where the path of a
directory gives a number that is known from another path, the directory was renamed.
"""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hpcstage import inotify
from hpcstage.inotify import EventQueue
from hpcstage.outputs.facts import SeenEvent, SeenKind

MASK = (
    inotify.ATTRIB
    | inotify.CLOSE_WRITE
    | inotify.CLOSE_NOWRITE
    | inotify.CREATE
    | inotify.OPEN
    | inotify.MOVED_FROM
    | inotify.MOVED_TO
    | inotify.DELETE
    | inotify.ONLYDIR
    | inotify.DONT_FOLLOW
    | inotify.EXCL_UNLINK
)
SCAN_S = 0.01
"""The time that one call looks at directories, so that the caller's loop goes on."""
UNWATCHED_S = 10.0


@dataclass(eq=False)
class Place:
    """A watched directory, and where it is; without a parent its place is not known."""

    number: int
    parent: Place | None = None
    name: str = ""
    children: dict[str, Place] = field(default_factory=dict)

    def leave(self) -> None:
        """Takes the directory from its place."""
        if self.parent is not None and self.parent.children.get(self.name) is self:
            del self.parent.children[self.name]
        self.parent = None

    def enter(self, parent: Place, name: str) -> None:
        """Puts the directory into a place; another one that was there has none then."""
        self.leave()
        other = parent.children.get(name)
        if other is not None:
            other.leave()
        self.parent, self.name = parent, name
        parent.children[name] = self


class Places:
    """Owns the watched directories."""

    def __init__(self, root: str, queue: EventQueue, will_be_told: Callable[[Place], bool]) -> None:
        """`will_be_told` says of a directory that was found elsewhere whether its rename is still to be told. Raises
        OSError where the root cannot be watched."""
        self._path = root
        self._queue = queue
        self._will_be_told = will_be_told
        self.root = Place(queue.add(os.fsencode(root), MASK | inotify.SELF))
        self._by_number = {self.root.number: self.root}
        self._looks: deque[Place] = deque([self.root])
        self.unwatched: dict[str, str] = {}
        """By name: why a directory is not watched. It is looked at now and then, and no removal below it is seen."""
        self._next_unwatched = 0.0

    def of(self, number: int) -> Place | None:
        """Returns the place of a watch's number."""
        return self._by_number.get(number)

    def name(self, place: Place | None, last: str = "") -> str | None:
        """Returns the name of an entry of a directory; None if the directory's place is not known."""
        parts = [last] if last else []
        while place is not self.root:
            if place is None:
                return None
            parts.append(place.name)
            place = place.parent
        return "/".join(reversed(parts))

    def name_of(self, number: int, last: str) -> str | None:
        """Returns the name of an entry of the directory for which a watch's number stands."""
        place = self.of(number)
        return None if place is None else self.name(place, last)

    def are_exchanged(self, *moved: tuple[Place | None, str]) -> bool:
        """Tells whether a rename that was followed by its reverse was an exchange. Directories tell by where they are
        now. Of two files it is taken for one if both names are there; a mistake costs copies and renames only."""
        known = [(place, at) for place, at in moved if place is not None]
        if known:
            return any(self.is_at(place, at) for place, at in known)
        return all(self.exists(at) for _, at in moved)

    def is_at(self, place: Place, name: str) -> bool:
        """Tells whether a watched directory has a name now."""
        try:
            return self._queue.add(os.fsencode(f"{self._path}/{name}"), MASK) == place.number
        except OSError:
            return False

    def is_root_there(self) -> bool:
        """Tells whether the path of the root leads to the directory that is watched. An inode's number does not tell:
        a directory that is made anew may get it again."""
        try:
            number = self._queue.add(os.fsencode(self._path), MASK | inotify.SELF)
        except OSError as error:
            return error.errno == errno.EACCES
        if number != self.root.number:
            self._queue.remove(number)
        return number == self.root.number

    def exists(self, name: str) -> bool:
        """Tells whether there is an entry of a name now."""
        return os.path.lexists(f"{self._path}/{name}")

    def adopt(self, parent: Place, name: str, *, always: bool = False) -> str | None:
        """Watches what is under a name now, if it is a directory, and has it looked at if it is new there. Returns the
        name under which it was known before, if it was. One whose rename is still to be told waits for that."""
        full = self.name(parent, name)
        try:
            number = self._queue.add(os.fsencode(f"{self._path}/{full}"), MASK)
        except OSError as error:
            if full is not None and error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                limit = "the limit of this user's watches: fs.inotify.max_user_watches"
                self.unwatched[full] = limit if error.errno == errno.ENOSPC else str(error.strerror)
            return None
        place = self._by_number.setdefault(number, Place(number))
        if place is self.root:
            return None
        before = None if place.parent is None else self.name(place)
        if before == full:
            before = None
        elif before is not None and self._will_be_told(place):
            return None
        if always or place.parent is not parent or place.name != name:
            place.enter(parent, name)
            self._looks.append(place)
        return before

    def end(self, place: Place) -> None:
        """Forgets a directory that the kernel watches no more."""
        self._by_number.pop(place.number, None)
        place.leave()

    def unwatch(self, place: Place) -> None:
        """Ends the watches of a directory and of all below it."""
        below = [place]
        while below:
            one = below.pop()
            below += one.children.values()
            self._by_number.pop(one.number, None)
            self._queue.remove(one.number)

    def look_at_all(self) -> None:
        """Has all directories looked at again."""
        self._looks = deque([self.root])

    @property
    def is_looking(self) -> bool:
        """Whether there are directories to look at."""
        return bool(self._looks)

    def look(self, now: float) -> list[SeenEvent]:
        """Returns what is found in directories, as far as there is time for it."""
        found: list[SeenEvent] = []
        end = time.monotonic() + SCAN_S
        while self._looks and time.monotonic() < end:
            place = self._looks.popleft()
            name = self.name(place)
            if name is not None:
                found += self._look_at(place, name)
        if self.unwatched and now >= self._next_unwatched:
            self._next_unwatched = now + UNWATCHED_S
            found += [event for name in list(self.unwatched) for event in found_below(self._path, name)]
        return found

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `look` has something to do; None for never."""
        if self._looks:
            return 0.0
        return max(0.0, self._next_unwatched - now) if self.unwatched else None

    def _look_at(self, place: Place, name: str) -> Iterator[SeenEvent]:
        for child, is_dir in _entries(self._path, name):
            full = f"{name}/{child}" if name else child
            before = self.adopt(place, child, always=True) if is_dir else None
            if before is not None:
                yield SeenEvent(SeenKind.MOVED, before, full, is_dir=True)
            yield SeenEvent(SeenKind.FOUND, full, is_dir=is_dir)


def found_below(root: str, name: str = "", failed: dict[str, str] | None = None) -> Iterator[SeenEvent]:
    """Yields all names below a directory, the directories before what they hold. A directory that cannot be listed is
    noted in `failed`, as `NAME/` with the reason: nobody knows what it holds."""
    below = [name]
    while below:
        directory = below.pop()
        for child, is_dir in _entries(root, directory, failed):
            full = f"{directory}/{child}" if directory else child
            yield SeenEvent(SeenKind.FOUND, full, is_dir=is_dir)
            if is_dir:
                below.append(full)


def _entries(root: str, name: str, failed: dict[str, str] | None = None) -> list[tuple[str, bool]]:
    try:
        with os.scandir(f"{root}/{name}") as found:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if failed is not None:
            failed[f"{name}/" if name else ""] = f"the directory cannot be listed: {error.strerror}"
        return []
