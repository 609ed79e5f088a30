"""Owns what this node sends: files that its daemon offered, or stripes, to the nodes that asked for them.

The module owns who is served next: each node gets one bundle in turn, and no more bundles are under way than there are
buffers. A node that does not take its bundles holds up no other for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from hpcstage.exchange.files.filereading import Filled
from hpcstage.exchange.lane import Lane
from hpcstage.exchange.transport.buffers import Buffer
from hpcstage.exchange.transport.frames import BULK_TAG, CONTROL_TAG, ControlFrame, Sort
from hpcstage.exchange.transport.mpi import Post
from hpcstage.protocol.exchange import MAX_IDS, Why
from hpcstage.store.catalog import Catalog

MOST_PER_NODE = 6
"""The most bundles for one node that are being filled or are under way."""
MOST_FILLING = 2


_Item = TypeVar("_Item")
_Given_contra = TypeVar("_Given_contra", contravariant=True)


class Queued(Protocol[_Given_contra]):
    """What is left for one node, in the order in which it was offered."""

    @property
    def has_some(self) -> bool:
        """Whether anything is left to be put into bundles."""

    def add(self, items: Sequence[_Given_contra]) -> None:
        """Takes what was offered."""

    def fill(self, buffer: Buffer, catalog: Catalog) -> Filled:
        """Fills the next bundle, in the reading thread."""

    def take_rest(self) -> list[int]:
        """Forgets what is not in bundles. Returns the ids that are refused for it."""


@dataclass
class _Lines(Generic[_Item]):
    outgoing: Queued[_Item]
    filling: int = 0
    busy: int = 0
    files: int = 0
    size_bytes: int = 0


class Sender(Generic[_Item]):
    """Sends what `queued` makes bundles of. Destinations are positions in the group."""

    def __init__(self, post: Post, lane: Lane, queued: Callable[[], Queued[_Item]]) -> None:
        self._post = post
        self._lane = lane
        self._queued = queued
        self._lines: dict[int, _Lines[_Item]] = {}
        self._turns: deque[int] = deque()
        """Destinations for which something is left."""
        self._is_stopped = False

    @property
    def has_turns(self) -> bool:
        """Whether anything is left to be sent."""
        return bool(self._turns)

    def offer(self, to: int, items: Sequence[_Item]) -> None:
        """Queues files or stripes for a node."""
        line = self._lines.get(to)
        if line is None:
            line = self._lines[to] = _Lines(self._queued())
        line.outgoing.add(items)
        if to not in self._turns:
            self._turns.append(to)

    def refuse(self, to: int, why: Why, ids: Sequence[int]) -> None:
        """Tells a node which files it does not get, and why."""
        for start in range(0, len(ids), MAX_IDS):
            message = ControlFrame(Sort.REFUSE, why=why, ids=tuple(ids[start : start + MAX_IDS]))
            self._post.send(message.pack(), to, CONTROL_TAG)

    def stop(self) -> None:
        """Begins nothing more, and refuses what was offered and is not under way."""
        self._is_stopped = True
        self._turns.clear()
        for to in self._lines:
            self._refuse_rest(to)

    def drop(self, to: int) -> None:
        """Forgets what was offered to a node."""
        if to in self._lines and not self._lines[to].filling:
            self._lines[to].outgoing.take_rest()

    def _refuse_rest(self, to: int) -> None:
        if not self._lines[to].filling:  # else the rest is the reading thread's until it has filled its bundle
            self.refuse(to, Why.ENDED, self._lines[to].outgoing.take_rest())

    def pump(self, catalog: Catalog) -> bool:
        """Starts what can be started, and returns whether anything was."""
        started = False
        for _ in range(len(self._turns)):
            if not self._post.sends.has_some:
                break
            to = self._turns.popleft()
            line = self._lines[to]
            if line.filling < MOST_FILLING and line.busy < MOST_PER_NODE and line.outgoing.has_some:
                self._fill(to, line, catalog)
                started = True
            if line.outgoing.has_some or line.filling:
                self._turns.append(to)
        return started

    def sent(self) -> list[tuple[int, int, int]]:
        """Returns destination, files and bytes that were sent since the last call."""
        found = []
        for to, line in self._lines.items():
            if line.size_bytes or line.files:
                found.append((to, line.files, line.size_bytes))
                line.files = line.size_bytes = 0
        return found

    def _fill(self, to: int, line: _Lines[_Item], catalog: Catalog) -> None:
        buffer = self._post.sends.take()
        line.filling += 1
        line.busy += 1

        def filled(result: Filled) -> None:
            line.filling -= 1
            self._filled(to, line, buffer, result)

        self._lane.submit(lambda: line.outgoing.fill(buffer, catalog), filled)

    def _filled(self, to: int, line: _Lines[_Item], buffer: Buffer, result: Filled) -> None:
        self.refuse(to, Why.LOST, result.lost)
        self.refuse(to, Why.UNKNOWN, result.unknown)
        if self._is_stopped:
            self._refuse_rest(to)
        if not result.rows:
            self._ended(line, buffer)
            return
        line.files += result.files
        line.size_bytes += sum(row.length for row in result.rows)
        self._post.send(buffer.view[: result.length], to, BULK_TAG, self._then(line, buffer))

    def _then(self, line: _Lines[_Item], buffer: Buffer) -> Callable[[], None]:
        return lambda: self._ended(line, buffer)

    def _ended(self, line: _Lines[_Item], buffer: Buffer) -> None:
        line.busy -= 1
        self._post.sends.give(buffer)
