"""Shows programs which parts of large files, whose copies are on their way, are there already.

Owns the mapping of the file `arriving`, whose layout stands in `protocol.arriving`: `Arriving` is the daemon's side,
which grants rows to transfers and takes them away, `Arrivals` and `Arrival` are a copier's side, which fills them,
`ShownRows` is the exchange's side, which passes on what has arrived. Without space on the disk the mapping is in memory
only, where no program sees it.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hpcstage.plan.types import Entry
from hpcstage.protocol.arriving import (
    ARRIVING_BYTES,
    ARRIVING_FILE,
    ARRIVING_HEADER,
    ARRIVING_HEADER_BYTES,
    ARRIVING_MAGIC,
    ARRIVING_NAME_BYTES,
    ARRIVING_READ,
    ARRIVING_ROW,
    ARRIVING_ROW_BYTES,
    ARRIVING_ROWS,
    EVICTED_OFFSET,
    GRANTED_OFFSET,
    IN_ORDER,
    IN_ORDER_NOTES,
    IN_ORDER_OFFSET,
    MOST_SHARING,
    NAME_OFFSET,
    READ_OFFSET,
    READERS_OFFSET,
    ROW_READERS,
    ROW_STRIPES,
    SHARE,
    SHARE_OFFSET,
    SHOWN_OFFSET,
    STRIPES_OFFSET,
    WISHED_OFFSET,
    YIELDS_OFFSET,
    Stripe,
    Yields,
    stripe_bytes,
)

_U32 = struct.Struct("<I")
_ID = struct.Struct("<I")
_READERS = struct.Struct(f"<{ROW_READERS}I")
_ID_OFFSET = 40
_SERIALS = (GRANTED_OFFSET, SHOWN_OFFSET)
_FENCE = threading.Lock()
_MOST_SERIALS = _MOST_EVICTIONS = (1 << 32) - 2


class BytesRead(NamedTuple):
    """The bytes of a file on its way that programs were served, and those that they read at the source meanwhile."""

    served: int = 0
    missed: int = 0


@dataclass(frozen=True)
class Share:
    """The nodes that bring a file together. Each reads its stripes at the source, and the others get these from it."""

    own: int
    """This node."""
    nodes: tuple[int, ...]
    """All of them, in the order of their numbers."""

    def reader(self, stripe: int, lost: Collection[int] = ()) -> int:
        """Returns the node that reads a stripe at the source. Those of a node that is lost are divided among the
        others."""
        node = self.nodes[stripe % len(self.nodes)]
        if node not in lost:
            return node
        others = [node for node in self.nodes if node not in lost]
        return others[stripe // len(self.nodes) % len(others)]

    def stripes(self, node: int, stripes: int) -> range:
        """Returns which of so many stripes a node reads while none is lost."""
        return range(self.nodes.index(node), stripes, len(self.nodes))

    def pack(self) -> bytes:
        """Returns the form in which it stands in a row."""
        bits = sum(1 << node for node in self.nodes)
        return SHARE.pack(self.own, len(self.nodes), bits.to_bytes(MOST_SHARING // 8, "little"))

    @classmethod
    def unpack(cls, data: bytes) -> Share | None:
        """Returns what a row says; None if no other node brings the file, too, or it makes no sense."""
        own, count, packed = SHARE.unpack(data)
        bits = int.from_bytes(packed, "little")
        nodes = tuple(node for node in range(bits.bit_length()) if bits >> node & 1)
        return cls(own, nodes) if len(nodes) == count > 1 and own in nodes else None


class Arriving:
    """The daemon's side: owns which transfer has which row."""

    def __init__(self, node_dir: Path) -> None:
        try:
            self._map = _create(node_dir / ARRIVING_FILE)
        except OSError:
            self._map = mmap.mmap(-1, ARRIVING_BYTES)
        self._rows: dict[int, int] = {}
        """By id: its row."""
        self._whole: dict[int, None] = {}
        """The ids whose copies are complete, the oldest first: their rows serve until others need them."""
        self._serial = 0

    @property
    def ids(self) -> Iterable[int]:
        """The ids that have a row."""
        return self._rows.keys()

    def grant(
        self,
        id_: int,
        first: int | None = None,
        yields: Yields = Yields.NOT,
        share: Share | None = None,
        *,
        is_divided: bool = False,
    ) -> bool:
        """Gives a transfer that is about to begin a row. Returns False if all are in use. `first` is the stripe that a
        reader is expected to need next, `share` tells with which nodes this one brings the file, or among which the
        file is divided."""
        self.ended(id_, is_stored=False)
        if len(self._rows) == ARRIVING_ROWS and self._whole:
            self.withdraw((next(iter(self._whole)),))
        free = set(range(ARRIVING_ROWS)).difference(self._rows.values())
        if not free:
            return False
        row = self._rows[id_] = min(free)
        self._serial = self._serial % _MOST_SERIALS + 1
        start, stripes = _row(row), _stripes(row)
        self._map[start : start + ARRIVING_ROW_BYTES] = bytes(ARRIVING_ROW_BYTES)
        self._map[stripes : stripes + ROW_STRIPES] = bytes(ROW_STRIPES)
        _ID.pack_into(self._map, start + _ID_OFFSET, id_)
        _U32.pack_into(self._map, start + YIELDS_OFFSET, yields)
        if first is not None:
            _U32.pack_into(self._map, start + WISHED_OFFSET, first + 1)
        if share is not None:
            self._map[start + SHARE_OFFSET : start + SHARE_OFFSET + SHARE.size] = share.pack()
        if is_divided:
            _U32.pack_into(self._map, start + EVICTED_OFFSET, 1)
        self._put(row, self._serial)
        return True

    def set_yields(self, id_: int, yields: Yields) -> None:
        """Says how the copy of a file gives way from now on."""
        if id_ in self._rows:
            _U32.pack_into(self._map, _row(self._rows[id_]) + YIELDS_OFFSET, yields)

    def withdraw(self, ids: Iterable[int]) -> None:
        """Takes the rows of these ids away: when this returns, no read of them is served that has not ended. The copier
        may still write to a row, which is nobody else's before the transfer has ended."""
        for id_ in self._rows.keys() & ids:
            self._put(self._rows[id_], 0)
            if id_ in self._whole:
                self._free(id_)

    def ended(self, id_: int, *, is_stored: bool) -> None:
        """Notes the end of a transfer. The row of a copy that is in the store serves on, if it was not taken away."""
        row = self._rows.get(id_)
        if row is not None and is_stored and _U32.unpack_from(self._map, GRANTED_OFFSET + 4 * row)[0]:
            self._whole[id_] = None
        elif row is not None:
            self._put(row, 0)
            self._free(id_)

    def _free(self, id_: int) -> None:
        del self._rows[id_]
        self._whole.pop(id_, None)

    def _put(self, row: int, serial: int) -> None:
        _U32.pack_into(self._map, GRANTED_OFFSET + 4 * row, serial)

    def read(self, id_: int) -> BytesRead:
        """Returns what programs have read of a file since it had its row."""
        row = self._rows.get(id_)
        return BytesRead() if row is None else BytesRead(*ARRIVING_READ.unpack_from(self._map, _row(row) + READ_OFFSET))

    def arrived(self, id_: int, stripes: range) -> list[int]:
        """Returns which of these stripes of a file have arrived."""
        row = self._rows.get(id_)
        states = b"" if row is None else _states(self._map, _stripes(row), stripes)
        return [stripe for stripe, state in zip(stripes, states, strict=False) if state == Stripe.ARRIVED]

    def in_order(self, inode: int) -> int:
        """Returns how many bytes of a file a program has read in a row at the source, as it noted last; 0: nothing."""
        at = IN_ORDER_OFFSET + inode % IN_ORDER_NOTES * IN_ORDER.size
        noted, size_bytes = IN_ORDER.unpack_from(self._map, at)
        return int(size_bytes) if noted == inode else 0


