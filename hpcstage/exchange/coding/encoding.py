"""One order on one node: the members agree, work through the stripes, gather the checksums, write the record.

All tell all what they have; if any has the record already, it goes to those that lack it and nothing is computed. A
member that has its parities on the disk sends its checksums to all, so whoever has those of all may write the record;
the order ends well when all have said that they have it. A member that cannot go on says so to all, and all end with
the same reason.

An order has a thread of the lowest priority, in which all of it happens: training, and files that programs wait for, go
first. The loop of the exchange puts what comes into `inbox` and sends what it finds in `outbox`.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from hpcstage.checkpoint.generations.files import OWN_PARTS
from hpcstage.errors import HpcstageError
from hpcstage.exchange.coding.wire import (
    BLOCK_HEAD_BYTES,
    ContentOffer,
    Failed,
    OrderMessage,
    Piece,
    Recorded,
    RoundsDone,
    packed,
)
from hpcstage.exchange.lane import Wake
from hpcstage.exchange.service import Station
from hpcstage.exchange.transport.frames import FrameError
from hpcstage.protocol.coding import Encode

if TYPE_CHECKING:
    from hpcstage.exchange.coding.stripework import StripeWork

LOWEST = 19
"""The lowest priority."""
BESIDE_FILES_S = 0.05
"""Files are under way if something happened with one so lately; meanwhile a piece of work is begun so often."""
_PIECE_BYTES = 1 << 20


class OrderEnded(Exception):
    """Another member, or the loop of this exchange, has ended the order; all members have been told."""


@dataclass
class _Received:
    """The pieces of one member that have come."""

    data: bytearray = field(default_factory=bytearray)
    total: int | None = None


class Encoding(threading.Thread):
    """Carries out one order. Members are named by their places in the group."""

    def __init__(
        self, order: Encode, agent: int, station: Station, wake: Wake, before: Collection[threading.Thread]
    ) -> None:
        """`wake` is woken when there is something in `outbox`, or `failure` was set: the order has ended. `before` have
        to end first, since they write the same files."""
        super().__init__(name=f"encoding {order.number}", daemon=True)
        self.order = order
        self.agent = agent
        """The number of the agent that gave it."""
        self.place = order.nodes.index(station.daemon.hello.index)
        self.inbox: SimpleQueue[tuple[int, OrderMessage | memoryview]] = SimpleQueue()
        """Messages and blocks of members; `Failed` of this node ends the order after all were told."""
        self.outbox: deque[tuple[int, bytes | bytearray]] = deque()
        self.failure: str | None = None
        """Why the order has ended; empty: well. None: it has not."""
        self.error: BaseException | None = None
        """What should not have happened."""
        self.seconds = 0.0
        self.bytes_sent = 0
        self.bytes_read = 0
        self._wait_s = order.wait_s
        if order.rate_bytes_per_s:  # a member that waits by its rate does something
            self._wait_s += order.block_bytes * order.m / order.rate_bytes_per_s
        self._places = range(len(order.nodes))
        self._others = [place for place in self._places if place != self.place]
        self._station = station
        self._wake = wake
        self._before = before
        self._moved = time.monotonic()
        """When something came last, or was done here."""
        self._due = -math.inf
        """When the next piece of work may begin."""
        self._offers: dict[int, ContentOffer] = {}
        self._rounds = [0] * len(order.nodes)
        """How many rounds each member has finished."""
        self._blocks: list[memoryview] = []
        """Those that came before this node began their round."""
        self._received = {place: _Received() for place in self._places}
        self._recorded: set[int] = set()

    def run(self) -> None:
        """Carries out the order, and says how it ended."""
        began, failure = time.monotonic(), ""
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)
            for thread in self._before:
                thread.join()
            self._carry_out()
        except OrderEnded as ended:
            failure = str(ended)
        except (HpcstageError, FrameError, OSError, ImportError) as error:
            failure = f"{self.order.names[self.place]}: {_reason(error)}"
            self._say(Failed(self.order.digest, failure))
        except BaseException as error:  # noqa: BLE001  the loop raises it
            self.error = error
        self.seconds = time.monotonic() - began
        self.failure = failure
        self._wake.up()

    def _carry_out(self) -> None:
        from hpcstage.exchange.coding import stripework  # NumPy takes long

        offer, record = stripework.offered(self.order)
        self._offers[self.place] = offer
        self._say(offer)
        while missing := [place for place in self._places if place not in self._offers]:
            self._listen(missing)
        offers = [self._offers[place] for place in self._places]
        holders = [place for place in self._places if offers[place].checksum]
        strangers = [one.others for one in offers if one.others]
        if not holders and strangers:
            number = self.order.number
            self._fail(f"generation {number} was encoded for another group, of {strangers[0]}: save it anew")
        if not holders:
            sizes = [tuple(one.sizes_bytes) for one in offers]
            sums = self._encoded(stripework.StripeWork(self.order, self.place, sizes))
            stripework.keep_record(self.order, stripework.record_of(self.order, sizes, sums))
        elif holders[0] == self.place:
            self._send(record, [place for place in self._others if offers[place].checksum != offer.checksum])
        elif offers[holders[0]].checksum != offer.checksum:
            stripework.keep_record(self.order, self._pieces(holders[:1])[0])
        self._recorded.add(self.place)
        self._say(Recorded(self.order.digest))
        while missing := [place for place in self._others if place not in self._recorded]:
            self._listen(missing)

    def _encoded(self, work: StripeWork) -> list[bytes]:
        """Works through the stripes; returns the checksums of all members, whose parities are on their disks."""
        with work:
            while self._goes_on(work):
                self._blocks = [block for block in self._blocks if not work.take(block)]
                if work.ready and time.monotonic() >= self._due:
                    self._do_piece(work)
                else:
                    self._listen(self._others, self._due if work.ready else math.inf)
        self._send(work.checksums, self._others)
        sums = self._pieces(self._others)
        sums.insert(self.place, work.checksums)
        return sums

    def _goes_on(self, work: StripeWork) -> bool:
        """Begins what the others let begin, and tells them what is finished. Returns whether anything is left."""
        work.begin(min(self._rounds))
        while work.finished > self._rounds[self.place]:
            self._rounds[self.place] = work.finished
            self._say(RoundsDone(self.order.digest, work.finished))
            work.begin(min(self._rounds))  # this node may have been the last one
        return not work.is_done

    def _do_piece(self, work: StripeWork) -> None:
        """Carries out one duty, and puts off the next one by what this one took of the processor and of the network."""
        began, began_s, sent = time.monotonic(), time.thread_time(), 0
        for place, message in work.carry_out():
            self.outbox.append((place, message))
            sent += len(message) - BLOCK_HEAD_BYTES
        self._did_something()
        self.bytes_sent += sent
        self.bytes_read = work.bytes_read
        share, rate = self.order.processor_share, self.order.rate_bytes_per_s
        self._due = max(
            self._due,
            began + (time.thread_time() - began_s) / share if share else began,
            max(self._due, began) + sent / rate if rate else began,
            began + BESIDE_FILES_S if self._moved - self._station.files_at < BESIDE_FILES_S else began,
        )

    # ---- the other members

    def _listen(self, awaited: Collection[int], until: float = math.inf) -> None:
        """Takes what has come; waits for something until a time. Raises OrderEnded, and FrameError."""
        now, stall = time.monotonic(), self._moved + self._wait_s
        try:
            self._take(*self.inbox.get(timeout=max(0.0, min(until, stall) - now)))
            while True:
                self._take(*self.inbox.get_nowait())
        except Empty:
            if time.monotonic() >= self._moved + self._wait_s:
                names = ", ".join(self.order.names[place] for place in awaited)
                self._fail(f"{names} did not answer for {self._wait_s:g} s")

    def _take(self, place: int, message: OrderMessage | memoryview) -> None:
        self._moved = time.monotonic()
        if isinstance(message, memoryview):
            self._blocks.append(message)
        elif isinstance(message, ContentOffer):
            if len(message.sizes_bytes) != len(OWN_PARTS) or min(message.sizes_bytes) < 0:
                raise FrameError("an offer of other files than a generation has")
            self._offers[place] = message
        elif isinstance(message, RoundsDone):
            self._rounds[place] = message.count
        elif isinstance(message, Piece):
            received = self._received[place]
            received.data += message.content
            received.total = message.total
        elif isinstance(message, Recorded):
            self._recorded.add(place)
        else:
            raise OrderEnded(message.why)

    def _pieces(self, places: Collection[int]) -> list[bytes]:
        """Returns what members send in pieces."""
        while missing := [place for place in places if len(self._received[place].data) != self._received[place].total]:
            self._listen(missing)
        return [bytes(self._received[place].data) for place in places]

    def _send(self, data: bytes, places: Collection[int]) -> None:
        """Sends data in pieces."""
        for start in range(0, max(1, len(data)), _PIECE_BYTES):
            piece = packed(Piece(self.order.digest, len(data), data[start : start + _PIECE_BYTES]))
            self.outbox.extend((place, piece) for place in places)
        self._did_something()

    def _say(self, message: OrderMessage) -> None:
        self.outbox.extend((place, packed(message)) for place in self._others)
        self._did_something()

    def _did_something(self) -> None:
        """Has the loop send what is in `outbox`; what took long here is no silence of the others."""
        self._moved = time.monotonic()
        self._wake.up()

    def _fail(self, why: str) -> None:
        """Ends the order at all members. Raises OrderEnded."""
        self._say(Failed(self.order.digest, why))
        raise OrderEnded(why)


def _reason(error: Exception) -> str:
    if isinstance(error, HpcstageError):
        return error.what
    if isinstance(error, ImportError):
        return f"{error.name} cannot be imported"
    return (isinstance(error, OSError) and error.strerror) or str(error)
