"""Passes stripes of large files between the nodes that bring them together: the service of an exchange that knows no
file as a whole.

A copier asks for a stripe that another node reads at the source. That node's exchange waits until it has arrived there,
as all programs see it in `arriving`, and sends it out of the incoming file, or out of the copy: it looks whenever the
loop turns. It refuses what has no row and no copy for GRACE_S. What this node gives is only what was found to be right;
who gets it compares its own source before it shows it. Bundles are filled in the reading thread.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcstage.exchange.files import batch as files
from hpcstage.exchange.files.filereading import Filled
from hpcstage.exchange.files.sender import Sender
from hpcstage.exchange.files.stripeport import StripeLink, StripePort
from hpcstage.exchange.service import ExchangeService, Station
from hpcstage.exchange.transport.buffers import Buffer
from hpcstage.exchange.transport.frames import (
    CONTROL_TAG,
    MAX_ROWS,
    PIECE_BYTES,
    Bundle,
    BundleRow,
    ControlFrame,
    Sort,
    close_bundle,
    open_bundle,
)
from hpcstage.exchange.transport.mpi import Mail
from hpcstage.protocol.arriving import ARRIVING_FILE, stripe_bytes
from hpcstage.protocol.exchange import Sent
from hpcstage.protocol.stripelink import Asked
from hpcstage.store.arrivingrows import ShownRow, ShownRows
from hpcstage.store.catalog import Catalog, LateCatalog


@dataclass
class OutgoingStripe:
    """A stripe for the node at the position `to`, which begins at `position` once a part of it is in a bundle."""

    to: int
    id: int
    stripe: int
    size_bytes: int
    position: int
    end: int


class OutgoingStripes:
    """The stripes for one node; see sender.Queued. It calls `on_lost` with those that cannot be read, from the reading
    thread, and with those that are forgotten."""

    def __init__(self, rows: ShownRows, on_lost: Callable[[OutgoingStripe], None]) -> None:
        self._rows = rows
        self._on_lost = on_lost
        self._stripes: deque[OutgoingStripe] = deque()

    @property
    def has_some(self) -> bool:
        """See Queued."""
        return bool(self._stripes)

    def add(self, items: Sequence[OutgoingStripe]) -> None:
        """See Queued."""
        self._stripes.extend(items)

    def fill(self, buffer: Buffer, catalog: Catalog) -> Filled:
        """See Queued."""
        filled, at = Filled(), 0
        while self._stripes and at < PIECE_BYTES and len(filled.rows) < MAX_ROWS:
            given = self._stripes[0]
            length = min(given.end - given.position, PIECE_BYTES - at)
            if not self._read(given, buffer.view[at : at + length], catalog):
                self._on_lost(self._stripes.popleft())
                continue
            filled.rows.append(BundleRow(given.id, 0, given.size_bytes, given.position, length, at, 0))
            at += length
            given.position += length
            if given.position == given.end:
                self._stripes.popleft()
        if filled.rows:
            filled.length = close_bundle(buffer.view, at, filled.rows, catalog.fingerprint, Sort.STRIPES)
        return filled

    def take_rest(self) -> list[int]:
        """See Queued."""
        while self._stripes:
            self._on_lost(self._stripes.popleft())
        return []

    def _read(self, given: OutgoingStripe, view: memoryview, catalog: Catalog) -> bool:
        """Fills the view. What is read of an incoming file counts only if its row held all the while."""
        row = self._rows.find(given.id)
        if row is not None and row.has(given.stripe) and _filled(row.incoming, given, view) and row.holds():
            return True
        return _filled(catalog.staged(given.id), given, view)


def _filled(path: bytes, given: OutgoingStripe, view: memoryview) -> bool:
    with suppress(OSError):
        fd, found = files.open_given(path)
        try:
            return found.st_size == given.size_bytes and files.read_into(fd, view, given.position)
        finally:
            os.close(fd)
    return False


GRACE_S = 3.0
"""The copies of a file do not begin at the same moment on all nodes."""


@dataclass
class _Wanted:
    """A stripe that a copier of this node waits for."""

    link: StripeLink
    slot: int
    place: int
    received: int = 0


@dataclass
class _Waiting:
    """A stripe that another node waits for."""

    id: int
    stripe: int
    until: float


class StripeService(ExchangeService):
    """Serves the copiers of this node, and the exchanges that ask for what these have brought."""

    sorts = (Sort.ASK_STRIPES, Sort.NO_STRIPES, Sort.STRIPES)

    def __init__(self, station: Station, store: LateCatalog) -> None:
        super().__init__(station)
        self._store = store
        self._rows = ShownRows(Path(ARRIVING_FILE))
        self._port = StripePort()
        self._lost: deque[OutgoingStripe] = deque()
        """Stripes that could not be read, as the reading thread has found."""
        self._sender: Sender[OutgoingStripe] = Sender(
            station.post, station.lanes.reading, lambda: OutgoingStripes(self._rows, self._lost.append)
        )
        self._wanted: dict[tuple[int, int], _Wanted] = {}
        """By id and stripe."""
        self._waiting: dict[int, list[_Waiting]] = {}
        """By position."""

    # ---- copiers of this node

    def descriptors(self) -> Sequence[int]:
        """Returns what shows that copiers want something."""
        return (self._port.fileno(),)

    def ready(self) -> None:
        """Asks other nodes for what copiers want."""
        asked, ended = self._port.take()
        for key in [key for key, wanted in self._wanted.items() if wanted.link in ended]:
            del self._wanted[key]
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for link, one in asked:
            place = self._place(link, one)
            if place is None:
                link.answer(one.stripe, one.slot, is_here=False)
                continue
            assert link.begin is not None
            key = link.begin.id, one.stripe
            if key in self._wanted:  # of a node that was given up
                self._answer(key, is_here=False)
            self._wanted[key] = _Wanted(link, one.slot, place)
            found[place, link.begin.id].append(one.stripe)
        for (place, id_), stripes in found.items():
            self._say(Sort.ASK_STRIPES, place, id_, stripes)

    def _place(self, link: StripeLink, asked: Asked) -> int | None:
        """Returns the position of the node that is to give a stripe; None if it cannot be asked."""
        catalog, begin = self._store.catalog, link.begin
        if catalog is None or begin is None or begin.id not in catalog or self.station.ended:
            return None
        size_bytes, length = catalog.size(begin.id), stripe_bytes(begin.size_bytes)
        is_ours = (begin.size_bytes, begin.stripe_bytes) == (size_bytes, length) and _is_in(asked.stripe, size_bytes)
        return self.station.place(asked.node) if is_ours and asked.node < len(self.station.membership) else None

    def _say(self, sort: Sort, place: int, id_: int, stripes: Iterable[int]) -> None:
        fingerprint = 0 if self._store.catalog is None else self._store.catalog.fingerprint
        self.station.post.send(ControlFrame(sort, fingerprint, ids=(id_, *stripes)).pack(), place, CONTROL_TAG)

    def _answer(self, key: tuple[int, int], *, is_here: bool) -> None:
        wanted = self._wanted.pop(key)
        wanted.link.answer(key[1], wanted.slot, is_here=is_here)

    # ---- other exchanges

    def take(self, mail: Mail) -> None:
        """Takes stripes that have come, or what another node says of stripes."""
        if mail.buffer is None:
            message = ControlFrame.unpack(mail.data)
            if message.ids:
                self._control(mail.source, message)
            return
        self.station.files_at = time.monotonic()
        catalog = self._store.catalog
        if catalog is not None:
            self._took(mail, open_bundle(mail.data), catalog)
        self.station.post.arrivals.give(mail.buffer)

    def _control(self, source: int, message: ControlFrame) -> None:
        (id_, *stripes), catalog = message.ids, self._store.catalog
        if message.sort is Sort.NO_STRIPES:
            for key in ((id_, stripe) for stripe in stripes):
                if key in self._wanted and self._wanted[key].place == source:
                    self._answer(key, is_here=False)
            return
        if self.station.ended or catalog is None or not _are_known(message, catalog):
            self._say(Sort.NO_STRIPES, source, id_, stripes)
            return
        until = time.monotonic() + GRACE_S
        self._waiting.setdefault(source, []).extend(_Waiting(id_, stripe, until) for stripe in stripes)

    def _took(self, mail: Mail, bundle: Bundle, catalog: Catalog) -> None:
        """Gives the rows that continue what is waited for to the copiers."""
        for row in bundle.rows if bundle.fingerprint == catalog.fingerprint else ():
            length = stripe_bytes(row.size_bytes)
            stripe, begun = divmod(row.start, length)
            wanted = self._wanted.get((row.id, stripe))
            if wanted is None or wanted.place != mail.source or wanted.received != begun:
                continue
            left = min(length, catalog.size(row.id) - stripe * length) - begun
            if row.size_bytes != catalog.size(row.id) or row.length > left:
                continue
            wanted.link.put(wanted.slot, begun, mail.data[row.at : row.at + row.length])
            wanted.received += row.length
            if row.length == left:
                self._answer((row.id, stripe), is_here=True)

    # ---- what there is to do

    def pump(self) -> bool:
        """Sends what has arrived, and refuses what does not come."""
        has_work = self._waiting or self._lost or self._sender.has_turns
        catalog = self._store.catalog if has_work else None
        if catalog is None:
            return False
        now, rows = time.monotonic(), dict[int, ShownRow | None]()
        for place, waiting in list(self._waiting.items()):
            for one in waiting:
                if one.id not in rows:
                    rows[one.id] = self._rows.find(one.id)
            self._waiting[place] = [one for one in waiting if self._waits_on(place, one, rows[one.id], catalog, now)]
            if not self._waiting[place]:
                del self._waiting[place]
        while self._lost:
            lost = self._lost.popleft()
            self._say(Sort.NO_STRIPES, lost.to, lost.id, (lost.stripe,))
        started = self._sender.pump(catalog)
        if self._sender.has_turns:
            self.station.files_at = now
        return started

    def _waits_on(self, place: int, one: _Waiting, row: ShownRow | None, catalog: Catalog, now: float) -> bool:
        """Sends a stripe if it is here, and refuses it if it does not come. Returns whether it is still waited for."""
        size_bytes = catalog.size(one.id)
        if row.has(one.stripe) if row is not None else os.path.exists(catalog.staged(one.id)):
            start = one.stripe * stripe_bytes(size_bytes)
            end = min(size_bytes, start + stripe_bytes(size_bytes))
            self._sender.offer(place, (OutgoingStripe(place, one.id, one.stripe, size_bytes, start, end),))
            return False
        if row is not None:
            row.wish(one.stripe)
            one.until = now + GRACE_S
        if now < one.until:
            return True
        self._say(Sort.NO_STRIPES, place, one.id, (one.stripe,))
        return False

    def report(self) -> None:
        """Tells the daemon what went to other nodes."""
        self.station.tell(*(Sent(self.station.nodes[to], 0, size_bytes) for to, _, size_bytes in self._sender.sent()))

    # ---- the end

    def left(self, node: int) -> None:
        """Waits for nothing of a node any more, and gives it nothing."""
        place = self.station.nodes.index(node)
        for key in [key for key, wanted in self._wanted.items() if wanted.place == place]:
            self._answer(key, is_here=False)
        self._sender.drop(place)
        self._waiting.pop(place, None)

    def stop(self) -> None:
        """Refuses what others wait for; no copier of this node needs anything more."""
        self._wanted.clear()
        self._port.close()
        self._sender.stop()
        for place, waiting in self._waiting.items():
            for one in waiting:
                self._say(Sort.NO_STRIPES, place, one.id, (one.stripe,))
        self._waiting.clear()


def _are_known(message: ControlFrame, catalog: Catalog) -> bool:
    """Returns whether stripes are of a file that this node knows as the same."""
    id_, *stripes = message.ids
    is_same = message.fingerprint == catalog.fingerprint and id_ in catalog
    return is_same and all(_is_in(stripe, catalog.size(id_)) for stripe in stripes)


def _is_in(stripe: int, size_bytes: int) -> bool:
    """Returns whether a file of this size has such a stripe."""
    return stripe * stripe_bytes(size_bytes) < size_bytes