@dataclass(frozen=True)
class Facts:
    """What is shown of a file on its way: what stat says of its source, and the incoming file."""

    id: int
    status: os.stat_result
    incoming: bytes


def is_as_listed(status: os.stat_result, listed: Entry) -> bool:
    """Returns whether a source is as the manifest lists it."""
    is_same = (status.st_size, status.st_mtime_ns) == (listed.size_bytes, listed.mtime_ns)
    return is_same and listed.ctime_ns in (0, status.st_ctime_ns)


class Arrivals:
    """A copier's side: owns its mapping, which is made at the first large file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def begin(self, facts: Facts, listed: Entry) -> Arrival:
        """Returns the stripes of a file whose copying begins. They are shown if the file has a row and is as the
        manifest lists it; else nobody sees them."""
        status = facts.status
        if is_as_listed(status, listed) and len(facts.incoming) < ARRIVING_NAME_BYTES:
            with suppress(OSError, ValueError):
                self._map = self._map or _open(self._path)
                found = self._row_of(self._map, facts.id)
                if found is not None:
                    return Arrival.shown(self._map, *found, facts)
        return Arrival(status.st_size)

    @staticmethod
    def _row_of(mapped: mmap.mmap, id_: int) -> tuple[int, int] | None:
        """Returns the row of a transfer and its serial number."""
        for row in range(ARRIVING_ROWS):
            (serial,) = _U32.unpack_from(mapped, GRANTED_OFFSET + 4 * row)
            if serial and _ID.unpack_from(mapped, _row(row) + _ID_OFFSET)[0] == id_:
                return row, serial
        return None


class Arrival:
    """The stripes of one file that is being copied."""

    is_shown = False
    """Whether programs may see them."""
    is_divided = False
    """Whether the file is divided among nodes."""
    share: Share | None = None
    """The nodes that bring the file together, if this one does not alone, or among which it is divided."""

    def __init__(self, size_bytes: int) -> None:
        self.stripe_bytes = stripe_bytes(size_bytes)
        self.stripes = max(1, -(-size_bytes // self.stripe_bytes))
        self._mapped: mmap.mmap | bytearray = bytearray(self.stripes)
        self._start = self._row = self._shown_at = 0

    @classmethod
    def shown(cls, mapped: mmap.mmap, row: int, serial: int, facts: Facts) -> Arrival:
        """Returns stripes that programs see from now on, while the row is granted."""
        status = facts.status
        arrival = cls(status.st_size)
        start = arrival._row = _row(row)
        times = status.st_mtime_ns, status.st_ctime_ns
        ARRIVING_ROW.pack_into(
            mapped, start, status.st_dev, status.st_ino, status.st_size, *times, facts.id, arrival.stripe_bytes, 0
        )
        name = facts.incoming + b"\0"
        mapped[start + NAME_OFFSET : start + NAME_OFFSET + len(name)] = name
        arrival._mapped, arrival._start, arrival.is_shown = mapped, _stripes(row), True
        arrival.share = _share(mapped, start)
        arrival.is_divided = _evicted(mapped, start) != 0
        arrival._shown_at = SHOWN_OFFSET + 4 * row
        _U32.pack_into(mapped, arrival._shown_at, serial)
        return arrival

    @property
    def yields(self) -> Yields:
        """How the copy gives way to programs that read the source."""
        return Yields(_U32.unpack_from(self._mapped, self._row + YIELDS_OFFSET)[0]) if self.is_shown else Yields.NOT

    def hide(self) -> None:
        """Shows nothing of the file any more."""
        if self.is_shown:
            _U32.pack_into(self._mapped, self._shown_at, 0)

    def is_absent(self, stripe: int) -> bool:
        """Returns whether nobody has begun with a stripe."""
        return stripe < self.stripes and self._mapped[self._start + stripe] == Stripe.ABSENT

    def first_absent(self, stripe: int = 0) -> int | None:
        """Returns the first stripe from this one on that nobody has begun with."""
        found = self._mapped.find(bytes((Stripe.ABSENT,)), self._start + stripe, self._start + self.stripes)
        return None if found < 0 else found - self._start

    def next_absent(self, stripe: int, is_meant: Callable[[int], bool]) -> int | None:
        """Returns the same of the stripes that are meant."""
        found = self.first_absent(stripe)
        while found is not None and not is_meant(found):
            found = self.first_absent(found + 1)
        return found

    def coming(self, stripes: range) -> None:
        """Notes that a thread begins with these stripes."""
        self._put(stripes, Stripe.COMING)

    def put_back(self, stripes: range) -> None:
        """Notes that nobody reads these stripes for now."""
        self._put(stripes, Stripe.ABSENT)

    def arrived(self, stripe: int) -> None:
        """Shows a stripe that is complete."""
        self._put(range(stripe, stripe + 1), Stripe.ARRIVED)

    def wished(self) -> int | None:
        """Returns the stripe that a reader needs next, if any asks."""
        if not self.is_shown:
            return None
        (wished,) = _U32.unpack_from(self._mapped, self._row + WISHED_OFFSET)
        return wished - 1 if 0 < wished <= self.stripes else None

    # ---- divided files

    def absent_of(self, stripes: range) -> int | None:
        """Returns the first of these stripes that nobody has begun with."""
        found = _states(self._mapped, self._start, stripes).find(Stripe.ABSENT)
        return None if found < 0 else stripes[found]

    def have_arrived(self, stripes: range) -> bool:
        """Returns whether all of these stripes have arrived."""
        return _states(self._mapped, self._start, stripes).count(Stripe.ARRIVED) == len(stripes)

    def evict(self, stripe: int) -> None:
        """Takes a stripe away. When this returns, its bytes may be freed: no read counts that might have met that."""
        self.put_back(range(stripe, stripe + 1))
        for _ in range(2):  # to release a lock and take it again keeps the two writes in order for all processors
            with _FENCE:
                pass
        count = _evicted(self._mapped, self._row) % _MOST_EVICTIONS + 1
        _U32.pack_into(self._mapped, self._row + EVICTED_OFFSET, count)

    def readers(self) -> tuple[int, ...]:
        """Returns what readers in order need next, see READERS_OFFSET."""
        return _READERS.unpack_from(self._mapped, self._row + READERS_OFFSET)

    def take_wish(self) -> int | None:
        """Returns the stripe that another node needs next, if any does. It is asked for it again until it has it."""
        wished = self.wished()
        if wished is not None:
            _U32.pack_into(self._mapped, self._row + WISHED_OFFSET, 0)
        return wished

    def _put(self, stripes: range, state: Stripe) -> None:
        self._mapped[self._start + stripes.start : self._start + stripes.stop] = bytes((state,)) * len(stripes)


class ShownRow:
    """What is shown of one file, while `holds`."""

    def __init__(self, mapped: mmap.mmap, row: int, serial: int) -> None:
        start = _row(row)
        self._map, self._row, self._serial = mapped, row, serial
        share = _share(mapped, start) if _evicted(mapped, start) else None
        self._kept = range(ROW_STRIPES) if share is None else share.stripes(share.own, ROW_STRIPES)
        """The stripes that never go while the row holds."""
        *_, self.stripe_bytes, _ = ARRIVING_ROW.unpack_from(mapped, start)
        name = mapped[start + NAME_OFFSET : start + NAME_OFFSET + ARRIVING_NAME_BYTES]
        self.incoming = name.partition(b"\0")[0]
        """The name of the incoming file in the node directory."""

    def holds(self) -> bool:
        """Returns whether the row is the same transfer's as before: what was read of its file until now was right."""
        return all(_U32.unpack_from(self._map, at + 4 * self._row)[0] == self._serial for at in _SERIALS)

    def has(self, stripe: int) -> bool:
        """Returns whether a stripe has arrived, and stays."""
        return stripe in self._kept and self._map[_stripes(self._row) + stripe] == Stripe.ARRIVED

    def wish(self, stripe: int) -> None:
        """Says that another node needs a stripe, if no reader here has said what it needs."""
        at = _row(self._row) + WISHED_OFFSET
        if not _U32.unpack_from(self._map, at)[0]:
            _U32.pack_into(self._map, at, stripe + 1)


