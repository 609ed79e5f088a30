"""Passes a file from the first node of the group to all others, down a tree in which each node has two below it.

The module owns manifest and order on their way: each piece is passed on while it is written. A node takes
pieces only from the node above it, and writes them under a temporary name; `handover` decides what is made of a whole
file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hpcstage.exchange.lane import Lanes
from hpcstage.exchange.transport.buffers import Buffer, BufferPool
from hpcstage.exchange.transport.frames import BULK_TAG, PIECE_BYTES, Bundle, BundleRow, Sort, close_bundle
from hpcstage.exchange.transport.mpi import Mail, Post

MOST_READING = 4
"""The most pieces that the first node reads ahead of passing them on."""


@dataclass(frozen=True)
class Leaf:
    """A file that has come whole. `number` is what the sender gave with it."""

    sort: Sort
    number: int
    path: str


@dataclass
class _Task:
    sort: Sort
    number: int
    path: str
    size_bytes: int
    position: int = 0
    done: bool = field(default=False)


class Spread:
    """Spreads files over the group. `position` is the place in the tree: 0 is the root, p has the parent (p - 1) //
    2."""

    def __init__(self, post: Post, lanes: Lanes, position: int, size: int) -> None:
        self._post = post
        self._lanes = lanes
        self._children = children_of(position, size)
        self._parent = (position - 1) // 2 if position else -1
        self._tasks: deque[_Task] = deque()
        self._read_ahead = 0
        self._received: dict[tuple[Sort, int], int] = {}
        self._spoilt: set[Sort] = set()
        self.whole: deque[Leaf] = deque()

    def begin(self, sort: Sort, number: int, path: str) -> None:
        """Begins to pass a file on; called at the first node."""
        size = os.stat(path).st_size
        if size and self._children:
            self._tasks.append(_Task(sort, number, path, size))

    def pump(self) -> bool:
        """Reads the next pieces at the first node. Returns whether any read was begun."""
        begun = False
        while self._tasks and self._read_ahead < MOST_READING and self._post.sends.has_some:
            task = self._tasks[0]
            self._read(task)
            task.position += PIECE_BYTES
            if task.position >= task.size_bytes:
                self._tasks.popleft()
            begun = True
        return begun

    def _read(self, task: _Task) -> None:
        buffer = self._post.sends.take(users=len(self._children))
        start, length = task.position, min(PIECE_BYTES, task.size_bytes - task.position)
        self._read_ahead += 1

        def read() -> int:
            _read_exactly(task.path, buffer.view[:length], start)
            row = BundleRow(task.number, 0, task.size_bytes, start, length, 0, 0)
            return close_bundle(buffer.view, length, [row], 0, task.sort)

        pool = self._post.sends
        self._lanes.reading.submit(read, lambda total: self._pass_on(buffer, buffer.view[:total], pool, read=True))

    def _pass_on(self, buffer: Buffer, data: memoryview, pool: BufferPool, *, read: bool = False) -> None:
        left = len(self._children)

        def ended() -> None:
            nonlocal left
            left -= 1
            if read and not left:
                self._read_ahead -= 1
            pool.give(buffer)

        for child in self._children:
            self._post.send(data, child, BULK_TAG, ended)

    def bundle(self, mail: Mail, bundle: Bundle, path: str) -> None:
        """Passes on a piece that has come, and writes it to `path`."""
        assert mail.buffer is not None
        buffer = mail.buffer
        row = bundle.rows[0] if len(bundle.rows) == 1 else None
        key = (bundle.sort, row.id if row else 0)
        if row is None or mail.source != self._parent or self._received.get(key, 0) != row.start:
            self._post.arrivals.give(buffer)
            return
        self._received[key] = row.start + row.length
        buffer.users = 1 + len(self._children)
        self._pass_on(buffer, mail.data, self._post.arrivals)
        self._lanes.writing.submit(lambda: _write(path, mail.data, row), self._then(bundle.sort, buffer, path, row))

    def _then(self, sort: Sort, buffer: Buffer, path: str, row: BundleRow) -> Callable[[bool], None]:
        def written(good: bool) -> None:
            self._post.arrivals.give(buffer)
            if not good:
                self._spoilt.add(sort)
            if row.start + row.length == row.size_bytes:
                del self._received[sort, row.id]
                if sort in self._spoilt:
                    self._spoilt.remove(sort)
                else:
                    self.whole.append(Leaf(sort, row.id, path))

        return written


def children_of(position: int, size: int) -> list[int]:
    """Returns the positions below a position in the tree of a group."""
    return [child for child in (2 * position + 1, 2 * position + 2) if child < size]


def _read_exactly(path: str, view: memoryview, start: int) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        at = 0
        while at < len(view):
            count = os.preadv(fd, [view[at:]], start + at)
            if not count:
                raise OSError(f"{path} is shorter than it was")
            at += count
    finally:
        os.close(fd)


def _write(path: str, data: memoryview, row: BundleRow) -> bool:
    """Writes a piece; the first one begins the file anew. Returns False if the disk did not take it, or the file ends
    elsewhere."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | (0 if row.start else os.O_TRUNC)
    try:
        fd = os.open(path, flags, 0o600)
        try:
            written = os.pwrite(fd, data[row.at : row.at + row.length], row.start)
            return written == row.length and os.fstat(fd).st_size == row.start + row.length
        finally:
            os.close(fd)
    except OSError:
        return False
