"""Knows the state of every id: how far its copy is, which node reads the file from the source, who keeps it; and the
transfers in flight. Pure.

Owns a byte for each id and the counts of its values, the sizes of the files, and why nothing more is admitted. An id
that this node keeps ends in exactly one of STORED, FAILED, VOID and REFUSED, and its copy is never evicted; a temporary
copy may go, and its id is REMOTE again. On a single node this node reads and keeps every file. A million ids cost 9 MB:
a byte of state and eight of size.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import Reason

LOOK_LIMIT = 4096
"""The most ids that one call passes over, so that a full store never holds up the event loop."""


class FileState(IntEnum):
    """The state of an id."""

    WAITING = 0
    """Its turn in the order will come."""
    PROMOTED = 1
    """A program waits for the file: it goes before the order."""
    FLYING = 2
    """The file is being copied, from the source or from another node."""
    STORED = 3
    """The copy is in the store."""
    FAILED = 4
    """The file could not be copied."""
    VOID = 5
    """A program wrote to the file: it is never copied again."""
    REFUSED = 6
    """There was no budget for the file, or nothing more was admitted when its turn came."""
    REMOTE = 7
    """Another node keeps the file; it comes here when a program asks for it."""


FINAL = frozenset({FileState.STORED, FileState.FAILED, FileState.VOID, FileState.REFUSED})
FROM_PEER, PASSING = 8, 16
"""Bits of an id's byte above its state: another node reads the file from the source; this node does not keep it."""
SOURCE_WAITS, PEER_WAITS, PEER_REMOTE = (
    int(FileState.WAITING),
    FROM_PEER | FileState.WAITING,
    FROM_PEER | FileState.REMOTE,
)
"""Bytes, PASSING aside: of an id that this node reads next, of one that it asks another node for, and of one that it
may ask another node for ahead of the program."""
_STATE, READER = 7, 15
"""Masks of a byte: the state alone, and the state with FROM_PEER."""
_PROMOTED = int(FileState.PROMOTED)
_STATES = tuple(FileState(cell & _STATE) for cell in range(32))


def _table(change: Callable[[FileState, bool], FileState]) -> bytes:
    """Returns the table that gives ids another state by their state and by whether this node keeps the file."""
    return bytes(cell & ~_STATE | change(FileState(cell & _STATE), not cell & PASSING) for cell in range(256))


_ALONE = bytes(cell & _STATE for cell in range(256))
_VOIDED = _table(lambda _, __: FileState.VOID)
_CLOSED = _table(lambda state, _: FileState.REFUSED if state <= FileState.PROMOTED else state)
_KEPT = {FileState.WAITING: FileState.WAITING, FileState.REMOTE: FileState.WAITING}
_DIVIDED = _table(lambda state, keeps: (_KEPT if keeps else dict.fromkeys(_KEPT, FileState.REMOTE)).get(state, state))


@dataclass(frozen=True)
class NodeShare:
    """A node's part of the files."""

    own: Sequence[int]
    """The ids that this node reads from the source."""
    others: Sequence[int] = ()
    """With `temporary`: the ids that it keeps of the rest. Without `temporary` it keeps everything."""
    unplaced: Sequence[int] = ()
    """The ids that no node keeps."""
    temporary: Budget | None = None
    """The budget for copies that it does not keep; None: it keeps everything."""


