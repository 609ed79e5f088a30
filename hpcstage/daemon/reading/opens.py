"""Reads what the processes of this node opened from the rings that the shim writes into `<node directory>/opens/`.

Owns the files there: finds new ones, follows each from where it was read last, deletes those of processes that have
ended, and says what a ring's bytes mean. The caller decides who learns what from the events.

How to use it (all calls come from the daemon's own thread, and none of them waits):

    page.set_logging(True)                                  # processes log from now on
    opens = Opens(node_dir / "opens", page.attached.ended, page.attached.gone)
    for event in opens.poll(finder(manifest)): ...          # every tick; poll(None) before there is a manifest
    while opens.more: ...                                   # a poll is bounded: again, in the same tick or the next
    page.set_logging(False); opens.poll(...); opens.close() # once nothing more can be learnt, and at the end

`poll` returns Opened and LostRecords, each with the number of its process: the slot, and SLOTS more for each
earlier process that had this slot. The events of one process come in the order in which they happened; those of
different processes come one process after the other within a poll, and `ns` (CLOCK_MONOTONIC, as time.monotonic_ns)
says when each happened. Opens of files that are not in the manifest are left out.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections import deque
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import NamedTuple

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.protocol.shim import (
    RECORD,
    RECORD_BYTES,
    RECORD_OPEN,
    RECORD_PAD,
    RING_DATA_BYTES,
    RING_HEADER,
    RING_HEADER_BYTES,
    RING_MAGIC,
    SLOTS,
)

_HEAD = struct.Struct("<IHBB")
_STAMPS = 1 << 32


class RingRecord(NamedTuple):
    """One record as it was written. `kind`: RECORD_OPEN, or one that this version does not know."""

    kind: int
    ns: int
    payload: bytes


class Damaged(ValueError):
    """The bytes are no record."""


class Parsed(NamedTuple):
    """The records that are complete, and how many bytes they and the padding between them took."""

    records: list[RingRecord]
    used_bytes: int


def parse(chunk: bytes, at: int) -> Parsed:
    """Returns the records of `chunk`, which holds the ring's bytes from position `at` on, laid out straight. Ends at
    the first record that is reserved and not yet complete. Raises Damaged where the bytes cannot be a record."""
    records = []
    offset, end = 0, len(chunk)
    while offset < end:
        stamp, size, kind, _ = _HEAD.unpack_from(chunk, offset)
        if stamp != (at + offset + 1) % _STAMPS:
            break
        bytes_to_end = RING_DATA_BYTES - (at + offset) % RING_DATA_BYTES
        length = bytes_to_end if kind == RECORD_PAD else _length(size)
        if length > bytes_to_end or offset + length > end:
            raise Damaged
        if kind != RECORD_PAD:
            ns = RECORD.unpack_from(chunk, offset)[4]
            begin = offset + RECORD_BYTES
            records.append(RingRecord(kind, ns, chunk[begin : begin + size]))
        offset += length
    return Parsed(records, offset)


def _length(payload_bytes: int) -> int:
    return (RECORD_BYTES + payload_bytes + 7) & ~7


def path_of(record: RingRecord) -> bytes | None:
    """Returns the path below `store/` of an OPEN record; None for any other."""
    return record.payload if record.kind == RECORD_OPEN else None


SUFFIX = ".ring"
MOST_RINGS = 1024
"""The most rings that are open, since each takes a descriptor. Further ones wait until a process has ended."""
POLL_BYTES = 1 << 20
"""The most bytes that one poll reads: about ten thousand events, some tens of milliseconds."""
HELD_EVENTS = 100_000
"""While there is no manifest, nothing more is read once this many events wait for it."""


class Opened(NamedTuple):
    """A file was opened for reading."""

    slot: int
    ns: int
    file_id: int


class LostRecords(NamedTuple):
    """Records of this process were overwritten before they were read."""

    slot: int
    lost_bytes: int


Event = Opened | LostRecords
Finder = Callable[[bytes], "int | None"]


def finder(manifest: Manifest) -> Finder:
    """Returns a function that finds the id of a path below `store/`."""
    datasets = {os.fsencode(dataset.name): index for index, dataset in enumerate(manifest.datasets)}

    def find(path: bytes) -> int | None:
        name, _, below = path.partition(b"/")
        dataset = datasets.get(name)
        return None if dataset is None else manifest.find(dataset, below)

    return find


class Opens:
    """Owns all rings of the node and the events that wait for the manifest."""

    def __init__(self, directory: Path, ended: Callable[[int], bool], gone: Container[int] = ()) -> None:
        """`ended` says whether the process of a slot has ended or is about to, `gone` holds slots whose process has."""
        self._directory = os.fspath(directory)
        self._ended = ended
        self._gone = gone
        self._rings: dict[int, Ring] = {}
        self._turn: deque[int] = deque()
        self._held: deque[tuple[int, RingRecord | int]] = deque()
        self._users: dict[int, int] = {}
        """Slot → how many processes had it before the one that has it now."""
        self.more = False
        """Whether the last poll left something because it had read enough."""

    def poll(self, find: Finder | None) -> list[Event]:
        """Returns the events that came since the last poll. Without a finder they are read and kept, up to a bound, for
        the poll that has one."""
        self._discover()
        if len(self._held) < HELD_EVENTS:
            self._read()
        if find is None:
            return []
        held, self._held = self._held, deque()
        return list(_events(held, find))

    def number(self, slot: int) -> int:
        """Returns the number of the process that has a slot now, as events tell it."""
        return slot + SLOTS * self._users.get(slot, 0)

    def is_read(self, slot: int) -> bool:
        """Returns whether everything is read that the process of a slot, which has ended, had logged."""
        return slot not in self._rings and not os.path.lexists(f"{self._directory}/{slot}{SUFFIX}")

    def renew(self, slot: int) -> None:
        """Gives events of this slot another number: another process will have it."""
        self._users[slot] = self._users.get(slot, 0) + 1

    def close(self) -> None:
        """Closes all rings and deletes them. Processes that still hold one do no harm."""
        for slot in list(self._rings):
            self._forget(slot)

    def _discover(self) -> None:
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                slot = _slot_of(name)
                if slot is None or slot in self._rings or len(self._rings) >= MOST_RINGS:
                    continue
                with contextlib.suppress(OSError):
                    self._rings[slot] = Ring(f"{self._directory}/{name}")
                    self._turn.append(slot)

    def _read(self) -> None:
        bytes_left = POLL_BYTES
        for _ in range(len(self._turn)):
            if bytes_left <= 0:
                self.more = True
                return
            slot = self._turn[0]
            self._turn.rotate(-1)
            bytes_left -= self._read_one(slot, self._rings[slot])
        self.more = False

    def _read_one(self, slot: int, ring: Ring) -> int:
        ended = self._ended(slot)  # asked before reading: what it wrote before its end is there then
        begin = ring.tail
        try:
            records, lost = ring.read()
        except OSError:
            self._forget(slot)
            return 0
        if lost:
            self._held.append((self.number(slot), lost))
        self._held.extend((self.number(slot), record) for record in records)
        if ended and not lost and (not records or (ring.is_read and slot in self._gone)):
            self._forget(slot)
        return max(0, ring.tail - begin)

    def _forget(self, slot: int) -> None:
        self._rings.pop(slot).close()
        self._turn.remove(slot)
        with contextlib.suppress(OSError):
            os.unlink(f"{self._directory}/{slot}{SUFFIX}")


class Ring:
    """One file, and how far it was read. It is read, not mapped: a process that maps a file which is then cut short
    dies."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        self.tail = 0
        self.is_read = False
        """Whether the last read left nothing."""

    def read(self) -> tuple[list[RingRecord], int]:
        """Returns the records that came since the last call, and how many bytes were lost before them."""
        head = self._head()
        self.is_read = False
        if head == self.tail:
            return [], 0
        if head - self.tail > RING_DATA_BYTES or head < self.tail:
            return [], self._skip(head)
        chunk = self._bytes(self.tail, head)
        now = self._head()
        if now - self.tail > RING_DATA_BYTES or len(chunk) != head - self.tail:
            return [], self._skip(now)  # the chunk may have been overwritten while it was read
        try:
            records, used = parse(chunk, self.tail)
        except Damaged:
            return [], self._skip(now)
        self.tail += used
        self.is_read = self.tail == head
        return records, 0

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _head(self) -> int:
        header = os.pread(self._fd, RING_HEADER.size, 0)
        if len(header) < RING_HEADER.size:
            return self.tail
        magic, head, data_bytes, _ = RING_HEADER.unpack(header)
        return int(head) if magic == RING_MAGIC and data_bytes == RING_DATA_BYTES else self.tail  # else: in the making

    def _skip(self, head: int) -> int:
        lost, self.tail = abs(head - self.tail), head
        return lost

    def _bytes(self, at: int, end: int) -> bytes:
        begin = at % RING_DATA_BYTES
        first = os.pread(self._fd, min(end - at, RING_DATA_BYTES - begin), RING_HEADER_BYTES + begin)
        rest = end - at - len(first)
        return first + os.pread(self._fd, rest, RING_HEADER_BYTES) if rest else first


def _slot_of(name: str) -> int | None:
    number, suffix = os.path.splitext(name)
    return int(number) if suffix == SUFFIX and number.isascii() and number.isdigit() else None


def _events(held: deque[tuple[int, RingRecord | int]], find: Finder) -> Iterator[Event]:
    for slot, record in held:
        if isinstance(record, int):
            yield LostRecords(slot, record)
            continue
        path = path_of(record)
        if path is not None:
            file_id = find(path)
            if file_id is not None:
                yield Opened(slot, record.ns, file_id)
