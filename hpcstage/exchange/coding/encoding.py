"""One order on one node: the members agree, work through the stripes, gather the checksums, write the record.

Owns the sequence, and what is said to the other members. All tell all what they have (`offer`); if any has the record
already, it goes to those that lack it and nothing is computed. A member that has its parities on the disk sends its
checksums to all (`sums`), so whoever has those of all may write the record; the order ends well when all have said that
they have it (`recorded`). A member that cannot go on says so to all (`failed`), and all end with the same reason.

Work that touches files runs in the lane; its modules are imported there, too, since NumPy takes long.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hpcstage.checkpoint.generations.files import OWN_PARTS
from hpcstage.errors import HpcstageError
from hpcstage.exchange.coding.pace import EncodingPace
from hpcstage.exchange.coding.wire import BLOCK_HEAD_BYTES, BlockHead, ExchangeMessage
from hpcstage.exchange.lane import Lane
from hpcstage.exchange.transport.frames import FrameError

if TYPE_CHECKING:
    from hpcstage.checkpoint.protection.orders import EncodeOrder
    from hpcstage.checkpoint.protection.record import CodingRecord
    from hpcstage.exchange.coding.stripework import Sending, StripeWork
    from hpcstage.exchange.coding.tasks import Task

KINDS = frozenset({"offer", "round", "sums", "record", "recorded", "failed"})
"""The messages of members about an order."""
_AT_ONCE = 8
"""The most tasks that the thread gets at once."""
_IN_LANE = 2
"""The most pieces of work that the thread has: it never waits for the loop, and a failure waits for few."""
_PIECE_BYTES = 1 << 20
_T = TypeVar("_T")


@dataclass
class MemberOffer:
    """A member says this of its share of the generation."""

    sizes_bytes: tuple[int, ...] = ()
    record: bytes = b""
    """The record of this group that it has."""
    checksum: str = ""
    """That of its record, if it has one."""
    others: str = ""
    """The members of another group of which it has a record."""


@dataclass
class _Pieces:
    data: bytearray = field(default_factory=bytearray)
    total: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.total is not None and len(self.data) >= self.total

    def add(self, message: ExchangeMessage) -> None:
        if message.number("start") != len(self.data):
            raise FrameError("a piece of checksums that does not follow")
        self.total = message.number("total")
        self.data += message.body


@dataclass(frozen=True)
class EncodingOutcome:
    """How an order ended."""

    failure: str
    seconds: float
    bytes_sent: int
    bytes_read: int


class Encoding:
    """One order. Members are named by their places in the group."""

    def __init__(self, order: EncodeOrder, node: int, lane: Lane, send: Callable[[int, Any], None]) -> None:
        """`send` sends to a member."""
        self.order = order
        self.place = order.nodes.index(node)
        self.outcome: EncodingOutcome | None = None
        self._lane = lane
        self._send = send
        self._began = time.monotonic()
        self._heard = self._began
        self._others = [place for place in range(len(order.nodes)) if place != self.place]
        self._offers: dict[int, MemberOffer] = {}
        self._stripes: StripeWork | None = None
        self._is_opening = False
        self._rounds: Counter[int] = Counter()
        """How many members have finished each round."""
        self._finished = 0
        """The rounds that all have finished."""
        self._in_lane = 0
        self._is_closing = False
        self._sums: dict[int, _Pieces] = {place: _Pieces() for place in self._others}
        self._own_sums: bytes | None = None
        self._record = _Pieces()
        self._is_recording = False
        self._recorded: set[int] = set()
        self._blocks: list[tuple[BlockHead, memoryview]] = []
        self._pace = EncodingPace(order.processor_share, order.rate_bytes_per_s)
        self._pace_due = self._began
        self._bytes_sent = 0
        self._in_thread(lambda: _offered(order), self._offer)

    # ---- what comes

    def hear(self, place: int, message: ExchangeMessage) -> None:
        """Takes a message of a member. Raises FrameError."""
        if self.outcome is not None:
            return
        self._heard = time.monotonic()
        if message.kind == "offer":
            sizes, checksum, others = message.numbers("sizes"), message.text("checksum"), message.text("others")
            if len(sizes) != len(OWN_PARTS):
                raise FrameError(f"an offer with {len(sizes)} sizes")
            self._offers[place] = MemberOffer(sizes, checksum=checksum, others=others)
            self._agree()
        elif message.kind == "round":
            self._rounds[message.number("round")] += 1
        elif message.kind == "sums":
            self._sums[place].add(message)
            self._gather()
        elif message.kind == "record":
            self._record.add(message)
            if self._record.is_whole:
                self._take_record(bytes(self._record.data))
        elif message.kind == "recorded":
            self._recorded.add(place)
            self._end_well()
        elif message.kind == "failed":
            self._end(message.text("why"))

    def block(self, head: BlockHead, data: memoryview) -> None:
        """Takes blocks of a member. Raises FrameError."""
        self._heard = time.monotonic()
        if self.outcome is not None:
            return
        if self._stripes is None:  # the others may begin while this node makes its file
            self._blocks.append((head, data))
        else:
            self._stripes.tasks.take(head, data)

    # ---- what there is to do

    def pump(self, now: float, files_at: float) -> bool:
        """Begins what may begin. Returns whether anything was."""
        if self.outcome is not None:
            return False
        if now - self._heard > self.order.wait_s:
            self.fail(f"{self._awaited()} did not answer for {self.order.wait_s:g} s")
            return True
        stripes = self._stripes
        if stripes is None:
            return False
        begun = self._begin_rounds(stripes)
        while stripes.tasks.ready and self._in_lane < _IN_LANE:
            self._pace_due = self._pace.due(now, files_at)
            if self._pace_due > now:
                break
            self._begin(stripes, now)
            begun = True
        return begun

    def next_at(self) -> float:
        """Returns when there is something to do even if nothing comes."""
        stall = self._heard + self.order.wait_s
        has_ready = self._stripes is not None and self._stripes.tasks.ready and self._in_lane < _IN_LANE
        return min(stall, self._pace_due) if has_ready else stall

    def fail(self, why: str) -> None:
        """Ends the order, here and at all members."""
        if self.outcome is None:
            self._say("failed", why=why)
            self._end(why)

    def name(self, place: int) -> str:
        """Returns a member's name."""
        return self.order.names[place]

    # ---- the beginning

    def _offer(self, offer: MemberOffer) -> None:
        self._offers[self.place] = offer
        self._say("offer", sizes=list(offer.sizes_bytes), checksum=offer.checksum, others=offer.others)
        self._agree()

    def _agree(self) -> None:
        """Begins to work once all have said what they have."""
        if len(self._offers) < len(self.order.nodes) or self._is_opening:
            return
        self._is_opening = True
        holders = [place for place, offer in sorted(self._offers.items()) if offer.checksum]
        strangers = [offer.others for _, offer in sorted(self._offers.items()) if offer.others]
        if holders:
            self._spread(holders[0])
        elif strangers:
            number = self.order.generation.number
            self.fail(f"generation {number} was encoded for another group, of {strangers[0]}: save it anew")
        else:
            sizes = [self._offers[place].sizes_bytes for place in range(len(self.order.nodes))]
            self._in_thread(lambda: _opened(self.order, self.place, sizes), self._begin_stripes)

    def _spread(self, holder: int) -> None:
        chosen, own = self._offers[holder].checksum, self._offers[self.place]
        if holder == self.place:
            for place in self._others:
                if self._offers[place].checksum != chosen:
                    self._send_pieces(place, "record", own.record)
        if own.checksum == chosen:
            self._note_recorded(None)

    def _take_record(self, content: bytes) -> None:
        if not self._is_recording:
            self._is_recording = True
            self._in_thread(lambda: _recorded(self.order, content), self._note_recorded)

    # ---- the stripes

    def _begin_stripes(self, stripes: StripeWork) -> None:
        if self.outcome is not None:
            self._lane.submit(stripes.give_up, lambda _: None)
            return
        self._stripes = stripes
        self._begin_rounds(stripes)
        for head, data in self._blocks:
            stripes.tasks.take(head, data)
        self._blocks.clear()
        if not stripes.tasks.rounds:
            self._close(stripes)

    def _begin_rounds(self, stripes: StripeWork) -> bool:
        """Begins what the others let begin, round after round."""
        while self._rounds[self._finished] == len(self.order.nodes):
            self._finished += 1
        idle = stripes.tasks.begin(self._finished)
        for number in idle:
            self._finish(stripes, number)
        return bool(idle)

    def _begin(self, stripes: StripeWork, now: float) -> None:
        self._pace.began(now)
        self._in_lane += 1
        ready = stripes.tasks.ready
        tasks = [ready.popleft() for _ in range(min(_AT_ONCE, len(ready)))]

        def then(sendings: list[Sending]) -> None:
            self._in_lane -= 1
            if self.outcome is None:
                self._ended(stripes, tasks, sendings)

        self._in_thread(lambda: stripes.work(tasks), then)

    def _ended(self, stripes: StripeWork, tasks: list[Task], sendings: list[Sending]) -> None:
        now = time.monotonic()
        for place, message in sendings:
            self._send(place, message)
            self._bytes_sent += len(message) - BLOCK_HEAD_BYTES
            self._pace.sent(len(message), now)
        for task in tasks:
            number = stripes.tasks.done(task)
            if number is not None:
                self._finish(stripes, number)

    def _finish(self, stripes: StripeWork, number: int) -> None:
        self._rounds[number] += 1
        self._say("round", round=number)
        if stripes.tasks.is_done:
            self._close(stripes)

    # ---- the end

    def _close(self, stripes: StripeWork) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._in_thread(stripes.close, lambda _: self._closed(stripes))

    def _closed(self, stripes: StripeWork) -> None:
        if self.outcome is not None:
            return
        self._own_sums = stripes.checksums.to_bytes()
        for place in self._others:
            self._send_pieces(place, "sums", self._own_sums)
        self._gather()

    def _gather(self) -> None:
        """Writes the record once the checksums of all are there, and so all parities on the disks."""
        sums = self._own_sums
        if sums is None or self._is_recording or not all(one.is_whole for one in self._sums.values()):
            return
        self._is_recording = True
        found = {place: bytes(one.data) for place, one in self._sums.items()}
        found[self.place] = sums
        sizes = {place: offer.sizes_bytes for place, offer in self._offers.items()}
        self._in_thread(lambda: _recorded(self.order, _record_of(self.order, sizes, found)), self._note_recorded)

    def _note_recorded(self, _: object) -> None:
        if self.outcome is None:
            self._recorded.add(self.place)
            self._say("recorded")
            self._end_well()

    def _end_well(self) -> None:
        if len(self._recorded) == len(self.order.nodes):
            self._end("")

    def _end(self, failure: str) -> None:
        stripes = self._stripes
        self.outcome = EncodingOutcome(
            failure, time.monotonic() - self._began, self._bytes_sent, 0 if stripes is None else stripes.bytes_read
        )
        if failure and stripes is not None:
            self._lane.submit(stripes.give_up, lambda _: None)
        self._blocks.clear()

    # ---- help

    def _awaited(self) -> str:
        """Returns the names of those who have yet to do something, as far as this node knows."""
        asked = self._others
        if len(self._offers) < len(self.order.nodes):
            asked = [place for place in asked if place not in self._offers]
        elif self._own_sums is not None and not self._is_recording:
            asked = [place for place in asked if not self._sums[place].is_whole]
        elif self._is_recording:
            asked = [place for place in asked if place not in self._recorded]
        return ", ".join(self.name(place) for place in asked) or self.name(self.place)

    def _say(self, kind: str, **values: object) -> None:
        packed = ExchangeMessage(kind, {"digest": self.order.digest, **values}).pack()
        for place in self._others:
            self._send(place, packed)

    def _send_pieces(self, place: int, kind: str, data: bytes) -> None:
        for start in range(0, max(1, len(data)), _PIECE_BYTES):
            values = {"digest": self.order.digest, "start": start, "total": len(data)}
            self._send(place, ExchangeMessage(kind, values, data[start : start + _PIECE_BYTES]).pack())

    def _in_thread(self, work: Callable[[], _T], then: Callable[[_T], object]) -> None:
        """Does work in the lane; an error ends the order with this node's name."""

        def guarded() -> tuple[_T | None, str]:
            try:
                return work(), ""
            except HpcstageError as error:
                return None, error.what
            except OSError as error:
                return None, error.strerror or str(error)
            except ImportError as error:
                return None, f"{error.name} cannot be imported"

        def handed(found: tuple[_T, str]) -> None:
            result, why = found
            if why:
                self.fail(f"{self.name(self.place)}: {why}")
            else:
                then(result)

        self._lane.submit(guarded, handed)


