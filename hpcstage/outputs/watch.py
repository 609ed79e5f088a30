"""Watches a directory with all that is below it, and tells in order what happens to its names.

Owns the watches (inotify), which directory each stands for, and the files that are looked at because a program has them
open: the kernel tells of a write only if asked for each of them, and a program that writes small pieces makes a hundred
thousand in a second; a look at size and time each second tells enough. It knows nothing of a target.

A watch stands for an inode. A directory's place is set when its name was seen to be made or moved, by watching the path
again: the number tells which directory is there now. What was made below before the watch was set is found by a look
at the directory afterwards. Where the kernel lost events, all that is left of them is thrown away, and all directories
are looked at again.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

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
PAIR_S = 0.5
"""The second event of a rename comes this soon after the first, or the name was moved out of the directory."""
SCAN_S = 0.01
"""The time that one call looks at directories, so that the caller's loop goes on."""
LOOK_S = 1.0
MOST_LOOKS = 500
"""The files that one look takes in; the others have their turn at the next ones."""
FORGET_S = 120.0
"""A file is looked at for so long after its last change, if it was closed."""
UNWATCHED_S = 10.0
_ROOT_ENDS = inotify.SELF | inotify.UNMOUNT | inotify.IGNORED


class _Raw(NamedTuple):
    number: int
    mask: int
    cookie: int
    name: str
    came_at: float


@dataclass(eq=False)
class _Place:
    """A watched directory, and where it is; without a parent its place is not known."""

    number: int
    parent: _Place | None = None
    name: str = ""
    children: dict[str, _Place] = field(default_factory=dict)

    def leave(self) -> None:
        """Takes the directory from its place."""
        if self.parent is not None and self.parent.children.get(self.name) is self:
            del self.parent.children[self.name]
        self.parent = None

    def enter(self, parent: _Place, name: str) -> None:
        """Puts the directory into a place; another one that was there has none then."""
        self.leave()
        other = parent.children.get(name)
        if other is not None:
            other.leave()
        self.parent, self.name = parent, name
        parent.children[name] = self


