"""The queue of a node in a node group, which also decides what the node asks other nodes for.

Owns the order of requests, the requests that run ahead of a program that announced what it reads, and what happens
after a request failed. `peers.routes` decides which node is asked, `peers.requests` how much may be asked for at a
time. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

from hpcstage.daemon.queue.groupsequences import PASSING
from hpcstage.daemon.queue.large import LET_GO_S
from hpcstage.daemon.queue.queue import FINAL, LOOK_LIMIT, WAIT_FACTOR, Decision, Place, Verdict
from hpcstage.daemon.queue.rates import Estimates
from hpcstage.daemon.queue.sharedqueue import SharedQueue
from hpcstage.plan.blocks import blocks_bytes
from hpcstage.plan.types import Budget
from hpcstage.protocol.shim import Reason

SHORTEST_NEAR_WAIT_S, SHORTEST_FAR_WAIT_S = 2.0, 5.0
"""The least time that a want waits. A wait that ends too early has a file read twice from the source, which a node
group is there to avoid. A file of another node gets longer, since that node may have to read it first."""
LONGEST_QUEUE_S = 1.0
"""The estimate of a wait counts at most this much of the time that the last answers took: answers that took long,
maybe because a node was gone, do not end the asking."""


class GroupQueue(SharedQueue):
    """A shared queue that also hands out requests to other nodes; owns the requests in flight."""

    def __init__(self, sizes: Sequence[int], budget: Budget, order: Sequence[int] = (), **options: Any) -> None:  # noqa: ANN401
        super().__init__(sizes, budget, order, **options)
        self.shortest_wait_s = SHORTEST_NEAR_WAIT_S
        self.linked = False
        """Whether other nodes can be asked now."""
        self.peers = Estimates()
        """How long files that a program waited for took, from the request to the copy."""
        self.is_stalled = False
        """Whether the program has to read what came before this node asks for more ahead of it."""
        self._far_held: deque[int] = deque()
        """Ids that are asked for before the order goes on."""
        self._doubtful: set[int] = set()
        """Ids whose requests were given up while their copies may still come."""
        self._far_aside: dict[int, None] = {}
        """Large files that are not asked for yet, in the order in which it was their turn."""
        self._not_before: dict[int, float] = {}
        """By id: the time before which a large file is not asked for again."""

    def is_asked_for(self, id_: int) -> bool:
        """Returns whether another node was asked for this file and has not answered."""
        return id_ in self._far_flying

    @property
    def asking(self) -> int:
        """The number of ids that were asked for and have not come."""
        return len(self._far_flying)

    @property
    def unplaced(self) -> int:
        """The number of ids that are refused for good where this node keeps only a share, whatever ended the staging;
        0 where it keeps everything."""
        return self._counts[Place.REFUSED] if self.transit.limit_bytes else 0

    @property
    def far_wanted(self) -> int:
        """The number of wanted files that other nodes are still to be asked for, roughly."""
        return len(self._far_promoted)

    def _resettle(self) -> None:
        super()._resettle()
        self._far_held.clear()

    # ---- wants

    def want(self, id_: int, now: float) -> Decision:
        """Answers as any queue does. A file that another node reads is asked for next; while no other node can be
        asked, this node reads it from the source."""
        place = self.place(id_)
        if place in FINAL:
            return super().want(id_, now)
        if self.is_far(id_) and self.is_large(id_) and not self._closed:
            return self._want_large_far(id_, place, now)
        if not self.linked and self.is_far(id_) and id_ not in self._far_flying:
            self._localise(id_)
            if place is Place.PROMOTED:
                self._promoted.append(id_)
        if place is not Place.AWAY:
            return self._want_far(id_, now) if self.is_far(id_) else super().want(id_, now)
        if self._closed:
            return Decision(Verdict.DIRECT, reason=self._closed)
        if not self.transit.can_hold(blocks_bytes(self._sizes[id_])):
            return Decision(Verdict.DIRECT, reason=Reason.FULL)
        self.transit.read(self.transit.oldest_unread(LOOK_LIMIT)[: self._passed()])
        self._move(id_, Place.WAITING)
        decision = self._want_far(id_, now) if self.is_far(id_) else super().want(id_, now)
        if self._places[id_] == Place.WAITING:
            self._move(id_, Place.AWAY)
        return decision

    def _passed(self) -> int:
        """Returns how many of the oldest unread copies the program has probably read: it has gone past them, since it
        wants a file that is not here."""
        return len(self.transit.oldest_unread(LOOK_LIMIT)) // 4

    def _want_far(self, id_: int, now: float) -> Decision:
        size = self._sizes[id_]
        peers = self.peers
        over_s = peers.transfer_s(size) - peers.file_s + min(peers.file_s, LONGEST_QUEUE_S)
        expected_s = over_s + self.estimates.transfer_s(size)
        if self._places[id_] == Place.FLYING:
            expected_s = max(expected_s - (now - self._flying[id_]), expected_s / 8)
        if expected_s > self._patience_s:
            return Decision(Verdict.DIRECT, reason=Reason.LATER)
        return self._wait_far(id_, expected_s, now)

    def _want_large_far(self, id_: int, place: Place, now: float) -> Decision:
        """Lets the program wait for another node's copy if that comes sooner than the file from the source. That node
        says at once if it has no copy."""
        expected_s = self.peers.transfer_s(self._sizes[id_])
        longest_s = min(self._patience_s, self.estimates.transfer_s(self._sizes[id_]))
        has_room = place is not Place.AWAY or self.transit.can_hold(blocks_bytes(self._sizes[id_]))
        if not self.linked or self.is_put_off(id_, now) or expected_s > longest_s or not has_room:
            self.large.read_at_source(id_, now)
            return Decision(Verdict.DIRECT, reason=Reason.LARGE)
        self.large.asked_for(id_)
        if place is Place.AWAY:
            self._move(id_, Place.WAITING)
        return self._wait_far(id_, expected_s, now)

    def _wait_far(self, id_: int, expected_s: float, now: float) -> Decision:
        size = self._sizes[id_]
        self._ahead.pop(id_, None)
        if self._places[id_] == Place.WAITING:
            self._move(id_, Place.PROMOTED)
            self._far_promoted.append(id_)
            self._promoted_bytes += size
        longest_s = min(max(SHORTEST_FAR_WAIT_S, WAIT_FACTOR * expected_s), self._want_cap_s / 2)
        return Decision(Verdict.WAIT, deadline=now + longest_s)

    # ---- asking other nodes

    def next_requests(self, files: int, size_bytes: int, now: float) -> list[int]:
        """Returns ids to ask other nodes for, at most `files` with `size_bytes` together. A larger one is asked for
        only when no other request is in flight. The ids are in flight from here on."""
        chosen: list[int] = []
        passed_over = 0
        while len(chosen) < files and passed_over < LOOK_LIMIT and self.linked and not self._closed:
            id_ = self._pop_far(now)
            if id_ is None:
                break
            if self._put_far_aside(id_, now):
                passed_over += 1
                continue
            wanted = self._places[id_] == Place.PROMOTED
            size = self._sizes[id_]
            if (size > size_bytes and self._far_flying) or not self._fits_now(id_):
                self._hold(id_)
                break
            if not self.room.reserve(id_, size):
                passed_over += 1
                self._move(id_, Place.REFUSED)
                continue
            size_bytes -= size
            self._move(id_, Place.FLYING)
            self._flying[id_] = now
            self._far_flying[id_] = wanted
            if self._flags[id_] & PASSING and not wanted:
                self._ahead[id_] = True
            chosen.append(id_)
        return chosen

    def _pop_far(self, now: float) -> int | None:
        while self._far_promoted:
            id_ = self._far_promoted.popleft()
            if self._places[id_] == Place.PROMOTED and self.is_far(id_):
                self._promoted_bytes -= self._sizes[id_]
                return id_
        while self._far_held:
            id_ = self._far_held.popleft()
            if self._places[id_] in (Place.WAITING, Place.AWAY) and self.is_far(id_):
                return id_
        kept = self._sequences.pop_far() if self._far_waiting else None
        kept = self._pop_far_aside(now) if kept is None else kept
        return self._next_ahead(now) if kept is None else kept

    def _put_far_aside(self, id_: int, now: float) -> bool:
        """Puts a large file aside that a program reads at the source. Returns whether it is not asked for now."""
        if self._places[id_] == Place.PROMOTED or not self.is_put_off(id_, now):
            return False
        self.large.held_back.add(id_)
        if self._places[id_] == Place.WAITING:
            self._far_aside[id_] = None
        return True

    def _pop_far_aside(self, now: float) -> int | None:
        for id_ in list(islice(self._far_aside, LOOK_LIMIT)):
            waits = self._places[id_] == Place.WAITING and self.is_far(id_)
            if waits and self.is_put_off(id_, now):
                continue
            del self._far_aside[id_]
            if waits:
                return id_
        return None

    def is_put_off(self, id_: int, now: float) -> bool:
        """Returns whether a large file is not to be passed between nodes now."""
        return self.is_large(id_) and (self.large.in_use(id_, now) or now < self._not_before.get(id_, now))

    def is_held_back(self, id_: int, now: float) -> bool:
        """Returns whether other nodes that ask for a file are told to ask again later."""
        if self.place(id_) not in (Place.WAITING, Place.AWAY) or not self.is_large(id_):
            return False
        return self.is_put_off(id_, now) or (not self.is_far(id_) and self.large.must_wait(id_, now))

    def read_elsewhere(self, ids: Iterable[int], now: float) -> None:
        """Notes that programs of other nodes read these files at the source. A copy that is nearly here is finished all
        the same."""
        for id_ in ids:
            if id_ < len(self._sizes) and self.is_large(id_) and not self._is_nearly_here(id_, now):
                self.large.read_elsewhere(id_, now)

    def _is_nearly_here(self, id_: int, now: float) -> bool:
        if self.place(id_) is not Place.FLYING or id_ in self._far_flying:
            return self.place(id_) in FINAL
        return self.large.is_worth_waiting(self._sizes[id_], self.copied(id_), now - self._flying[id_])

    def _next_ahead(self, now: float) -> int | None:
        """Returns the next id that the program will read of those that other nodes keep, by the newest order with a
        name that has one; None where there is none or no free budget for it."""
        if not self.transit.limit_bytes:
            return None
        while (id_ := self._sequences.peek_ahead(Place.AWAY)) is not None and self._put_far_aside(id_, now):
            self._sequences.pass_ahead(id_)
        self.is_stalled = id_ is not None and not self.transit.fits_ahead(blocks_bytes(self._sizes[id_]))
        return None if self.is_stalled else id_

    def hasten(self, id_: int) -> None:
        """Has a file asked for next, since another node waits for it."""
        self._far_held.append(id_)

    def _fits_now(self, id_: int) -> bool:
        """Returns False for a file that has to wait until transit copies in flight have come."""
        blocks = blocks_bytes(self._sizes[id_])
        passing = self._flags[id_] & PASSING
        return not passing or not self.transit.can_hold(blocks) or self.transit.fits(blocks)

    def _hold(self, id_: int) -> None:
        if self._places[id_] == Place.PROMOTED:
            self._far_promoted.appendleft(id_)
            self._promoted_bytes += self._sizes[id_]
        else:
            self._far_held.appendleft(id_)

    def _took(self, id_: int, size_bytes: int, took_s: float, now: float) -> None:
        wanted = self._far_flying.pop(id_, None)
        self.large.came(id_)
        if wanted is None:
            super()._took(id_, size_bytes, took_s, now)
        elif wanted:
            self.peers.finished(size_bytes, took_s, now)

    # ---- what became of a request

    def failed(self, id_: int, now: float, *, no_room: bool = False) -> None:
        """See Queue."""
        self._far_flying.pop(id_, None)
        super().failed(id_, now, no_room=no_room)

    def missed(self, id_: int, *, wanted: bool, doubtful: bool = False) -> None:
        """Takes back a request that brought nothing: this node reads the file from the source, next if it is `wanted`.

        `doubtful` says that the copy may come all the same.
        """
        if self._far_flying.pop(id_, None) is None:
            return
        if doubtful:
            self._doubtful.add(id_)
        self._localise(id_)
        if wanted:
            self.requeue(id_)
        else:
            self._put_back(id_)
            self._released.append(id_)

    def postponed(self, id_: int, now: float) -> None:
        """Puts a large file aside that the other node does not copy now; it is asked for again later."""
        if self._far_flying.pop(id_, None) is None:
            return
        self._put_back(id_)
        self._not_before[id_] = now + LET_GO_S
        if self._places[id_] == Place.WAITING:
            self._far_aside[id_] = None

    def _put_back(self, id_: int) -> None:
        self._ahead.pop(id_, None)
        del self._flying[id_]
        self.room.release(id_)
        if self._places[id_] == Place.FLYING:
            self._move(id_, Place.AWAY if self._flags[id_] & PASSING else Place.WAITING)

    def came_late(self, id_: int, size_bytes: int) -> bool:
        """Takes in a copy whose request was given up. Returns False if the caller has to delete it or a transfer under
        way will find it."""
        self._doubtful.discard(id_)
        place = self._places[id_]
        if place not in (Place.WAITING, Place.PROMOTED):
            return place == Place.STORED
        if place == Place.PROMOTED:
            self._promoted_bytes -= self._sizes[id_]
        self.large.came(id_)
        self.room.take(id_, size_bytes)
        self._set_size(id_, size_bytes)
        self._move(id_, Place.STORED)
        return True

    def unlink(self, is_wanted: Callable[[int], bool]) -> None:
        """Notes that no node can be asked any more: ids that were asked for wait again, and wanted ones are read from
        the source."""
        self.linked = False
        for id_ in list(self._far_flying):
            if is_wanted(id_):
                self.missed(id_, wanted=True)
                continue
            del self._far_flying[id_]
            self._put_back(id_)
            if self._places[id_] in (Place.WAITING, Place.AWAY):
                self._far_held.append(id_)
        for id_ in self._far_promoted:
            if self._places[id_] == Place.PROMOTED:
                self._localise(id_)
        self._promote_anew()

    def void(self, ids: Iterable[int]) -> list[int]:
        """See Queue; returns also the ids whose requests were given up and whose copies may still come."""
        ids = list(ids)
        flying = super().void(ids)
        return flying + [id_ for id_ in ids if id_ in self._doubtful and id_ not in self._flying]

    def void_range(self, ids: range) -> tuple[bytes, list[int]]:
        """See Queue; returns also the ids whose requests were given up and whose copies may still come."""
        places, flying = super().void_range(ids)
        return places, flying + [id_ for id_ in self._doubtful if id_ in ids and id_ not in self._flying]