# ---- in the thread of the lane


def _offered(order: EncodeOrder) -> MemberOffer:
    """Returns what this node has. Raises HpcstageError and OSError."""
    from hpcstage.checkpoint.coding.checksums import checksum
    from hpcstage.checkpoint.generations.manifest import DamagedGeneration
    from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
    from hpcstage.checkpoint.protection.members import read_record

    number = order.generation.number
    with LocalSource(order.directory) as source:
        if GenerationReader(source).manifest(number).id != order.generation:
            raise DamagedGeneration(f"generation {number} comes from another attempt: save it anew")
        sizes = tuple(source.size_bytes(number, part) for part in OWN_PARTS)
        record = read_record(source, number)
    if record is None or record.generation != order.generation:
        return MemberOffer(sizes)
    if not _is_ours(order, record):
        return MemberOffer(sizes, others=", ".join(member.name for member in record.members))
    content = record.to_bytes()
    return MemberOffer(sizes, content, checksum(content).hex())


def _opened(order: EncodeOrder, place: int, sizes_bytes: list[tuple[int, ...]]) -> StripeWork:
    from hpcstage.exchange.coding.stripework import StripeWork

    return StripeWork(order, place, sizes_bytes)


def _record_of(order: EncodeOrder, sizes_bytes: dict[int, tuple[int, ...]], sums: dict[int, bytes]) -> bytes:
    """Returns the record, which is the same on all members."""
    from hpcstage.checkpoint.coding.erasurecode import ErasureCode
    from hpcstage.checkpoint.protection.record import CodedMember, CodingRecord

    code = ErasureCode.cauchy(order.size.k, order.size.m)
    members = (CodedMember(name, sizes_bytes[place], sums[place]) for place, name in enumerate(order.names))
    return CodingRecord(order.generation, order.block_bytes, code, tuple(members)).to_bytes()


def _recorded(order: EncodeOrder, content: bytes) -> None:
    """Keeps a record, if it is one of this order. Raises HpcstageError and OSError."""
    from hpcstage.checkpoint.generations.files import Files
    from hpcstage.checkpoint.generations.manifest import DamagedGeneration
    from hpcstage.checkpoint.protection.members import MemberWriter
    from hpcstage.checkpoint.protection.record import CodingRecord

    record = CodingRecord.from_bytes(content)
    if record.generation != order.generation or not _is_ours(order, record):
        raise DamagedGeneration("a coding record came that is another group's")
    MemberWriter(Files(), order.directory, order.generation.number).record(content)


def _is_ours(order: EncodeOrder, record: CodingRecord) -> bool:
    return record.is_of(order.names, order.size.k, order.size.m, order.block_bytes)