class TreeWatch:
    """Owns the watches of a directory and its subdirectories."""

    def __init__(self, root: str, scratch: str) -> None:
        """Watches all directories that are there now; what they hold is not told. Names that are moved from or to
        `scratch` are moved by hpcstage itself. Raises OSError."""
        self._root_path = root
        self._queue = EventQueue()
        try:
            self._root = _Place(self._queue.add(os.fsencode(root), MASK | inotify.SELF))
            self._scratch = self._queue.add(os.fsencode(scratch), inotify.MOVED_FROM | inotify.MOVED_TO)
        except OSError:
            self._queue.close()
            raise
        self._places = {self._root.number: self._root}
        self._raw: deque[_Raw] = deque()
        self._scans: deque[_Place] = deque([self._root])
        self._open = _OpenFiles(root)
        self.is_gone = False
        self.unwatched: dict[str, str] = {}
        """By name: why a directory is not watched. It is looked at now and then, and no removal below it is seen."""
        self._next_unwatched = 0.0
        self.overflows = 0
        while self._scans:
            self._scanned()

    @property
    def fd(self) -> int:
        """The descriptor that is ready when something happened."""
        return self._queue.fd

    def close(self) -> None:
        """Ends all watches."""
        self._queue.close()

    def is_idle(self) -> bool:
        """Tells whether all that had happened at the last `read` was told."""
        return self.is_gone or not (self._raw or self._scans)

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `read` has something to do without an event; None for never."""
        if self.is_gone:
            return None
        if self._scans:
            return 0.0
        waits = [self._raw[0].came_at + PAIR_S - now] if self._raw else []
        if self._open:
            waits.append(self._open.next_look - now)
        if self.unwatched:
            waits.append(self._next_unwatched - now)
        return max(0.0, min(waits)) if waits else None

    def read(self, now: float) -> list[SeenEvent]:
        """Returns what happened, in order. A part of it may come with a later call, as `wake_after` says."""
        if self.is_gone:
            return []
        while data := self._queue.read():
            for number, mask, cookie, name in inotify.events(data):
                self._raw.append(_Raw(number, mask, cookie, os.fsdecode(name), now))
        if any(raw.mask & inotify.OVERFLOW for raw in self._raw):
            self._raw.clear()
            self.overflows += 1
            self._scans = deque([self._root])
            return [SeenEvent(SeenKind.MISSED)]
        seen = list(self._told(now))
        if not self.is_gone:
            seen += self._scanned()
            seen += self._open.look(now)
            seen += self._look_at_unwatched(now)
        return seen

    # ---- events

    def _told(self, now: float) -> Iterator[SeenEvent]:
        while self._raw:
            raw = self._raw[0]
            partner = None
            if raw.mask & inotify.MOVED_FROM:
                partner = next((r for r in self._raw if r.mask & inotify.MOVED_TO and r.cookie == raw.cookie), None)
                if partner is None and now - raw.came_at < PAIR_S:
                    return
            self._raw.popleft()
            if partner is not None:
                self._raw.remove(partner)
                yield from self._renamed(raw, partner)
            else:
                yield from self._event(raw)
            if self.is_gone:
                return

    def _event(self, raw: _Raw) -> Iterator[SeenEvent]:
        mask = raw.mask
        place = self._places.get(raw.number)
        if place is self._root and mask & _ROOT_ENDS and not raw.name:
            self.is_gone = True
            yield SeenEvent(SeenKind.GONE)
            return
        if place is not None and mask & inotify.IGNORED:
            del self._places[raw.number]
            place.leave()
        if place is None or not raw.name:
            return
        name = self._name(place, raw.name)
        if name is None:
            return
        is_dir = bool(mask & inotify.IS_DIR)
        if mask & (inotify.CREATE | inotify.MOVED_TO):
            yield from self._made(place, raw, name, is_dir)
        elif mask & (inotify.DELETE | inotify.MOVED_FROM):
            yield from self._removed(place, raw, name, is_dir)
        elif mask & inotify.CLOSE_WRITE:
            self._open.closed(name, raw.came_at, was_writing=True)
            yield SeenEvent(SeenKind.CLOSED, name)
        elif mask & (inotify.OPEN | inotify.CLOSE_NOWRITE):
            if not is_dir:
                self._opened(name, raw)
        elif mask & inotify.ATTRIB:
            yield SeenEvent(SeenKind.ATTRIBUTES, name, is_dir=is_dir)

    def _opened(self, name: str, raw: _Raw) -> None:
        if raw.mask & inotify.OPEN:
            self._open.opened(name, raw.came_at)
        else:
            self._open.closed(name, raw.came_at, was_writing=False)

    def _made(self, place: _Place, raw: _Raw, name: str, is_dir: bool) -> Iterator[SeenEvent]:
        yield SeenEvent(SeenKind.MADE, name, is_dir=is_dir)
        if is_dir:
            self._adopt(place, raw.name)
        elif raw.mask & inotify.MOVED_TO:
            yield SeenEvent(SeenKind.CLOSED, name)
        else:
            self._open.opened(name, raw.came_at, is_made=True)

    def _removed(self, place: _Place, raw: _Raw, name: str, is_dir: bool) -> Iterator[SeenEvent]:
        moved = bool(raw.mask & inotify.MOVED_FROM)
        child = place.children.get(raw.name) if is_dir else None
        if child is not None:
            child.leave()
            if moved:
                self._unwatch(child)
        if moved and self._exists(name):
            yield SeenEvent(SeenKind.FOUND, name)  # something else has the name: its content replaces the target's
        else:
            yield SeenEvent(SeenKind.MOVED_AWAY if moved else SeenKind.REMOVED, name, is_dir=is_dir)

    def _renamed(self, source: _Raw, target: _Raw) -> Iterator[SeenEvent]:
        old_place, new_place = self._places.get(source.number), self._places.get(target.number)
        old = None if old_place is None else self._name(old_place, source.name)
        new = None if new_place is None else self._name(new_place, target.name)
        is_dir = bool(source.mask & inotify.IS_DIR)
        if self._scratch in {source.number, target.number}:
            found = old if old is not None else new
            yield from () if found is None else (SeenEvent(SeenKind.FOUND, found),)
            return
        if old_place is None or old is None:
            yield from self._event(target)
            return
        if new_place is None or new is None:
            yield SeenEvent(SeenKind.MOVED_AWAY, old, is_dir=is_dir)
            return
        child = old_place.children.get(source.name) if is_dir else None
        yield from self._exchanged(old, new, is_dir)
        if child is not None:
            child.enter(new_place, target.name)
        self._open.renamed(old, new)
        if is_dir:
            self._adopt(new_place, target.name, always=True)

    def _exchanged(self, old: str, new: str, is_dir: bool) -> Iterator[SeenEvent]:
        """Yields the rename; an exchange of two names, which the kernel reports as two renames, is told as three."""
        back = self._raw[0] if self._raw else None
        if back is not None and back.mask & inotify.MOVED_FROM and self._path_of(back) == new:
            forth = next((r for r in self._raw if r.mask & inotify.MOVED_TO and r.cookie == back.cookie), None)
            other_is_dir = bool(back.mask & inotify.IS_DIR)
            if is_dir or other_is_dir:
                self._scans.append(self._root)
            if forth is not None and self._path_of(forth) == old and self._exists(old) and self._exists(new):
                aside = f"{old}.exchanged-{os.urandom(4).hex()}"
                self._raw.popleft()
                self._raw.remove(forth)
                yield SeenEvent(SeenKind.MOVED, old, aside, is_dir)
                yield SeenEvent(SeenKind.MOVED, new, old, other_is_dir)
                yield SeenEvent(SeenKind.MOVED, aside, new, is_dir)
                return
        yield SeenEvent(SeenKind.MOVED, old, new, is_dir)

    def _path_of(self, raw: _Raw) -> str | None:
        place = self._places.get(raw.number)
        return None if place is None else self._name(place, raw.name)

    def _exists(self, name: str) -> bool:
        return os.path.lexists(f"{self._root_path}/{name}")

    # ---- places

    def _name(self, place: _Place, last: str = "") -> str | None:
        """Returns the name of an entry of a directory; None if the directory's place is not known."""
        parts = [last] if last else []
        here: _Place | None = place
        while here is not self._root:
            if here is None:
                return None
            parts.append(here.name)
            here = here.parent
        return "/".join(reversed(parts))

    def _adopt(self, parent: _Place, name: str, *, always: bool = False) -> None:
        """Watches what is under a name now, if it is a directory, and has it looked at if it is new there."""
        full = self._name(parent, name)
        try:
            number = self._queue.add(os.fsencode(f"{self._root_path}/{full}"), MASK)
        except OSError as error:
            if full is not None and error.errno not in {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}:
                limit = "the limit of this user's watches: fs.inotify.max_user_watches"
                self.unwatched[full] = limit if error.errno == errno.ENOSPC else str(error.strerror)
            return
        place = self._places.get(number)
        if place is self._root:
            return
        if place is None:
            place = self._places[number] = _Place(number)
        if always or place.parent is not parent or place.name != name:
            place.enter(parent, name)
            self._scans.append(place)

    def _unwatch(self, place: _Place) -> None:
        below = [place]
        while below:
            one = below.pop()
            below += one.children.values()
            self._places.pop(one.number, None)
            self._queue.remove(one.number)

    # ---- looks

    def _scanned(self) -> list[SeenEvent]:
        found: list[SeenEvent] = []
        end = time.monotonic() + SCAN_S
        while self._scans and time.monotonic() < end:
            place = self._scans.popleft()
            name = self._name(place)
            if name is not None:
                found += self._scan(place, name)
        return found

    def _scan(self, place: _Place, name: str) -> list[SeenEvent]:
        found = []
        for child, is_dir in _entries(self._root_path, name):
            found.append(SeenEvent(SeenKind.FOUND, f"{name}/{child}" if name else child, is_dir=is_dir))
            if is_dir:
                self._adopt(place, child, always=True)
        return found

    def _look_at_unwatched(self, now: float) -> list[SeenEvent]:
        if not self.unwatched or now < self._next_unwatched:
            return []
        self._next_unwatched = now + UNWATCHED_S
        return [event for name in list(self.unwatched) for event in found_below(self._root_path, name)]


