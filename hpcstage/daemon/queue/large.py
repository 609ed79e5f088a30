"""Decides when the copying of large files is deferred because the program reads them at the source itself. Pure.

A file is large if it has more than LEAST_BYTES and the source is busy with it for more than LARGE_S. A program that has
such a file open at the source goes on reading it there until the copy is whole, so a copy that is made during its first
reading only takes bandwidth away from it. Such a copy is deferred until the program has let go of the file, or has
read as much as it holds and will go on with the copy; one that is under way is given up. While the program reads large
files at the source, others are copied only where that does not slow it down (`Beside`), and no more of them than it is
reading, until it opens those copies: it is not known whether it ever will. Later, too, no more are copied at a time
than the program read at a time. Afterwards files that the program has not read yet come before those that it has read.
In a node group all nodes tell each other what their programs read at the source, and each defers accordingly: a
node whose own programs read judges what they lose, one where only those of other nodes read copies no large file
meanwhile. What is copied beside a program there several nodes bring together (`JointCopies`).
A copy under way of which programs are served what has arrived goes on beside them (`Followed`). One is begun for a
program that reads a file in order: it reads ahead of the program, with more requests at a time. And one is begun for a
program that has read much of a file in any order, by calls or in page faults: it is copied while the program computes.
Callers pass `now`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from itertools import islice

from hpcstage.daemon.queue.beside import Beside, BytesRead, PaceBeside
from hpcstage.daemon.queue.flights import Flights
from hpcstage.daemon.queue.followed import Followed
from hpcstage.daemon.queue.rates import Estimates
from hpcstage.daemon.queue.sourcereads import LED_BYTES, LED_SHARE, ReadBefore, SourceReads
from hpcstage.daemon.queue.states import FINAL, LOOK_LIMIT, PEER_WAITS, READER, SOURCE_WAITS, FileState
from hpcstage.protocol.arriving import Priority


class JointCopies:
    """Owns with whom each such file is brought."""

    def __init__(self) -> None:
        self.own = 0
        """This node."""
        self.present: Collection[int] = ()
        """The nodes that may take part, in the order of their numbers; none while there is no group."""
        self._nodes: dict[int, tuple[int, ...]] = {}
        self._untold: dict[int, tuple[int, ...]] = {}

    @property
    def is_possible(self) -> bool:
        """Whether there are others to bring a file with."""
        return len(self.present) > 1

    def begin(self, id_: int, nodes: Collection[int]) -> None:
        """Has this node begin to bring a file with these nodes, which are to be told."""
        found = tuple(node for node in self.present if node in nodes or node == self.own)
        if len(found) > 1:
            self._nodes[id_] = self._untold[id_] = found

    def told(self, id_: int, nodes: Collection[int]) -> bool:
        """Notes that another node has begun to bring a file. Returns whether this one takes part."""
        if self.own not in nodes or not self.is_possible:
            return False
        self._nodes[id_] = tuple(nodes)
        return True

    def nodes(self, id_: int) -> tuple[int, ...]:
        """Returns the nodes that bring a file with this one; none if it is brought by this one alone."""
        return self._nodes.get(id_, ())

    @property
    def ids(self) -> Collection[int]:
        """The files that are brought so now, or about to be."""
        return self._nodes.keys()

    def end(self, id_: int) -> None:
        """Notes that this node's copy has ended."""
        self._nodes.pop(id_, None)
        self._untold.pop(id_, None)

    def untold(self) -> Mapping[int, tuple[int, ...]]:
        """Returns what other nodes are to be told, once."""
        untold, self._untold = self._untold, {}
        return untold


LARGE_S = 0.25
LEAST_BYTES = 16 << 20
MOST_TRIES = 3
"""The most times that the copying of one file is begun."""
MOST_WAIT_S, NEARLY_DONE = 1.0, 0.75
"""A program waits for a copy of which NEARLY_DONE is there, if the rest is expected within MOST_WAIT_S."""
FOLLOWED_SHARE = 0.25
"""A copy of which this share is there when its file is opened goes on."""
CATCH_UP_S = 1.5
"""A copy that begins behind a program that reads in order has so much longer."""


class Deferral(Enum):
    """Why a large file is not copied though it is its turn."""

    READ = "a program reads it at the source"
    PEER = "the node that was asked for it does not copy it now"
    TRIED = "its copying was begun MOST_TRIES times"
    ENOUGH = "as many copies are ahead of the program as it reads files, or one more would slow it down"


