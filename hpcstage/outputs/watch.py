"""Watches a directory with all that is below it, and tells in order what happens to its names.

Owns the order of the kernel's events (inotify), and the files that are looked at because a program has them open: the
kernel tells of a write only if asked for each of them, and a program that writes small pieces makes a hundred thousand
in a second; a look at size and time each second tells enough. It knows nothing of a target.

A directory's place is set when its name was seen to be made or moved, by watching the path again: the number tells
which directory is there now. What was made below before the watch was set is found by a look at the directory
afterwards. Where the kernel lost events, all that is left of them is thrown away, and all directories are looked at
again.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from hpcstage import inotify
from hpcstage.inotify import EventQueue
from hpcstage.leases import is_written
from hpcstage.outputs.contents import open_for_reading
from hpcstage.outputs.facts import SeenEvent, SeenKind
from hpcstage.outputs.places import Place, Places

PAIR_S = 0.5
"""The second event of a rename comes this soon after the first, or the name was moved out of the directory."""
LOOK_S = 1.0
MOST_LOOKS = 500
"""The files that one look takes in; the others have their turn at the next ones."""
FORGET_S = 120.0
"""A file is looked at for so long after its last change, if it was closed."""
_ROOT_ENDS = inotify.SELF | inotify.UNMOUNT | inotify.IGNORED


class _Raw(NamedTuple):
    number: int
    mask: int
    cookie: int
    name: str
    came_at: float


class TreeWatch:
    """Owns the watches of a directory and its subdirectories."""

    def __init__(self, root: str, scratch: str) -> None:
        """Watches all directories that are there now; what they hold is not told. Names that are moved from or to
        `scratch` are moved by hpcstage itself. Raises OSError."""
        self._queue = EventQueue()
        try:
            self._places = Places(root, self._queue, self._will_be_told)
            self._scratch = self._queue.add(os.fsencode(scratch), inotify.MOVED_FROM | inotify.MOVED_TO)
        except OSError:
            self._queue.close()
            raise
        self._raw: deque[_Raw] = deque()
        self._open = _OpenFiles(root)
        self.unwatched = self._places.unwatched
        """By name: why a directory is not watched."""
        self.is_gone = False
        self.overflows = 0
        while self._places.is_looking:
            self._places.look(0.0)

    @property
    def fd(self) -> int:
        """The descriptor that is ready when something happened."""
        return self._queue.fd

    def close(self) -> None:
        """Ends all watches."""
        self._queue.close()

    def is_idle(self) -> bool:
        """Tells whether all that had happened at the last `read` was told."""
        return self.is_gone or not (self._raw or self._places.is_looking)

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `read` has something to do without an event; None for never."""
        if self.is_gone:
            return None
        waits = [self._places.wake_after(now)]
        if self._raw:
            waits.append(max(0.0, self._raw[0].came_at + PAIR_S - now))
        if self._open:
            waits.append(max(0.0, self._open.next_look - now))
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

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
            self._places.look_at_all()
            self.is_gone = not self._places.is_root_there()
            return [SeenEvent(SeenKind.MISSED), *([SeenEvent(SeenKind.GONE)] if self.is_gone else [])]
        seen = list(self._told(now))
        if not self.is_gone:
            seen += self._places.look(now)
            seen += self._open.look(now)
        return seen

    # ---- events

    def _told(self, now: float) -> Iterator[SeenEvent]:
        while self._raw:
            raw = self._raw[0]
            partner = self._partner(raw)
            if partner is None and raw.mask & inotify.MOVED_FROM and now - raw.came_at < PAIR_S:
                return
            self._raw.popleft()
            if partner is not None:
                self._raw.remove(partner)
                yield from self._renamed(raw, partner)
            else:
                yield from self._event(raw)
            if self.is_gone:
                return

    def _partner(self, raw: _Raw) -> _Raw | None:
        """Returns the event of the new name that belongs to that of the old one."""
        if not raw.mask & inotify.MOVED_FROM:
            return None
        return next((r for r in self._raw if r.mask & inotify.MOVED_TO and r.cookie == raw.cookie), None)

    def _will_be_told(self, place: Place) -> bool:
        """Tells whether a directory's rename is still to be told. Where its new directory had no watch yet, it is not:
        its one event is thrown away, since the caller has found the new name."""
        number = None if place.parent is None else place.parent.number
        raw = next((r for r in self._raw if _is_move_of(r, number, place.name)), None)
        if raw is None or self._partner(raw) is not None:
            return raw is not None
        self._raw.remove(raw)
        return False

    def _event(self, raw: _Raw) -> Iterator[SeenEvent]:
        mask = raw.mask
        place = self._places.of(raw.number)
        if place is self._places.root and mask & _ROOT_ENDS and not raw.name:
            self.is_gone = True
            yield SeenEvent(SeenKind.GONE)
            return
        if place is not None and mask & inotify.IGNORED:
            self._places.end(place)
        name = None if place is None or not raw.name else self._places.name(place, raw.name)
        if place is None or name is None:
            return
        is_dir = bool(mask & inotify.IS_DIR)
        if mask & (inotify.CREATE | inotify.MOVED_TO):
            yield from self._made(place, raw, name, is_dir)
        elif mask & (inotify.DELETE | inotify.MOVED_FROM):
            yield from self._removed(place, raw, name, is_dir)
        elif mask & inotify.CLOSE_WRITE:
            self._open.closed(name, raw.came_at, was_writing=True)
            yield SeenEvent(SeenKind.CLOSED, name)
        elif mask & inotify.OPEN and not is_dir:
            self._open.opened(name, raw.came_at)
        elif mask & inotify.CLOSE_NOWRITE and not is_dir:
            self._open.closed(name, raw.came_at, was_writing=False)
        elif mask & inotify.ATTRIB:
            yield SeenEvent(SeenKind.ATTRIBUTES, name, is_dir=is_dir)

    def _made(self, place: Place, raw: _Raw, name: str, is_dir: bool) -> Iterator[SeenEvent]:
        if is_dir:
            yield from self._adopted(place, raw.name)
        yield SeenEvent(SeenKind.MADE, name, is_dir=is_dir)
        if is_dir:
            return
        if raw.mask & inotify.MOVED_TO:
            yield SeenEvent(SeenKind.CLOSED, name)
        else:
            self._open.opened(name, raw.came_at, is_made=True)

    def _removed(self, place: Place, raw: _Raw, name: str, is_dir: bool) -> Iterator[SeenEvent]:
        moved = bool(raw.mask & inotify.MOVED_FROM)
        child = place.children.get(raw.name) if is_dir else None
        if child is not None:
            child.leave()
            if moved:
                self._places.unwatch(child)
        if moved and self._places.exists(name):
            yield SeenEvent(SeenKind.FOUND, name)  # something else has the name: its content replaces the target's
        else:
            yield SeenEvent(SeenKind.MOVED_AWAY if moved else SeenKind.REMOVED, name, is_dir=is_dir)

    def _renamed(self, source: _Raw, target: _Raw) -> Iterator[SeenEvent]:
        old_place, new_place = self._places.of(source.number), self._places.of(target.number)
        old = None if old_place is None else self._places.name(old_place, source.name)
        new = None if new_place is None else self._places.name(new_place, target.name)
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
        moved = SeenEvent(SeenKind.MOVED, old, new, is_dir)
        child = old_place.children.get(source.name) if is_dir else None
        other = new_place.children.get(target.name)
        back = self._take_reverse(moved, child, other)
        yield from (moved,) if back is None else _as_exchange(moved, bool(back.mask & inotify.IS_DIR))
        if child is not None:
            child.enter(new_place, target.name)
        if other is not None and back is not None:
            other.enter(old_place, source.name)
        self._open.renamed(old, new)
        if is_dir:
            yield from self._adopted(new_place, target.name, always=True)

    def _adopted(self, place: Place, name: str, *, always: bool = False) -> Iterator[SeenEvent]:
        """Watches a directory; yields its rename if it came from elsewhere and that is told by no event."""
        before, now = self._places.adopt(place, name, always=always), self._places.name(place, name)
        if before is not None and now is not None:
            yield SeenEvent(SeenKind.MOVED, before, now, is_dir=True)

    def _take_reverse(self, moved: SeenEvent, child: Place | None, other: Place | None) -> _Raw | None:
        """Takes the reverse of a rename if the two are an exchange, which the kernel reports as two renames."""
        back = self._raw[0] if self._raw else None
        name_of = self._places.name_of
        forth = None if back is None or name_of(back.number, back.name) != moved.new else self._partner(back)
        if back is None or forth is None or name_of(forth.number, forth.name) != moved.name:
            return None
        if moved.is_dir or back.mask & inotify.IS_DIR:
            self._places.look_at_all()
        if not self._places.are_exchanged((child, moved.new), (other, moved.name)):
            return None
        self._raw.popleft()
        self._raw.remove(forth)
        return back