class _OpenFiles:
    """Owns the files that are looked at because a program opened them."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._files: dict[str, _OpenFile] = {}
        self.next_look = 0.0

    def __bool__(self) -> bool:
        return bool(self._files)

    def opened(self, name: str, now: float, *, is_made: bool = False) -> None:
        """Looks at a file from here on."""
        file = self._files.setdefault(name, _OpenFile(now))
        file.changed_at, file.is_closed = now, False
        if is_made:
            file.state = (0, 0, 0)
        self.next_look = max(self.next_look, now + LOOK_S / 2) if len(self._files) == 1 else self.next_look

    def closed(self, name: str, now: float, *, was_writing: bool) -> None:
        """Notes that a descriptor was closed; there may be others. The end of reading says nothing of a file that is
        written to."""
        file = self._files.get(name)
        if file is not None and (was_writing or not file.has_changed):
            file.is_closed, file.has_changed = True, False
            file.changed_at = now

    def renamed(self, old: str, new: str) -> None:
        """Follows a file; one in a directory that was renamed is found when it is opened again."""
        if old in self._files:
            self._files[new] = self._files.pop(old)

    def look(self, now: float) -> Iterator[SeenEvent]:
        """Yields the files that were written to since the last look."""
        if now < self.next_look or not self._files:
            return
        self.next_look = now + LOOK_S
        for name in list(self._files)[:MOST_LOOKS]:
            file = self._files.pop(name)
            try:
                status = os.lstat(f"{self._root}/{name}")
            except OSError:
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            state = (status.st_ino, status.st_size, status.st_mtime_ns)
            if state != file.state:
                is_written = file.state is not None and not file.is_closed and status.st_nlink == 1
                if status.st_size or is_written:
                    yield SeenEvent(SeenKind.WRITTEN if is_written else SeenKind.FOUND, name)
                file.has_changed = is_written
                file.state, file.changed_at = state, now
            if not file.is_closed or now - file.changed_at < FORGET_S:
                self._files[name] = file


@dataclass
class _OpenFile:
    changed_at: float
    state: tuple[int, int, int] | None = None
    is_closed: bool = False
    has_changed: bool = False


def found_below(root: str, name: str = "") -> Iterator[SeenEvent]:
    """Yields all names below a directory, the directories before what they hold."""
    below = [name]
    while below:
        directory = below.pop()
        for child, is_dir in _entries(root, directory):
            full = f"{directory}/{child}" if directory else child
            yield SeenEvent(SeenKind.FOUND, full, is_dir=is_dir)
            if is_dir:
                below.append(full)


def _entries(root: str, name: str) -> list[tuple[str, bool]]:
    try:
        with os.scandir(f"{root}/{name}") as found:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    except OSError:
        return []