class Large:
    """Knows which copies of large files are ahead of the program and which are deferred."""

    def __init__(self, flights: Flights, estimates: Estimates, *, is_alone: bool) -> None:
        """`is_alone`: no other node stages the same datasets."""
        self.joint = JointCopies()
        self.reads = SourceReads()
        self.deferred: set[int] = set()
        """Files that were not copied when it was their turn, since programs read them at the source."""
        self.ahead: set[int] = set()
        """Ids that are copied or being copied and that the program has not opened since: maybe of no use."""
        self.shown: set[int] = set()
        """Ids in flight of which programs see what has arrived."""
        self.followed = Followed()
        self.led: set[int] = set()
        """Files that the program reads at the source, whose copies are to begin beside it."""
        self._alone: dict[int, float] = {}
        """Of those that it reads in any order: how fast it read alone, in bytes per second."""
        self._queue: dict[int, None] = {}
        """The deferred files of all reasons, in that order."""
        self._flights = flights
        self._states = flights.states
        self._estimates = estimates
        self._beside = Beside()
        self._is_alone = is_alone
        self._before = ReadBefore()
        self._led_once: set[int] = set()
        self._told_early: dict[int, Collection[int]] = {}
        """Files of which other nodes told that they bring them while a copy of this node's own was under way."""
        self._in_order: set[int] = set()
        """Files of which programs of this node have read something in order."""
        self._tries: Counter[int] = Counter()
        self._readers = 0
        """The most files that the program had open at the source at the same time."""

    def is_large(self, id_: int) -> bool:
        """Returns whether a file is large, so that its copying may be deferred."""
        size = self._states.size(id_)
        return size > LEAST_BYTES and size > LARGE_S * self._estimates.all_bytes_per_s

    # ---- what is deferred

    def deferral(self, id_: int, now: float) -> Deferral | None:
        """Returns why a large file whose turn it is must not be copied now, and notes those that a program reads."""
        if id_ not in self.led and self.is_read_at_source(id_, now):
            self.deferred.add(id_)
            return Deferral.READ
        if self._tries[id_] >= MOST_TRIES:
            return Deferral.TRIED
        return Deferral.ENOUGH if id_ not in self.led and self.are_enough(now) else None

    def note_deferred(self, id_: int, now: float) -> None:
        """Notes a file that is not brought now though it is its turn, if a program reads it at the source."""
        if self.reads.has(id_, now):
            self.deferred.add(id_)

    @property
    def uncopied(self) -> set[int]:
        """The deferred files that have not come since: they were not written to, and no copy is under way or
        has failed."""
        others = (FileState.FLYING, FileState.FAILED, FileState.VOID)
        return {id_ for id_ in self.deferred if self._states.of(id_) not in others}

    @property
    def read_again(self) -> Collection[int]:
        """The files that the program reads at the source for the second time."""
        return self._before.again if self._is_alone else ()

    def is_read_at_source(self, id_: int, now: float) -> bool:
        """Returns whether a program reads the file at the source, and not yet for the second time."""
        return self.reads.has(id_, now) and id_ not in self.read_again

    def are_enough(self, now: float) -> bool:
        """Returns whether the copies ahead of the program are as many as the files that it reads at the source."""
        reads = self.reads.count(now)
        return self._must_not_slow(now) or 0 < min(reads, self._readers or reads) <= len(self.ahead)

    def are_enough_in_flight(self) -> bool:
        """Returns whether as many are being copied as the program has read at a time at the source: a copy that is not
        complete when the program opens the file is of no use."""
        return 0 < self._readers <= sum(map(self.is_large, self._flights.needed()))

    def defer(self, id_: int) -> None:
        """Puts a large file behind those that were deferred before."""
        self._queue.pop(id_, None)
        self._queue[id_] = None

    def pop_deferred(self, sought: int, deferral: Callable[[int, float], Deferral | None], now: float) -> int | None:
        """Takes out a file with the byte `sought` for which there is no `deferral` any more; what the program has read
        comes last."""
        for id_ in sorted(islice(self._queue, LOOK_LIMIT), key=self.deferred.__contains__):
            cell = self._states.cells[id_] & READER
            if cell == sought and deferral(id_, now) is None:
                del self._queue[id_]
                return id_
            if cell not in (SOURCE_WAITS, PEER_WAITS):
                del self._queue[id_]
        return None

    def _must_not_slow(self, now: float) -> bool:
        """Returns whether no other large file may be copied now, since that slows the program's reading down, or might,
        or takes its bandwidth from the copy of what the program reads. What programs of other nodes lose is known
        there."""
        if not self.reads.count(now):
            return False
        return bool(self.led) or self._beside.pace is PaceBeside.NOT or not self.reads.are_here(now)

    def priority(self, id_: int, now: float) -> Priority:
        """Returns how the copy of a file gives way to programs that read the source."""
        if id_ in self.read_again:
            return Priority.FULL
        if id_ in self.led or id_ in self.followed.ids:
            return Priority.BELOW_CALLS if id_ in self._alone or id_ in self.followed.yielding else Priority.FULL
        if not self.reads.are_here(now):
            return Priority.FULL
        if self._beside.is_sprinting:
            return Priority.TRIAL
        return Priority.FULL if self._beside.pace is PaceBeside.FULL else Priority.BELOW_PROGRAMS

    @property
    def is_sprinting(self) -> bool:
        """Whether it is to be seen soon if copying slows the program down."""
        return self._beside.is_sprinting

    def read_meanwhile(self, now: float) -> list[int]:
        """Returns the transfers in flight whose files the program reads at the source meanwhile, with no use of what
        has arrived."""
        followed = self.followed.ids
        return [id_ for id_ in self._flights.needed() if self.is_read_at_source(id_, now) and id_ not in followed]

    def slowing(self, now: float) -> list[int]:
        """Returns transfers of other large files that would slow the program's reading down and are not nearly done."""
        if not self._must_not_slow(now):
            return []
        others = set(self._copied_here()).difference(self.followed.ids)
        found = [id_ for id_ in others if self.is_large(id_) and not self.is_read_at_source(id_, now)]
        return [id_ for id_ in found if self._flights.copied(id_) < NEARLY_DONE * self._states.size(id_)]

    def _copied_here(self) -> list[int]:
        """Returns the transfers in flight that this node reads at the source."""
        return [id_ for id_ in self._flights.needed() if id_ not in self._flights.asked]

    def is_worth_waiting(self, id_: int, now: float) -> bool:
        """Returns whether a program waits for the rest of a copy under way: never for long, as it may read little, and
        not for one that yields to programs that wait."""
        if self.priority(id_, now) > Priority.TRIAL:
            return False
        size, copied = self._states.size(id_), self._flights.copied(id_)
        return copied >= NEARLY_DONE * size and (size - copied) * self._flights.took_s(id_, now) <= MOST_WAIT_S * copied

    # ---- what happened

    def opened_under_way(self, id_: int, now: float) -> None:
        """Notes that a program opens a file at the source whose copy is under way."""
        goes_on = self._is_alone and self._flights.copied(id_) >= FOLLOWED_SHARE * self._states.size(id_)
        is_for_others = bool(self.joint.nodes(id_))
        if id_ in self.shown and (goes_on or is_for_others):
            self.followed.begin(id_, now, for_others=is_for_others)

    def read_in_order(self, id_: int, size_bytes: int) -> None:
        """Notes that a program has read so many bytes of a file in a row at the source. If that is much of it, the copy
        begins, once: on all nodes."""
        if size_bytes:
            self._in_order.add(id_)
        if size_bytes >= min(LED_SHARE * self._states.size(id_), LED_BYTES) and self._lead(id_):
            self.joint.begin(id_, self.joint.present)

    def _read_much(self, id_: int, alone: float, now: float) -> None:
        """Notes that a program has read much of a file in any order, at so many bytes per second. The copy begins where
        programs read the file: elsewhere it would not know when to yield to them."""
        if self._lead(id_):
            self._alone[id_] = alone
            self.joint.begin(id_, self.reads.nodes(id_, now))

    def may_be_led(self, now: float) -> list[int]:
        """Returns the files that programs read at the source and whose copies may yet begin beside them."""
        found = self.reads.ids(now) if self._leads else []
        return [id_ for id_ in found if self.is_large(id_) and self._may_lead(id_)]

    def read_by_faults(self, id_: int, now: float) -> None:
        """Notes that programs have read much of a file in page faults. How fast is not known, so its copy yields for as
        long as they read."""
        self._read_much(id_, 0.0, now)

    def together_with(self, id_: int, nodes: Collection[int], now: float) -> None:
        """Notes that other nodes begin to bring a file. This node brings its share, if it is one of them."""
        if id_ >= len(self._states.cells) or not self.is_large(id_) or id_ in self._led_once:
            return
        if self._states.of(id_) is FileState.FLYING:
            self._told_early[id_] = nodes
            return
        begins = self._may_lead(id_) and self.joint.told(id_, nodes) and self._lead(id_)
        if begins and self.reads.is_here(id_, now) and id_ not in self._in_order:
            self._alone[id_] = 0.0

    def join_late(self, id_: int, now: float) -> None:
        """Has this node join those that bring a file, if they told so before it gave up a copy of its own."""
        if (nodes := self._told_early.pop(id_, None)) is not None:
            self.together_with(id_, nodes, now)

    @property
    def _leads(self) -> bool:
        """Whether copies begin beside programs: on a single node, or where other nodes bring them, too."""
        return self._is_alone or self.joint.is_possible

    def _may_lead(self, id_: int) -> bool:
        state = self._states.of(id_)
        waits = state is not FileState.FLYING if self._is_alone else state is FileState.WAITING
        return waits and id_ not in self._led_once

    def _lead(self, id_: int) -> bool:
        """Has the copy begin beside the program that reads the file, once. Returns whether it is to begin."""
        if not self._leads or not self._may_lead(id_):
            return False
        if self._states.is_from_peer(id_):
            self._states.fetch_here(id_)
            self.defer(id_)  # the order may have passed over it
        self._led_once.add(id_)
        self.led.add(id_)
        return True

    def next_led(self) -> int | None:
        """Returns a file whose copy is to begin beside the program that reads it, whatever its turn: what a program
        needs comes before what nobody may ever read."""
        cells, tries = self._states.cells, self._tries
        found = (id_ for id_ in self.led if cells[id_] & READER == SOURCE_WAITS and tries[id_] < MOST_TRIES)
        return next(found, None)

    def is_read_in_order(self, id_: int) -> bool:
        """Returns whether a copy is to begin beside a program that reads its file in order."""
        return id_ in self.led and id_ not in self._alone

    def hidden(self, id_: int) -> None:
        """Notes that a transfer has ended."""
        self.led.discard(id_)
        self.joint.end(id_)
        self._alone.pop(id_, None)
        self.shown.discard(id_)
        self.followed.end(id_)

    def looked(self, open_at_source: Collection[int], read: BytesRead) -> None:
        """Notes which large files the program has open at the source now, and what was read until now."""
        self._readers = max(self._readers, len(open_at_source))
        if self._leads:
            self._before.look({id_: self._states.size(id_) for id_ in open_at_source}, read)
            for id_, alone in self._before.much.items():
                self._read_much(id_, alone, read.at)
        copies = any(map(self.is_large, self._copied_here()))
        self._beside.look(read, reads=self.reads.are_here(read.at), copies=copies)

    def read_elsewhere(self, ids: Iterable[int], node: int, now: float) -> None:
        """Notes that programs of another node read these files at the source. A copy that is nearly here is finished
        all the same."""
        states, flights = self._states, self._flights
        for id_ in ids:
            if id_ < len(states.cells) and self.is_large(id_) and states.of(id_) not in FINAL:
                is_copied = id_ in flights.started and id_ not in flights.asked
                if not (is_copied and self.is_worth_waiting(id_, now)):
                    self.reads.elsewhere(id_, node, now)

    def begun(self, id_: int, now: float) -> None:
        """Notes that the copying of a file begins."""
        if id_ in self.led:
            is_for_others = bool(self.joint.nodes(id_))
            self.followed.begin(id_, now + CATCH_UP_S, self._alone.get(id_), for_others=is_for_others)
        self._flights.measure(id_)
        self.deferred.discard(id_)
        self._tries[id_] += 1
        self.ahead.add(id_)

    def taken_back(self, id_: int) -> None:
        """Notes that the copying of a file was given up for reasons that have nothing to do with the file."""
        self.ahead.discard(id_)
        self._tries[id_] = max(0, self._tries[id_] - 1)