def _as_exchange(moved: SeenEvent, other_is_dir: bool) -> Iterator[SeenEvent]:
    """Yields an exchange of two names as three renames."""
    aside = f"{moved.name}.exchanged-{os.urandom(4).hex()}"
    yield moved._replace(new=aside)
    yield SeenEvent(SeenKind.MOVED, moved.new, moved.name, other_is_dir)
    yield moved._replace(name=aside)


def _is_move_of(raw: _Raw, number: int | None, name: str) -> bool:
    return bool(raw.mask & inotify.MOVED_FROM) and (raw.number, raw.name) == (number, name)


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
            if was_writing:
                file.state = None  # what was written is no news: somebody may read the file at the next look

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
                is_written = file.state is not None and not file.is_closed and _may_be_written(f"{self._root}/{name}")
                if status.st_size or is_written:
                    yield SeenEvent(SeenKind.WRITTEN if is_written else SeenKind.FOUND, name)
                file.has_changed = is_written
                file.state, file.changed_at = state, now
            if not file.is_closed or now - file.changed_at < FORGET_S:
                self._files[name] = file


def _may_be_written(path: str) -> bool:
    """Tells whether a program has a file open for writing, as far as the kernel says: that a name was made, or that the
    file was opened, does not tell."""
    with suppress(OSError):
        fd = open_for_reading(path)
        try:
            return is_written(fd)
        finally:
            os.close(fd)
    return True


@dataclass
class _OpenFile:
    changed_at: float
    state: tuple[int, int, int] | None = None
    is_closed: bool = False
    has_changed: bool = False
