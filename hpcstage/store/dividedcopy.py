"""Brings this node's stripes of a file that is divided among nodes, and has them for the whole run; beside them comes
what readers in order need next of the others' (`window`), from the nodes that have it, and goes again.

The incoming file is sparse and is never published. What this node does not have is read at the source by the programs.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from hpcstage.plan.placement.division import own_bytes, window_stripes
from hpcstage.plan.types import ManifestEntry
from hpcstage.protocol import nodedir
from hpcstage.protocol.arriving import Priority
from hpcstage.store import copyfile
from hpcstage.store.arrivals import Arrival, is_as_listed
from hpcstage.store.arrivingrows import StripeShare
from hpcstage.store.copyfile import CopyError, CopyJob, CopyOutcome, CopyWorker, Status
from hpcstage.store.counters import ThreadStats
from hpcstage.store.largecopy import CHUNK_BYTES_AT, MOST_THREADS, QUICK_NS, SLOW_NS, SLOW_THREADS, Pacer
from hpcstage.store.peerstripes import PeerStripes
from hpcstage.store.programreads import ProgramReads
from hpcstage.store.window import READS_S, Window

READ_LOOK_S, IDLE_LOOK_S = 0.003, 0.05
"""The interval at which it is looked what readers in order need, while there are some, and else."""
REACH = 2
"""For a reader in order a node brings its stripes so many windows ahead, whoever else reads the source."""
AGAIN_S = 10.0
"""Nodes that did not give what they were asked for are asked again after this time."""


@dataclass(frozen=True)
class Calls:
    """What a divided copy calls."""

    invite: Callable[[DividedCopy], object]
    """Makes one more thread call `work`."""
    show: Callable[[os.stat_result], Arrival]
    """Returns the stripes of the file once it is open."""
    kept: Callable[[DividedCopy, CopyOutcome], object]
    """Takes what was brought, once all stripes of this node are here."""
    ended: Callable[[DividedCopy], object]
    """Is called once nothing is shown any more; see `outcome`."""


class DividedCopy:
    """Owns what this node has of one file. Threads call `work`, which brings the stripes that are this node's; what a
    reader needs comes first. A thread of its own gets those of the others, and ends it all when it is cancelled, or
    when the source is not what it was."""

    def __init__(
        self, id_: int, job: CopyJob, listed: ManifestEntry, calls: Calls, pace: Pacer | None, stats: ThreadStats
    ) -> None:
        """`stats` are the counters of the thread of its own."""
        self.id = id_
        self.job = job
        self.outcome = CopyOutcome()
        self.cancelled = False
        self._listed = listed
        self._calls = calls
        self._pace = pace
        self._stats = stats
        self._lock = threading.Lock()
        self._left = threading.Condition(self._lock)
        self._writing = threading.Lock()
        self._source = self._target = -1
        self._inside = 0
        """The threads that bring a stripe."""
        self._invited = 1
        self._most_threads = 1
        self._is_whole = False
        self._fronts: list[int] = []
        """What readers in order need next, on this node or on others."""
        self._wished: tuple[int, float] | None = None
        """The last stripe that another node was waiting for, and when."""
        self._reads: ProgramReads | None = None
        self._peer_stripes: PeerStripes | None = None
        self._again_at = 0.0
        self._before: os.stat_result
        self._arrival: Arrival
        self._share: StripeShare
        self._own: range
        self._reach: int
        self._window: Window

    # ---- the beginning

    def open(self, worker: CopyWorker) -> bool:
        """Opens source and incoming file. Returns False if that failed, which is reported as any end."""
        try:
            self._source = copyfile.open_source(self.job, worker.stats, self.outcome)
            self._before = copyfile.regular(self._source)
            self.outcome.mtime_ns = self._before.st_mtime_ns
            if not is_as_listed(self._before, self._listed):
                raise CopyError(Status.CHANGED)
            self._target = copyfile.create(self.job.temporary)
            with copyfile.local_errors():
                os.ftruncate(self._target, self._before.st_size)
            self._divide()
        except CopyError as error:
            self._fail(error)
            self._close()
            self._calls.ended(self)
            return False
        with contextlib.suppress(OSError):  # the kernel would read ahead what other nodes read
            os.posix_fadvise(self._source, 0, 0, os.POSIX_FADV_RANDOM)
        threading.Thread(target=self._keep, daemon=True).start()
        return True

    def _divide(self) -> None:
        self._arrival = arrival = self._calls.show(self._before)
        if not arrival.is_divided or arrival.share is None:  # there is no row that programs could see
            raise CopyError(Status.LOCAL_ERROR)
        self._share = arrival.share
        self._own = arrival.share.stripes(arrival.share.own, arrival.stripes)
        can_free = copyfile.punch(self._target, 0, arrival.stripe_bytes)
        room = window_stripes(arrival.stripe_bytes) if can_free else 0
        self._window = Window(arrival.stripes, room, self._own.__contains__)
        self._reach = REACH * window_stripes(arrival.stripe_bytes)

    # ---- the stripes of this node

    def work(self, worker: CopyWorker) -> bool:
        """Brings stripes until there are none for this thread. Returns False: this thread does not report the end."""
        with self._lock:
            self._invited -= 1
        while (stripe := self._claim()) is not None:
            part = CopyOutcome()
            try:
                self._copy(worker, stripe, part)
            except CopyError as error:
                self._fail(error)
            self._leave(part)
        return False

    def _claim(self) -> int | None:
        with self._lock:
            stripe = self._next() if self._inside < self._most_inside else None
            if stripe is not None:
                self._arrival.coming(range(stripe, stripe + 1))
                self._inside += 1
            return stripe

    @property
    def _most_inside(self) -> int:
        """How many threads may bring a stripe: one of them may wait for programs with a stripe that no reader needs."""
        return max(SLOW_THREADS, self._most_threads) if self._fronts else self._most_threads

    def _next(self) -> int | None:
        """Returns the stripe to be brought next: the one that a reader in order comes to first, as far as it is near,
        else the first."""
        if self._ends or self._is_whole:
            return None
        found: list[tuple[int, int]] = []
        for front in self._fronts:
            stripe = self._arrival.absent_of(self._own_from(front))
            if stripe is not None and stripe - front < self._reach:
                found.append((stripe - front, stripe))
        if found:
            return min(found)[1]
        return None if self._arrival.priority is Priority.BELOW_OTHER_NODES else self._arrival.absent_of(self._own)

    def _own_from(self, stripe: int) -> range:
        return self._own[max(0, -(-(stripe - self._own.start) // self._own.step)) :]

    @property
    def _ends(self) -> bool:
        """Whether no more is brought: it was cancelled, or something has failed."""
        return self.cancelled or self.outcome.status is not Status.OK

    def _priority(self, stripe: int) -> Priority:
        """Returns how a stripe gives way to programs. What readers in order come to soon is brought at once."""
        is_near = any(0 <= stripe - front < self._reach for front in self._fronts)
        return Priority.FULL if is_near else self._arrival.priority

    def _copy(self, worker: CopyWorker, stripe: int, part: CopyOutcome) -> None:
        """Copies a stripe and shows it, if the source is what it was."""
        start, length = self._place(stripe)
        span = copyfile.FileRange(self._source, self._target, start, length)
        step = partial(self._step, stripe, part, [0])
        copyfile.copy_range(worker, span, part, step, self._writing, CHUNK_BYTES_AT[self._priority(stripe)])
        copyfile.check(self._source, self._before)
        self._arrival.arrived(stripe)

    def _place(self, stripe: int) -> tuple[int, int]:
        start = stripe * self._arrival.stripe_bytes
        return start, min(self._arrival.stripe_bytes, self._before.st_size - start)

    def _step(self, stripe: int, part: CopyOutcome, seen_ns: list[int], size_bytes: int) -> None:
        """Runs before each chunk: ends a cancelled copy, and waits for the rate and for programs. `seen_ns` is for how
        long the stripe had been read before the last chunk."""
        if self._ends:
            raise CopyError(Status.CANCELLED)
        if self._pace is not None:
            self._pace(size_bytes)
        took_ns, seen_ns[0] = part.read_ns - seen_ns[0], part.read_ns
        if (priority := self._priority(stripe)) > Priority.TRIAL:
            with copyfile.local_errors():
                self._reads = self._reads or ProgramReads(Path(nodedir.PAGE))
            self._reads.let_pass(
                took_ns / 1e9, priority, lambda: self._ends or self._priority(stripe) <= Priority.TRIAL
            )

    def _leave(self, part: CopyOutcome) -> None:
        with self._lock:
            self.outcome.read_ns += part.read_ns
            self._inside -= 1
            if self._pace is not None or (not self._fronts and self._arrival.priority > Priority.TRIAL):
                self._most_threads = 1
            elif part.read_ns < QUICK_NS:
                self._most_threads = min(MOST_THREADS, self._most_threads + 1)
            elif part.read_ns > SLOW_NS and self._fronts:
                self._most_threads = max(SLOW_THREADS, self._most_threads - 1)
            self._left.notify_all()

    def _fail(self, error: CopyError) -> None:
        if not self.outcome.status:
            self.outcome.status, self.outcome.errno = error.status, error.errno

    # ---- the thread of its own

    def _keep(self) -> None:
        self._stats.works_on(self.id)
        try:
            while not self._ends:
                self._turn(time.monotonic())
        except CopyError as error:
            self._fail(error)
        except Exception:  # noqa: BLE001  whatever goes wrong with one file ends that file only
            traceback.print_exc()
            self._fail(CopyError(Status.LOCAL_ERROR))
        self._end()

    def _turn(self, now: float) -> None:
        self._look(now)
        look_s = READ_LOOK_S if self._fronts else IDLE_LOOK_S
        others = self._connected(now)
        if others is None:
            time.sleep(look_s)
        else:
            self._ask(others, now)
            for stripe, data in others.answers(look_s):
                if data is None:
                    self._do_without(stripe)
                else:
                    self._take(stripe, data)
        if not self._is_whole and self._arrival.have_arrived(self._own):
            self._is_whole = True
            self._tell()

    def _look(self, now: float) -> None:
        """Looks what readers need, and has as many threads bring it as pays."""
        self._window.look(self._arrival.readers(), now)
        wished = self._arrival.take_wish()
        if wished is not None:
            self._wished = wished, now
        others = [self._wished[0]] if self._wished is not None and now - self._wished[1] < READS_S else []
        self._fronts = [*others, *self._window.fronts(now)]
        with self._lock:
            invites = self._inside + self._invited < self._most_inside and self._next() is not None
            self._invited += invites
        if invites:
            self._calls.invite(self)

    def _tell(self) -> None:
        """Tells that all stripes of this node are here."""
        if self._arrival.priority is not Priority.BELOW_PROGRAMS:  # maybe a program has the source mapped
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._source, 0, 0, os.POSIX_FADV_DONTNEED)
        share = self._share
        size_bytes = own_bytes(self._before.st_size, share.nodes.index(share.own), len(share.nodes))
        self._calls.kept(self, replace(self.outcome, status=Status.DIVIDED, size_bytes=size_bytes))

    # ---- the stripes of other nodes

    def _connected(self, now: float) -> PeerStripes | None:
        """Returns the way to other nodes, which is made anew some time after one of them has failed."""
        is_well = self._peer_stripes is not None and not self._peer_stripes.lost
        if not is_well and self._fronts and now >= self._again_at:
            self._disconnect()
            self._again_at = now + AGAIN_S
            size_bytes, length = self._before.st_size, self._arrival.stripe_bytes
            self._peer_stripes = PeerStripes.connect(self.id, size_bytes, length, self._share)
        return self._peer_stripes

    def _disconnect(self) -> None:
        if self._peer_stripes is not None:
            self._peer_stripes.close()
            self._peer_stripes = None
        for stripe in self._window.coming():
            self._do_without(stripe)

    def _ask(self, others: PeerStripes, now: float) -> None:
        """Asks for what readers need next, as far as there is room."""
        while others.has_room:
            taken = self._window.take(now, lambda stripe: self._share.reader(stripe) not in others.lost)
            if taken is None:
                return
            if taken.instead_of is not None:
                self._evict(taken.instead_of)
            self._arrival.coming(range(taken.stripe, taken.stripe + 1))
            for stripe in others.ask(taken.stripe, now):
                self._do_without(stripe)

    def _evict(self, stripe: int) -> None:
        self._arrival.evict(stripe)
        if not copyfile.punch(self._target, *self._place(stripe)):
            raise CopyError(Status.LOCAL_ERROR)

    def _take(self, stripe: int, data: memoryview) -> None:
        """Writes a stripe that came, and shows it, if the source is what it was."""
        with self._writing:
            copyfile.write_all(self._target, data, stripe * self._arrival.stripe_bytes)
        copyfile.check(self._source, self._before)
        self._arrival.arrived(stripe)
        self._window.came(stripe)
        self._stats.received(len(data))

    def _do_without(self, stripe: int) -> None:
        self._arrival.put_back(range(stripe, stripe + 1))
        self._window.failed(stripe)

    # ---- the end

    def _end(self) -> None:
        """Shows nothing any more, and reports that once no thread uses the files."""
        if not self.outcome.status:
            self.outcome.status = Status.CANCELLED
        self._arrival.hide()
        with self._left:
            self._left.wait_for(lambda: not self._inside)
        self._disconnect()
        self._close()
        self._calls.ended(self)

    def _close(self) -> None:
        """Frees the space, also where programs have the incoming file open."""
        if self._target >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._target, 0)
            copyfile.discard(self.job.temporary)
        for fd in (self._source, self._target):
            if fd >= 0:
                os.close(fd)
        self._source = self._target = -1
