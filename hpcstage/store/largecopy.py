"""Copies one file in stripes, a large one with several threads, so that a single file, too, is copied at the source's
full speed. While programs of this node read large files at the source, what is copied when is decided by `plan.rule`.
Where several nodes bring a file together, each reads its stripes at the source, and one thread gets the rest from the
others.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hpcstage.plan.rule import Aside
from hpcstage.protocol import nodedir
from hpcstage.protocol.arriving import Priority
from hpcstage.store import copyfile
from hpcstage.store.arrivals import Arrival
from hpcstage.store.copyfile import CopyError, CopyJob, CopyOutcome, CopyWorker, Status
from hpcstage.store.peerstripes import PeerStripes
from hpcstage.store.quiet import Quiet

RANGE_BYTES = 16 << 20
MOST_THREADS = 8
QUICK_NS = 50_000_000
"""One more thread joins as long as a chunk takes less than this: at a slow source, requests of the program would wait
behind those of more threads."""
CACHED_NS = 500_000
"""A chunk that takes less says nothing about the source, if a program reads the file: it may have read it already."""
SLOW_NS, SLOW_THREADS = 2 * QUICK_NS, 2
"""Beside programs that read, threads beyond SLOW_THREADS whose stripes take more than this leave: what a reader needs
next comes sooner from few threads."""

LOOK_EVERY_S, LOOK_S = 0.001, 0.05
"""The intervals at which a thread that stays looks what is to be copied now, and at which the one that gets stripes
from other nodes looks whether the copy was cancelled."""


class Pacer:
    """Delays reads so that they stay below a rate, the first one, too. The threads of a copier share it."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._lock = threading.Lock()
        self._next = 0.0

    def __call__(self, size_bytes: int) -> None:
        """Waits until this many bytes may be read."""
        with self._lock:
            now = time.monotonic()
            self._next = until = max(self._next, now) + size_bytes / self._rate
        time.sleep(until - now)