class ShownRows:
    """The exchange's side: finds rows by the ids of files."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def find(self, id_: int) -> ShownRow | None:
        """Returns the row of a file of which something is shown."""
        with suppress(OSError, ValueError):
            self._map = self._map or _open(self._path)
        for row in range(ARRIVING_ROWS if self._map is not None else 0):
            assert self._map is not None
            (serial,) = _U32.unpack_from(self._map, SHOWN_OFFSET + 4 * row)
            if serial and _U32.unpack_from(self._map, _row(row) + _ID_OFFSET)[0] == id_:
                found = ShownRow(self._map, row, serial)
                if found.holds():
                    return found
        return None


def _row(row: int) -> int:
    return ARRIVING_HEADER_BYTES + row * ARRIVING_ROW_BYTES


def _stripes(row: int) -> int:
    return STRIPES_OFFSET + row * ROW_STRIPES


def _share(mapped: mmap.mmap, start: int) -> Share | None:
    return Share.unpack(mapped[start + SHARE_OFFSET : start + SHARE_OFFSET + SHARE.size])


def _evicted(mapped: mmap.mmap | bytearray, start: int) -> int:
    """Returns how often stripes of a row have gone, plus one; 0: none ever does."""
    return int(_U32.unpack_from(mapped, start + EVICTED_OFFSET)[0])


def _states(mapped: mmap.mmap | bytearray, start: int, stripes: range) -> bytes:
    """Returns the states of these stripes of a row."""
    return bytes(mapped[start + stripes.start : start + stripes.stop : stripes.step])


def _create(path: Path) -> mmap.mmap:
    """Makes the file with its blocks allocated: writing into a hole on a disk that is full by then is SIGBUS."""
    temporary = path.with_name(f".{path.name}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, ARRIVING_BYTES)
        mapped = mmap.mmap(fd, ARRIVING_BYTES)
        ARRIVING_HEADER.pack_into(mapped, 0, ARRIVING_MAGIC, ARRIVING_ROWS, ROW_STRIPES)
        temporary.rename(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)
    return mapped


def _open(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(fd, ARRIVING_BYTES)
    finally:
        os.close(fd)
