"""Decides which large files are copied while programs read large files at the source, by `plan.rule`. Pure.

A file is large if it has more than LARGE_BYTES and the source is busy with it for more than LARGE_S. Programs read such
files at the source until their copies are whole, and are served what has arrived. While programs of this node have one
open there, of large files only this is copied: what follows their readers in order, and, of one file at a time, as much
as they read of it. Other transfers are given up and begin again later. Afterwards files that no program has read come
first.

In a node group all nodes tell each other what their programs read at the source; a node where only programs of others
read copies no large file meanwhile, but for those that nodes bring together (`JointCopies`): what programs of one node
are followed through all nodes bring, what stands aside those whose programs read it. Callers pass `now`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import partial
from itertools import islice

from hpcstage.daemon.queue.rates import Estimates
from hpcstage.daemon.queue.sourcereads import LET_GO_S, SourceReads
from hpcstage.daemon.queue.states import (
    FINAL,
    LOOK_LIMIT,
    PEER_WAITS,
    READER,
    SOURCE_WAITS,
    FileState,
    Flights,
    States,
)
from hpcstage.plan import rule
from hpcstage.plan.blocks import LARGE_BYTES
from hpcstage.plan.rule import FileReads
from hpcstage.protocol.arriving import LEAST_STRIPE_BYTES, Priority

LARGE_S = 0.25
MOST_TRIES = 3
"""The most times that the copying of one file is begun."""
MOST_WAIT_S, NEARLY_DONE = 1.0, 0.75
"""A program that opens a file waits for a copy of which NEARLY_DONE is there, if the rest is expected within
MOST_WAIT_S."""


class WhyNot(Enum):
    """Why a large file is not brought though it is its turn."""

    READ = "programs read large files at the source"
    PEER = "the node that was asked for it does not copy it now"
    TRIED = "its copying was begun MOST_TRIES times"


class JointCopies:
    """Owns which large files this node brings together with others, each its stripes."""

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


class Large:
    """Knows which large files are copied now and which are deferred."""

    def __init__(
        self,
        states: States,
        flights: Flights,
        estimates: Estimates,
        read_of: Callable[[int], int],
        *,
        is_alone: bool,
    ) -> None:
        """`read_of` returns the bytes of an id that all transfers have read until now; `is_alone`: no other node stages
        the same datasets."""
        self.joint = JointCopies()
        self.reads = SourceReads()
        self.deferred: set[int] = set()
        """Files that were not copied when it was their turn, since programs read them at the source."""
        self.shown: set[int] = set()
        """Ids in flight that have a row: what is copied of them when can be told."""
        self.most_beside = 4
        """The most transfers that are under way beside programs that read: each keeps a thread of a copier."""
        self.ahead: dict[int, int] = {}
        """By id: of files after the one that a reader in order is at, the bytes that follow it. The first is next."""
        self.aside: int | None = None
        """The file of which the rest is brought."""
        self._here: list[int] = []
        """The files that programs of this node have open at the source."""
        self._followed: list[int] = []
        self._beyond_bytes = 0
        """What follows a reader beyond those files."""
        self._before: dict[int, int] = {}
        """By id in flight: what was copied of it before programs read."""
        self._queue: dict[int, None] = {}
        """The deferred files of all reasons, in that order."""
        self._flights = flights
        self._states = states
        self._estimates = estimates
        self._read_of = read_of
        self._is_alone = is_alone
        self._read_before: dict[int, int] = {}
        """By id: what earlier transfers had read when the last one began."""
        self._joined_once: set[int] = set()
        self._anew: set[int] = set()
        """Ids in flight that several nodes are to bring, so that their transfers begin anew."""
        self._told_early: dict[int, Collection[int]] = {}
        """Files of which other nodes told that they bring them while a copy of this node's own was under way."""
        self._tries: Counter[int] = Counter()
        self._not_before: dict[int, float] = {}
        """By id: the time before which another node is not asked for a file again."""

    def is_large(self, id_: int) -> bool:
        """Returns whether a file is large, so that its copying may be deferred."""
        size = self._states.size(id_)
        return size > LARGE_BYTES and size > LARGE_S * self._estimates.all_bytes_per_s

    # ---- what programs read, and what is copied therefore

    def look(self, of: Callable[[int], FileReads], now: float) -> None:
        """Decides anew. `of` returns what programs of this node have read of a file."""
        flying = [id_ for id_ in self._copied_here() if self.is_large(id_)]
        self.reads.drop([id_ for id_ in self.reads.ids(now) if self._states.of(id_) is FileState.STORED])
        if not self.reads.are_here(now):
            self._before = {id_: self._copied(id_) for id_ in flying}
            self.aside, self._here, self._followed, self.ahead, self._beyond_bytes = None, [], [], {}, 0
            return
        self._here = here = [id_ for id_ in self.reads.ids(now) if self.reads.is_here(id_, now) and self.is_large(id_)]
        self.deferred.update(here)
        found = {id_: of(id_) for id_ in (*here, *flying)}
        self._followed = [id_ for id_ in here if found[id_].windows() and self._may_bring(id_)]
        credits = {id_: reads.credit_bytes - self._spent(id_) for id_, reads in found.items() if self._may_bring(id_)}
        self.aside = rule.set_aside(credits, self.aside, LEAST_STRIPE_BYTES)
        self._go_ahead(max((found[id_].beyond_bytes for id_ in here), default=0))
        for id_ in self._wanted:
            self._lead(id_, now)

    def _may_bring(self, id_: int) -> bool:
        state = self._states.of(id_)
        if state is FileState.FLYING:
            return id_ in self.shown and id_ not in self._flights.asked
        waits = state is FileState.WAITING or (self._is_alone and state is FileState.PROMOTED)
        return waits and (self._is_alone or self.joint.is_possible) and self._tries[id_] < MOST_TRIES

    def _spent(self, id_: int) -> int:
        is_flying = self._states.of(id_) is FileState.FLYING
        return self._copied(id_) - self._before.get(id_, 0) if is_flying else 0

    def _go_ahead(self, beyond_bytes: int) -> None:
        """Has so many bytes of the next files follow a reader. One that has begun stays until it is here, if only
        paused."""
        self.ahead = {id_: 0 for id_ in self.ahead if self._states.of(id_) is FileState.FLYING}
        for id_ in self.ahead:
            self.ahead[id_] = min(max(0, beyond_bytes), self._states.size(id_))
            beyond_bytes -= self._states.size(id_)
        self._beyond_bytes = max(0, beyond_bytes)

    @property
    def _wanted(self) -> list[int]:
        """The files that programs read and that are copied meanwhile."""
        return self._followed if self.aside is None else [*self._followed, self.aside]

    def _lead(self, id_: int, now: float) -> None:
        """Has this node read a file at the source that its programs read. A copy under way that other nodes are to
        bring, too, begins anew."""
        if self._states.of(id_) is not FileState.FLYING:
            self._fetch_here(id_)
        elif id_ not in self._anew and not self._is_nearly_done(id_) and self._others(id_, now):
            self._anew.add(id_)
            self.taken_back(id_)

    def _fetch_here(self, id_: int) -> None:
        if self._states.is_from_peer(id_):
            self._states.fetch_here(id_)
            self._requeue(id_)  # the order may have passed over it

    def _others(self, id_: int, now: float) -> Collection[int]:
        """Returns the nodes that are to bring a file, too, with this one, if that is to be begun: once."""
        nodes = self.joint.present if id_ in self._followed else self.reads.nodes(id_, now)
        is_alone = id_ in self._joined_once or all(node == self.joint.own for node in nodes)
        return () if is_alone else nodes

    def next_wanted(self, now: float) -> int | None:
        """Returns a file whose copy is to begin now whatever its turn, since programs read."""
        joint = [id_ for id_ in self.joint.ids if self._waits_here(id_)]
        if joint:
            return joint[0]
        if not self._wanted or self._are_enough():
            return None
        found = next(filter(self._waits_here, self._wanted), None)
        if found is not None and (others := self._others(found, now)):
            self._joined_once.add(found)
            self.joint.begin(found, others)
        return found

    def _waits_here(self, id_: int) -> bool:
        return self._states.cells[id_] & READER == SOURCE_WAITS and self._tries[id_] < MOST_TRIES

    def _are_enough(self) -> bool:
        return sum(map(self.is_large, self._copied_here())) >= self.most_beside

    @property
    def beside(self) -> int:
        """How many transfers are under way beside programs that read: they leave the source alone most of the time."""
        return sum(map(self.is_large, self.shown)) if self._here else 0

    def priority(self, id_: int, now: float) -> Priority:
        """Returns what of a file in flight is copied now."""
        is_for_others = bool(self.joint.nodes(id_)) and bool(self.reads.count(now))
        if not self.is_large(id_) or not (is_for_others or self.reads.are_here(now)):
            return Priority.FULL
        return Priority.ASIDE if id_ == self.aside else Priority.FOLLOWS

    def given_up(self, of: Callable[[int], FileReads], now: float) -> list[int]:
        """Returns the transfers in flight that are not to go on now."""
        if not self.reads.count(now):
            return []
        is_here = self.reads.are_here(now)
        found = [id_ for id_ in self._copied_here() if self.is_large(id_) and id_ not in self.joint.ids]
        goes_on = partial(self._goes_on, of, now) if is_here else self._is_nearly_done
        return [id_ for id_ in found if not goes_on(id_)]

    def _is_nearly_done(self, id_: int) -> bool:
        return self._copied(id_) >= NEARLY_DONE * self._states.size(id_)

    def _goes_on(self, of: Callable[[int], FileReads], now: float, id_: int) -> bool:
        is_needed = self.reads.is_here(id_, now) or id_ in self.ahead or of(id_).credit_bytes > self._spent(id_)
        return id_ in self.shown and id_ not in self._anew and is_needed

    def _copied(self, id_: int) -> int:
        """Returns the bytes of a file that its transfer has read."""
        return max(0, self._read_of(id_) - self._read_before.get(id_, 0))

    def _copied_here(self) -> list[int]:
        """Returns the transfers in flight that this node reads at the source."""
        return [id_ for id_ in self._flights.needed() if id_ not in self._flights.asked]

    # ---- what is deferred

    def why_not(self, id_: int, now: float) -> WhyNot | None:
        """Returns why a file must not be brought now although it is its turn."""
        if not self.is_large(id_):
            return None
        if self._states.is_from_peer(id_):
            is_too_early = now < self._not_before.get(id_, now)
            return WhyNot.READ if self.reads.has(id_, now) else WhyNot.PEER if is_too_early else None
        if self._tries[id_] >= MOST_TRIES:
            return WhyNot.TRIED
        return None if not self.reads.count(now) or self._comes_ahead(id_, now) else WhyNot.READ

    def _comes_ahead(self, id_: int, now: float) -> bool:
        return self._beyond_bytes > 0 and not self.reads.has(id_, now) and not self._are_enough()

    def may_bring_deferred(self, now: float) -> bool:
        """Returns whether this node may read a file that was deferred."""
        return self._beyond_bytes > 0 or not self.reads.count(now)

    def defer(self, id_: int, now: float) -> None:
        """Puts a file that is not brought now behind those that were deferred before, if this node is to keep it."""
        if self.reads.has(id_, now):
            self.deferred.add(id_)
        if self._states.of(id_) is FileState.WAITING:
            self._requeue(id_)

    def not_yet(self, id_: int, now: float) -> None:
        """Notes that the node that was asked for a file does not copy it now; it is asked again later."""
        self._not_before[id_] = now + LET_GO_S
        self.defer(id_, now)

    def _requeue(self, id_: int) -> None:
        self._queue.pop(id_, None)
        self._queue[id_] = None

    @property
    def uncopied(self) -> set[int]:
        """The deferred files that have not come since: they were not written to, no copy has failed, and none is under
        way but beside the programs that read them."""
        others = (FileState.FAILED, FileState.VOID)
        return {id_ for id_ in self.deferred if self._states.of(id_) not in others and not self._comes(id_)}

    def _comes(self, id_: int) -> bool:
        return self._states.of(id_) is FileState.FLYING and id_ not in self._here

    def pop_deferred(self, sought: int, now: float) -> int | None:
        """Takes out a file with the byte `sought` that may be brought now; what the program has read comes last."""
        for id_ in sorted(islice(self._queue, LOOK_LIMIT), key=self.deferred.__contains__):
            cell = self._states.cells[id_] & READER
            if cell == sought and self.why_not(id_, now) is None:
                del self._queue[id_]
                return id_
            if cell not in (SOURCE_WAITS, PEER_WAITS):
                del self._queue[id_]
        return None

    def is_worth_waiting(self, id_: int, now: float) -> bool:
        """Returns whether a program that opens a file waits for the rest of its copy: never for long, as it may read
        little, and not while programs read others at the source."""
        if self.reads.are_here(now):
            return False
        size, copied = self._states.size(id_), self._copied(id_)
        return self._is_nearly_done(id_) and (size - copied) * self._flights.took_s(id_, now) <= MOST_WAIT_S * copied

    # ---- what happened

    def may_be_mapped(self, now: float) -> list[int]:
        """Returns the files that programs read at the source and whose copies may begin beside them."""
        return [id_ for id_ in self.reads.ids(now) if self.is_large(id_) and self._states.of(id_) not in FINAL]

    def together_with(self, id_: int, nodes: Collection[int]) -> None:
        """Notes that other nodes begin to bring a file. This node brings its share, if it is one of them."""
        if id_ >= len(self._states.cells) or not self.is_large(id_) or id_ in self._joined_once:
            return
        if self._states.of(id_) is FileState.FLYING:
            self._told_early[id_] = nodes
        elif self._may_bring(id_) and self.joint.told(id_, nodes):
            self._joined_once.add(id_)
            self._fetch_here(id_)

    def join_late(self, id_: int) -> None:
        """Has this node join those that bring a file, if they told so before it gave up a copy of its own."""
        if (nodes := self._told_early.pop(id_, None)) is not None:
            self.together_with(id_, nodes)

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
        comes_ahead = id_ not in self._wanted and id_ not in self.joint.ids
        if comes_ahead and self._beyond_bytes > 0 and self.reads.count(now):
            self.ahead[id_] = min(self._beyond_bytes, self._states.size(id_))
            self._beyond_bytes -= self.ahead[id_]
        self._read_before[id_] = self._read_of(id_)
        self._before.pop(id_, None)
        self.deferred.discard(id_)
        self._tries[id_] += 1

    def hidden(self, id_: int) -> None:
        """Notes that a transfer has ended."""
        self.joint.end(id_)
        self.shown.discard(id_)
        self._anew.discard(id_)
        if self.aside == id_:
            self.aside = None

    def taken_back(self, id_: int) -> None:
        """Notes that the copying of a file was given up for reasons that have nothing to do with the file."""
        self._tries[id_] = max(0, self._tries[id_] - 1)