class BigCopy:
    """Owns the copy of one file in stripes. Threads call `work`; the one that ends last publishes the copy and reports
    the outcome. A thread takes ranges of stripes, in order. While programs of this node read, it takes one stripe at a
    time of what follows a reader, and one thread brings another stripe, which stands aside: to others it is ABSENT, as
    nobody waits for it. Where nothing is to be copied for now, one thread stays. Of a file that several nodes bring,
    one thread asks the others for theirs; this node reads those that it does not get."""

    def __init__(
        self,
        id_: int,
        job: CopyJob,
        pace: Pacer | None,
        invite: Callable[[BigCopy], object],
        show: Callable[[os.stat_result], Arrival] = lambda status: Arrival(status.st_size),
    ) -> None:
        """`invite` makes one more thread call `work`. `show` returns the stripes of the file once it is open."""
        self.id = id_
        self.job = job
        self.outcome = CopyOutcome()
        self.cancelled = False
        self._pace = pace
        self._invite = invite
        self._invitations = 0
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._show = show
        self._quiet: Quiet | None = None
        self._pacing = Aside()
        self._aside: int | None = None
        """The stripe that stands aside."""
        self._beside_bytes = 0
        """What was copied while programs of this node read."""
        self._stays = False
        """Whether a thread waits for something to copy."""
        self._peer_stripes: PeerStripes | None = None
        self._has_begun = self._is_asking = self._has_asked = False
        """Whether a thread has come; whether one asks other nodes, or has done so."""
        self._size_bytes = 0
        self._inside = 0
        self._finished = False
        self._source = self._source_aside = self._target = -1
        """What stands aside has an open file of its own: for others the kernel reads ahead."""
        self._before: os.stat_result
        self._arrival: Arrival

    def open(self, worker: CopyWorker) -> bool:
        """Opens source and copy. Returns False if that failed (see `outcome`)."""
        try:
            self._source = copyfile.open_source(self.job, worker.stats)
            self._before = copyfile.regular(self._source)
            self.outcome.size_bytes, self.outcome.mtime_ns = self._before.st_size, self._before.st_mtime_ns
            self._size_bytes = self._before.st_size
            self._target = copyfile.create(self.job.temporary)
            with copyfile.local_errors():
                if copyfile.is_sparse(self._before):
                    os.ftruncate(self._target, self._size_bytes)
                else:
                    _preallocate(self._target, self._size_bytes)
            self._arrival = self._show(self._before)
            self._join_others()
        except CopyError as error:
            self._fail(error)
            self._finished = True
            self._close()
            copyfile.discard(self.job.temporary)
            return False
        self._invitations = min(1 if self._pace else MOST_THREADS - 1, self._size_bytes // RANGE_BYTES)
        if self._peer_stripes is not None:
            self._invite(self)
        return True

    def work(self, worker: CopyWorker) -> bool:
        """Copies ranges until none is left. Returns True to the one thread that has to report the outcome."""
        asks = self._begins_asking(is_new=True)
        while not (asks and self._ask_others(worker)):
            if self._read_source(worker):
                return True
            asks = self._begins_asking()
            if not asks:
                return False
        return True

    def _read_source(self, worker: CopyWorker) -> bool:
        seen_ns = [0]
        while (stripes := self._claim() or self._await_claim()) is not None:
            part, copied = CopyOutcome(), 0
            step = partial(self._step, part, seen_ns)
            try:
                for stripe in stripes:
                    if self._put_back(range(stripe, stripes.stop), stripes.start):
                        break
                    self._copy(worker, stripe, part, step)
                    copied += 1
            except CopyError as error:
                self._fail(error)
            seen_ns[0] -= part.read_ns
            if self._leave(stripes):
                self._finish(worker)
                return True
            if self._are_too_many(is_slow=part.read_ns > SLOW_NS * copied):
                return False
        with self._lock:
            self._invitations += 1
        return self._end_if_cancelled(worker)

    def _copy(self, worker: CopyWorker, stripe: int, part: CopyOutcome, step: Callable[[int], None]) -> None:
        """Copies a stripe and shows it, if the source is what it was when the copying began."""
        start = stripe * self._arrival.stripe_bytes
        stop = min(start + self._arrival.stripe_bytes, self._size_bytes)
        is_sparse = copyfile.is_sparse(self._before)
        while start < stop:
            chunk_bytes = self._stand_aside(stripe) if stripe == self._aside else None
            source = self._source if chunk_bytes is None else self._source_aside
            length, began_ns = min(stop - start, chunk_bytes or stop), part.read_ns
            span = copyfile.FileRange(source, self._target, start, length, is_sparse)
            copyfile.copy_range(worker, span, part, step, self._writing)
            if chunk_bytes is not None:
                self._pacing.ended(length, part.read_ns - began_ns)
            start += length
        if self._arrival.is_shown:
            copyfile.check(self._source, self._before)
        self._arrival.arrived(stripe)

    def _step(self, part: CopyOutcome, seen_ns: list[int], size_bytes: int) -> None:
        """Runs before each chunk: ends a cancelled copy, invites one more thread, and waits for the rate.

        `seen_ns` is for how long this part had been read before the thread's last chunk: below zero where that was one
        of the part before, as a part may be a single chunk.
        """
        if self.cancelled:
            raise CopyError(Status.CANCELLED)
        took_ns, seen_ns[0] = part.read_ns - seen_ns[0], part.read_ns
        least_ns = CACHED_NS if self._is_beside else 0
        if least_ns < took_ns < QUICK_NS:
            self._invite_one()
        if self._is_beside:
            with self._lock:
                self._beside_bytes += size_bytes
        if self._pace is not None:
            self._pace(size_bytes)

    @property
    def _is_beside(self) -> bool:
        """Whether programs of this node read large files at the source."""
        return self._arrival.priority is not Priority.FULL

    def _invite_one(self) -> None:
        """Has one more thread come, if there is something for it. One that leaves may be invited again."""
        with self._lock:
            has_more = not self._exhausted() and (not self._is_beside or self._next_followed() is not None)
            may = self._invitations > 0 and has_more
            self._invitations -= may
        if may:
            self._invite(self)

    def _are_too_many(self, *, is_slow: bool) -> bool:
        """Returns whether a thread leaves the file to the others, which may invite it again: a slow one beside
        programs that read."""
        with self._lock:
            leaves = is_slow and self._is_beside and self._inside - self._is_asking >= SLOW_THREADS
            self._invitations += leaves
            return leaves

    # ---- what is copied next

    def _claim(self) -> range | None:
        """Returns the stripes that a thread copies next: one that another node or a reader needs, else many in a row,
        or one that stands aside."""
        with self._lock:
            if self._finished or self._exhausted():
                return None
            stripes = self._next_followed() if self._is_beside else self._next_in_a_row()
            if stripes is not None:
                self._arrival.coming(stripes)
            elif (first := self._next_aside()) is not None:
                self._aside = first
                stripes = range(first, first + 1)
            self._inside += stripes is not None
            return stripes

    def _next_in_a_row(self) -> range | None:
        arrival, wished = self._arrival, self._arrival.wished()
        if wished is not None and (found := arrival.next_absent(wished, self._is_meant)) is not None:
            return range(found, found + 1)
        first = arrival.next_absent(0, self._is_meant)
        if first is None:
            return None
        stop, most = first, max(1, RANGE_BYTES // arrival.stripe_bytes)
        while stop < first + most and arrival.is_absent(stop) and self._is_meant(stop):
            stop += 1
        return range(first, stop)

    def _next_followed(self) -> range | None:
        """Returns a stripe that another node waits for, or that a reader in order needs next."""
        wished = self._arrival.wished()
        if wished is not None and self._arrival.is_absent(wished) and self._is_meant(wished):
            return range(wished, wished + 1)
        found = self._next_in_windows(self._is_meant)
        return None if found is None else range(found, found + 1)

    def _next_in_windows(self, is_meant: Callable[[int], bool]) -> int | None:
        """Returns what is nearest to one of the readers."""
        found = ((window, self._arrival.next_absent(window.start, is_meant)) for window in self._windows())
        ahead = [(stripe - window.start, stripe) for window, stripe in found if stripe is not None and stripe in window]
        return min(ahead)[1] if ahead else None

    def _windows(self) -> list[range]:
        """Returns the stripes that follow readers in order; one in which a reader is already is not among them."""
        length = self._arrival.stripe_bytes
        windows = self._arrival.reads().windows()
        return [range(-(-window.start // length), -(-window.stop // length)) for window in windows]

    def _next_aside(self) -> int | None:
        if self._aside is not None or not self._may_stand_aside:
            return None
        return self._arrival.next_absent(0, self._is_own)

    @property
    def _may_stand_aside(self) -> bool:
        """Whether more may be brought than follows readers."""
        is_meant = self._arrival.priority is Priority.ASIDE
        return is_meant and self._beside_bytes < self._arrival.reads().credit_bytes

    def _await_claim(self) -> range | None:
        """Has one thread stay with a file of which nothing is to be copied now, until something is, or it ends."""
        with self._lock:
            if self._stays or self._aside is not None:
                return None
            self._stays = True
        stripes = None
        while stripes is None and not self.cancelled and not self._finished and not self._exhausted():
            time.sleep(LOOK_EVERY_S)
            stripes = self._claim()
        self._stays = False
        return stripes

    def _stand_aside(self, stripe: int) -> int | None:
        """Waits until a chunk of what stands aside may begin. Returns its size; None if the stripe need not stand aside
        any more."""
        if self._quiet is None:
            with copyfile.local_errors():
                self._quiet, self._source_aside = Quiet(Path(nodedir.PAGE)), _open_at_random(self._source)
        while self._is_beside:
            if self.cancelled:
                raise CopyError(Status.CANCELLED)
            if any(stripe in stripes for stripes in self._windows()):
                self._arrival.coming(range(stripe, stripe + 1))
                break
            is_quiet = self._quiet.look()
            if self._may_stand_aside and self._pacing.may_begin(self._quiet.quiet_ns, is_quiet=is_quiet):
                self._pacing.begins(self._quiet.quiet_ns)
                return self._pacing.chunk_bytes
            if not self._inside - self._is_asking > 1:
                self._invite_one()
            time.sleep(LOOK_EVERY_S / 2)
        return None

    def _put_back(self, stripes: range, first: int) -> bool:
        """Gives up what is left of a range whose first stripes were copied, if programs read, or another node needs
        something: threads then bring one stripe after the other. Returns whether it did."""
        if stripes.start == first:
            return False
        with self._lock:
            if self._arrival.wished() is None and not self._is_beside:
                return False
            self._arrival.put_back(stripes)
            return True

    def _leave(self, stripes: range | None = None) -> bool:
        """Notes that a thread is through with these stripes. Returns whether it is the last one."""
        with self._lock:
            if stripes is not None and self._aside == stripes.start:
                self._aside = None
            self._inside -= 1
            last = self._exhausted() and not self._inside and not self._finished
            self._finished = self._finished or last
            return last

    def _exhausted(self) -> bool:
        return self._arrival.first_absent() is None or self.outcome.status is not Status.OK

    def _end_if_cancelled(self, worker: CopyWorker) -> bool:
        """Ends a cancelled copy of which no thread copies anything. Returns whether this thread has to report it."""
        if not self.cancelled:
            return False
        self._fail(CopyError(Status.CANCELLED))
        with self._lock:
            last = not self._inside and not self._finished
            self._finished = self._finished or last
        if last:
            self._finish(worker)
        return last

    def _fail(self, error: CopyError) -> None:
        if not self.outcome.status:
            self.outcome.status, self.outcome.errno = error.status, error.errno

    # ---- other nodes

    def _join_others(self) -> None:
        share = self._arrival.share
        if share is not None:
            self._peer_stripes = PeerStripes.connect(self.id, self._size_bytes, self._arrival.stripe_bytes, share)
        if self._peer_stripes is not None:
            with contextlib.suppress(OSError):  # the kernel would read ahead what other nodes read
                os.posix_fadvise(self._source, 0, 0, os.POSIX_FADV_RANDOM)

    def _is_meant(self, stripe: int) -> bool:
        """Returns whether this node reads a stripe at the source, and no thread stands aside with it."""
        return stripe != self._aside and self._is_own(stripe)

    def _is_own(self, stripe: int) -> bool:
        return self._peer_stripes is None or self._peer_stripes.is_own(stripe)

    def _begins_asking(self, *, is_new: bool = False) -> bool:
        """Returns whether a thread is to ask the other nodes. The first of those that are new reads the source."""
        with self._lock:
            is_first, self._has_begun = is_new and not self._has_begun, True
            if self._peer_stripes is None or self._has_asked or self._finished or is_first:
                return False
            self._has_asked = self._is_asking = True
            self._inside += 1
            return True

    def _ask_others(self, worker: CopyWorker) -> bool:
        """Gets stripes from other nodes until there are none to be asked for. Returns whether this thread has to report
        the outcome."""
        others = self._peer_stripes
        assert others is not None
        try:
            while self._ask_for_more(others) or others.is_waiting or self._asks_later(others):
                if self.cancelled or self.outcome.status:
                    raise CopyError(Status.CANCELLED)
                for stripe, data in others.answers(LOOK_S if others.is_waiting else LOOK_EVERY_S):
                    if data is None:
                        self._do_without((stripe,))
                    else:
                        self._take(worker, stripe, data)
        except CopyError as error:
            self._fail(error)
        others.close()
        with self._lock:
            self._is_asking = False
        if self._leave():
            self._finish(worker)
            return True
        return False

    def _ask_for_more(self, others: PeerStripes) -> bool:
        """Asks for what comes next, as far as there is room. Returns whether anything was asked for."""
        asked = False
        while others.has_room and (stripe := self._claim_elsewhere(others)) is not None:
            asked = True
            self._do_without(others.ask(stripe, time.monotonic()))
        return asked

    def _claim_elsewhere(self, others: PeerStripes) -> int | None:
        def is_theirs(stripe: int) -> bool:
            return not others.is_own(stripe)

        with self._lock:
            if self._finished or self._exhausted():
                return None
            stripe = self._next_in_windows(is_theirs) if self._is_beside else None
            if stripe is None and (not self._is_beside or self._may_stand_aside):
                stripe = self._arrival.next_absent(0, is_theirs)
            if stripe is not None:
                self._arrival.coming(range(stripe, stripe + 1))
            return stripe

    def _asks_later(self, others: PeerStripes) -> bool:
        """Returns whether there are stripes to be asked for that no reader needs now."""
        with self._lock:
            is_over = self._finished or self._exhausted() or not others.has_room
            found = self._arrival.next_absent(0, lambda stripe: not others.is_own(stripe))
            return not is_over and self._is_beside and found is not None

    def _take(self, worker: CopyWorker, stripe: int, data: memoryview) -> None:
        """Writes a stripe that came, and shows it, if the source is what it was when the copying began."""
        with self._writing:
            worker.write(self._target, data, stripe * self._arrival.stripe_bytes)
        copyfile.check(self._source, self._before)
        self._arrival.arrived(stripe)
        worker.stats.received(len(data))

    def _do_without(self, stripes: Sequence[int]) -> None:
        """Leaves stripes that do not come to the threads that read the source."""
        if stripes:
            with self._lock:
                for stripe in stripes:
                    self._arrival.put_back(range(stripe, stripe + 1))
            self._invite(self)

    # ---- the end

    def _finish(self, worker: CopyWorker) -> None:
        began = time.monotonic_ns()
        try:
            if self.outcome.status:
                raise CopyError(self.outcome.status, self.outcome.errno)
            is_mapped = self._arrival.is_shown and self._arrival.reads().faults_bytes > 0
            copyfile.check_and_stamp(self._source, self._target, self._before, is_mapped=is_mapped)
            self._close()
            copyfile.publish(self.job)
            worker.stats.copied()
        except CopyError as error:
            self._fail(error)
            self._empty()
            self._close()
            copyfile.discard(self.job.temporary)
        worker.stats.wrote(time.monotonic_ns() - began)

    def _empty(self) -> None:
        """Frees the space of a copy that comes to nothing, also where programs have it open."""
        self._arrival.hide()
        if self._target >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._target, 0)

    def _close(self) -> None:
        for fd in (self._source, self._source_aside, self._target):
            if fd >= 0:
                os.close(fd)
        self._source = self._source_aside = self._target = -1


def _open_at_random(source: int) -> int:
    """Opens a file once more, of which the kernel does not read ahead what nobody asked for; without /proc it does."""
    with contextlib.suppress(OSError):
        noatime = fcntl.fcntl(source, fcntl.F_GETFL) & os.O_NOATIME
        found = os.open(f"/proc/self/fd/{source}", os.O_RDONLY | os.O_CLOEXEC | noatime)
        with contextlib.suppress(OSError):
            os.posix_fadvise(found, 0, 0, os.POSIX_FADV_RANDOM)
        return found
    return os.dup(source)


def _preallocate(fd: int, size_bytes: int) -> None:
    """Allocates the file's blocks at once where the file system can; a full disk then shows before the source is
    read."""
    if not size_bytes:
        return
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
            raise
        os.ftruncate(fd, size_bytes)
