"""A copier's side of the file `arriving`: fills the rows of the files that it copies."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcstage.plan.rule import FileReads
from hpcstage.plan.types import ManifestEntry
from hpcstage.protocol.arriving import (
    ARRIVING_NAME_BYTES,
    ARRIVING_ROW,
    GRANTED_OFFSET,
    NAME_OFFSET,
    PRIORITY_OFFSET,
    SHOWN_OFFSET,
    WISHED_OFFSET,
    Priority,
    StripeState,
    stripe_bytes,
)
from hpcstage.store.arrivingrows import (
    U32,
    StripeShare,
    open_map,
    reads_of,
    row_at,
    row_of,
    share_of,
    stripes_at,
)
from hpcstage.store.mappedfile import put_u32


@dataclass(frozen=True)
class SourceFacts:
    """What is shown of a file on its way: what stat says of its source, and the incoming file."""

    id: int
    status: os.stat_result
    incoming: bytes


def is_as_listed(status: os.stat_result, listed: ManifestEntry) -> bool:
    """Returns whether a source is as the manifest lists it."""
    is_same = (status.st_size, status.st_mtime_ns) == (listed.size_bytes, listed.mtime_ns)
    return is_same and listed.ctime_ns in (0, status.st_ctime_ns)


class Arrivals:
    """A copier's side: owns its mapping, which is made at the first large file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._map: mmap.mmap | None = None

    def begin(self, facts: SourceFacts, listed: ManifestEntry) -> Arrival:
        """Returns the stripes of a file whose copying begins. They are shown if the file has a row and is as the
        manifest lists it; else nobody sees them."""
        status = facts.status
        if is_as_listed(status, listed) and len(facts.incoming) < ARRIVING_NAME_BYTES:
            with suppress(OSError, ValueError):
                self._map = self._map or open_map(self._path)
                found = row_of(self._map, facts.id, GRANTED_OFFSET)
                if found is not None:
                    return Arrival.shown(self._map, *found, facts)
        return Arrival(status.st_size)


class Arrival:
    """The stripes of one file that is being copied."""

    is_shown = False
    """Whether programs may see them."""
    share: StripeShare | None = None
    """The nodes that bring the file together, if this one does not alone."""

    def __init__(self, size_bytes: int) -> None:
        self.stripe_bytes = stripe_bytes(size_bytes)
        self.stripes = max(1, -(-size_bytes // self.stripe_bytes))
        self._mapped: mmap.mmap | bytearray = bytearray(self.stripes)
        self._start = self._row = self._shown_at = 0

    @classmethod
    def shown(cls, mapped: mmap.mmap, row: int, serial: int, facts: SourceFacts) -> Arrival:
        """Returns stripes that programs see from now on, while the row is granted."""
        status = facts.status
        arrival = cls(status.st_size)
        start = arrival._row = row_at(row)
        times = status.st_mtime_ns, status.st_ctime_ns
        ARRIVING_ROW.pack_into(
            mapped, start, status.st_dev, status.st_ino, status.st_size, *times, facts.id, arrival.stripe_bytes, 0
        )
        name = facts.incoming + b"\0"
        mapped[start + NAME_OFFSET : start + NAME_OFFSET + len(name)] = name
        arrival._mapped, arrival._start, arrival.is_shown = mapped, stripes_at(row), True
        arrival.share = share_of(mapped, start)
        arrival._shown_at = SHOWN_OFFSET + 4 * row
        put_u32(mapped, arrival._shown_at, serial)
        return arrival

    @property
    def priority(self) -> Priority:
        """What of the file is copied now."""
        return (
            Priority(U32.unpack_from(self._mapped, self._row + PRIORITY_OFFSET)[0]) if self.is_shown else Priority.FULL
        )

    def hide(self) -> None:
        """Shows nothing of the file any more."""
        if self.is_shown:
            put_u32(self._mapped, self._shown_at, 0)

    def is_absent(self, stripe: int) -> bool:
        """Returns whether nobody has begun with a stripe."""
        return stripe < self.stripes and self._mapped[self._start + stripe] == StripeState.ABSENT

    def first_absent(self, stripe: int = 0) -> int | None:
        """Returns the first stripe from this one on that nobody has begun with."""
        found = self._mapped.find(bytes((StripeState.ABSENT,)), self._start + stripe, self._start + self.stripes)
        return None if found < 0 else found - self._start

    def next_absent(self, stripe: int, is_meant: Callable[[int], bool]) -> int | None:
        """Returns the same of the stripes that are meant."""
        found = self.first_absent(stripe)
        while found is not None and not is_meant(found):
            found = self.first_absent(found + 1)
        return found

    def coming(self, stripes: range) -> None:
        """Notes that a thread begins with these stripes."""
        self._put(stripes, StripeState.COMING)

    def put_back(self, stripes: range) -> None:
        """Notes that nobody reads these stripes for now."""
        self._put(stripes, StripeState.ABSENT)

    def arrived(self, stripe: int) -> None:
        """Shows a stripe that is complete."""
        self._put(range(stripe, stripe + 1), StripeState.ARRIVED)

    def reads(self) -> FileReads:
        """Returns what programs have read of the file."""
        assert isinstance(self._mapped, mmap.mmap)
        return reads_of(self._mapped, self._row)

    def wished(self) -> int | None:
        """Returns the stripe that another node needs next, if any does."""
        if not self.is_shown:
            return None
        (wished,) = U32.unpack_from(self._mapped, self._row + WISHED_OFFSET)
        return wished - 1 if 0 < wished <= self.stripes else None

    def _put(self, stripes: range, state: StripeState) -> None:
        self._mapped[self._start + stripes.start : self._start + stripes.stop] = bytes((state,)) * len(stripes)