class States:
    """Owns the states, the counts and the sizes. Every call is O(1), but for those that take many ids."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.cells = bytearray(len(sizes))
        """By id: the state, FROM_PEER and PASSING."""
        self.closed = Reason.NONE
        """Why nothing more is admitted; NONE while files are."""
        self._refused_before = 0
        """The number of ids that were refused when nothing more was admitted."""
        self.promoted_bytes = 0
        self._sizes = sizes
        self._counts = [len(sizes), *(0 for _ in _STATES[1:])]

    def of(self, id_: int) -> FileState:
        """Returns the state of an id."""
        return _STATES[self.cells[id_]]

    def size(self, id_: int) -> int:
        """Returns the bytes of a file; of its copy once there is one."""
        return self._sizes[id_]

    def count(self, state: FileState) -> int:
        """Returns how many ids are in this state."""
        return sum(self._counts[state::8])

    @property
    def waiting(self) -> int:
        """The number of ids that will still be handed out."""
        return self.count(FileState.WAITING) + self.count(FileState.PROMOTED)

    @property
    def unplaced(self) -> int:
        """The number of ids for which there was no budget; those that were refused later for another reason are not
        counted."""
        return self._refused_before if self.closed else self.count(FileState.REFUSED)

    def ordered(self, *, from_peers: bool) -> int:
        """Returns how many ids wait in the order of those that this node reads, or of those that others read."""
        return self._counts[PEER_WAITS if from_peers else SOURCE_WAITS]

    def waits(self, id_: int) -> bool:
        """Returns whether an order may bring the file: from the source, or from another node ahead of the program."""
        return not self.closed and self.of(id_) in (FileState.WAITING, FileState.REMOTE)

    def is_from_peer(self, id_: int) -> bool:
        """Returns whether another node reads the file from the source."""
        return bool(self.cells[id_] & FROM_PEER)

    def keeps(self, id_: int) -> bool:
        """Returns whether this node keeps a copy; if not, a copy only passes through."""
        return not self.cells[id_] & PASSING

    # ---- changes

    def close(self, reason: Reason) -> None:
        """Ends the admission of files: those that wait are refused. Transfers in flight may finish. The first reason
        stays."""
        if not self.closed:
            self._refused_before = self.count(FileState.REFUSED)
            self.closed = reason
            self._refuse_waiting()

    def _refuse_waiting(self) -> None:
        self.promoted_bytes = 0
        self._set_all(bytes(self.cells).translate(_CLOSED))

    def move(self, id_: int, to: FileState) -> None:
        """Gives an id another state. Once nothing more is admitted, an id that would wait is refused."""
        cell = self.cells[id_]
        if to <= _PROMOTED:
            to = FileState.REFUSED if self.closed else to
            self.promoted_bytes += self._sizes[id_] if to == _PROMOTED else 0
        if cell & _STATE == _PROMOTED:
            self.promoted_bytes -= self._sizes[id_]
        moved = cell & ~_STATE | to
        self._counts[cell] -= 1
        self._counts[moved] += 1
        self.cells[id_] = moved

    def wait_again(self, id_: int) -> None:
        """Has an id that was promoted or in flight wait again; one that this node does not keep is REMOTE again."""
        self.move(id_, FileState.WAITING if self.keeps(id_) else FileState.REMOTE)

    def _set_all(self, cells: bytes) -> None:
        self.cells[:] = cells
        self._counts = [0] * len(_STATES)
        for cell, count in _counted(cells):
            self._counts[cell] = count

    def resize(self, id_: int, size_bytes: int) -> None:
        """Sets the size of a file to that of its copy."""
        if self._sizes[id_] != size_bytes:
            if not isinstance(self._sizes, array):
                self._sizes = array("Q", self._sizes)
            self._sizes[id_] = size_bytes

    def void_range(self, ids: range) -> bytes:
        """Voids a range of ids, fast enough for a million. Returns the state that each had."""
        before = bytes(self.cells[ids.start : ids.stop])
        self.cells[ids.start : ids.stop] = before.translate(_VOIDED)
        for cell, count in _counted(before):
            self._counts[cell] -= count
            self._counts[_VOIDED[cell]] += count
        states = before.translate(_ALONE)
        position = states.find(FileState.PROMOTED)
        while position >= 0:
            self.promoted_bytes -= self._sizes[ids[position]]
            position = states.find(FileState.PROMOTED, position + 1)
        return states

    def divide(self, share: NodeShare | None, begun: Iterable[int]) -> None:
        """Sets which files other nodes read and which this node keeps; None: it reads and keeps all. Files in `begun`
        are read here in any case. O(number of ids): tens of milliseconds for a million."""
        flags = bytearray(len(self.cells))
        if share is not None:
            flags = bytearray((FROM_PEER if share.temporary is None else FROM_PEER | PASSING,)) * len(self.cells)
            for ids, flag in ((share.others, FROM_PEER), (share.own, 0), (share.unplaced, PASSING)):
                for id_ in ids:
                    flags[id_] = flag
            for id_ in begun:
                flags[id_] &= ~FROM_PEER
        cells = int.from_bytes(self.cells.translate(_ALONE), "little") | int.from_bytes(flags, "little")
        self._set_all(cells.to_bytes(len(self.cells), "little").translate(_DIVIDED))
        for id_ in () if share is None else share.unplaced:
            if self.of(id_) is FileState.REMOTE:
                self.move(id_, FileState.REFUSED)
        if self.closed:
            self._refuse_waiting()

    def fetch_here(self, id_: int) -> None:
        """Has this node read a file from the source."""
        cell = self.cells[id_]
        self._counts[cell] -= 1
        self._counts[cell & ~FROM_PEER] += 1
        self.cells[id_] = cell & ~FROM_PEER


class Flights:
    """The transfers in flight, from the source and from other nodes."""

    def __init__(self, states: States) -> None:
        self.started: dict[int, float] = {}
        """By id: the time at which the transfer began."""
        self.asked: dict[int, bool] = {}
        """By id in flight that another node was asked for: whether a program waited for it then."""
        self._states = states

    def needed(self) -> list[int]:
        """Returns the transfers whose copies are still of use."""
        return [id_ for id_ in self.started if self._states.of(id_) is FileState.FLYING]

    def took_s(self, id_: int, now: float) -> float:
        """Returns the seconds since a transfer began."""
        return now - self.started[id_]


def _counted(cells: bytes) -> list[tuple[int, int]]:
    """Returns the values among the bytes and how often each occurs; there are few values."""
    found = []
    while cells:
        rest = cells.translate(None, cells[:1])
        found.append((cells[0], len(cells) - len(rest)))
        cells = rest
    return found
