"""Copies one file in stripes, with several threads, so that a single file, too, is copied at the source's full speed.

One thread leads: it copies from the beginning to the end, and publishes the file when all is there. Others help while
that makes the copy faster. Where several nodes bring a file together, each reads its stripes at the source, and one of
the helpers asks the other nodes for the rest. `stripechoice` says what is brought next.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcstage.plan.rule import Aside
from hpcstage.protocol import nodedir
from hpcstage.store import copyfile
from hpcstage.store.arrivals import Arrival
from hpcstage.store.copyfile import CHUNK_BYTES, CopyError, CopyJob, CopyOutcome, CopyWorker, Status
from hpcstage.store.peerstripes import PeerStripes
from hpcstage.store.quiet import Quiet
from hpcstage.store.stripechoice import RANGE_BYTES, StripeChoice

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
"""The intervals at which the thread that leads looks what is to be copied now, and at which the one that gets stripes
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


class LargeCopy:
    """Owns the copy of one file in stripes. The thread that leads calls `copy`, those that help `help`."""

    def __init__(
        self,
        id_: int,
        job: CopyJob,
        pace: Pacer | None,
        invite: Callable[[LargeCopy], object],
        show: Callable[[os.stat_result], Arrival] = lambda status: Arrival(status.st_size),
    ) -> None:
        """`invite` makes one more thread call `help`. `show` returns the stripes of the file once it is open."""
        self.id = id_
        self.job = job
        self.outcome = CopyOutcome()
        self.cancelled = False
        self._pace = pace
        self._invite = invite
        self._invitations = 0
        self._show = show
        self._lock = threading.Lock()
        """Guards what is brought by whom."""
        self._writing = threading.Lock()
        self._reading = 0
        """The number of threads that read the source."""
        self._others: PeerStripes | None = None
        self._is_asking = self._has_asked = False
        """Whether a thread asks other nodes; whether one has begun to."""
        self._is_over = False
        self._source = self._source_aside = self._target = -1
        """What stands aside has an open file of its own: for others the kernel reads ahead."""
        self._quiet: Quiet | None = None
        self._pacing = Aside()
        self._before: os.stat_result
        self._arrival = Arrival(0)
        self._choice: StripeChoice

    # ---- the threads

    def copy(self, worker: CopyWorker) -> CopyOutcome:
        """Copies the file with those who help, and publishes it."""
        if worker.stats.cancelled:  # before others could know of this copy
            self.cancelled = True
        with self._failing():
            self._open(worker)
            self._read_source(worker, leads=True)
            while not self._ends():
                if not self._stand_aside(worker):
                    time.sleep(LOOK_EVERY_S)
                self._read_source(worker, leads=True)
            self._publish(worker)
        if self.outcome.status:
            self._give_up()
        return self.outcome

    def help(self, worker: CopyWorker) -> None:
        """Copies what there is for one more thread."""
        if self._begins_asking():
            self._ask_others(worker)
        self._read_source(worker, leads=False)
        with self._lock:
            self._invitations += 1

    def _invite_one(self) -> None:
        """Has one more thread come, if there is something for it. One that leaves may be invited again."""
        with self._lock:
            may = self._invitations > 0 and self._choice.next() is not None
            self._invitations -= may
        if may:
            self._invite(self)

    def _ends(self) -> bool:
        """Returns whether all is there, or nothing more is copied: nobody else works on the file, or will."""
        with self._lock:
            self._is_over = self._is_exhausted and not self._reading and not self._is_asking
            return self._is_over

    @property
    def _is_exhausted(self) -> bool:
        return self._is_over or self.cancelled or bool(self.outcome.status) or self._choice.is_done

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever goes wrong in one thread ends the copy for all, with what went wrong first."""
        found = None
        try:
            yield
        except CopyError as error:
            found = error
        except Exception:  # noqa: BLE001  the thread that leads waits for the others
            found = CopyError(Status.LOCAL_ERROR)
            traceback.print_exc()
        if found is not None and not self.outcome.status:
            self.outcome.status, self.outcome.errno = found.status, found.errno

    def _stop_if_in_vain(self) -> None:
        """Raises CopyError if the copy was cancelled, or has failed."""
        if self.cancelled or self.outcome.status:
            raise CopyError(Status.CANCELLED)

    # ---- from the source

    def _read_source(self, worker: CopyWorker, *, leads: bool) -> None:
        """Copies until there is nothing for a thread, or until it is one too many."""
        is_one_too_many = False
        while not is_one_too_many and (stripes := self._claim()) is not None:
            took_ns = 0
            with self._failing():
                took_ns = self._copy(worker, stripes)
            with self._lock:
                self._reading -= 1
                is_slow = took_ns > SLOW_NS and self._choice.is_beside
                is_one_too_many = is_slow and not leads and self._reading >= SLOW_THREADS

    def _claim(self) -> range | None:
        with self._lock:
            stripes = None if self._is_exhausted else self._choice.take()
            self._reading += stripes is not None
            return stripes

    def _copy(self, worker: CopyWorker, stripes: range) -> int:
        """Copies stripes in a row, as long as nobody needs others. Returns how long the last one took at the source."""
        took_ns = 0
        for stripe in stripes:
            with self._lock:
                if stripe > stripes.start and not self._choice.goes_on():
                    self._arrival.put_back(range(stripe, stripes.stop))
                    break
            start, length = self._span(stripe)
            took_ns = self._copy_range(worker, self._source, start, length)
            self._arrived(stripe)
            if (CACHED_NS if self._choice.is_beside else 0) < took_ns * CHUNK_BYTES // max(length, 1) < QUICK_NS:
                self._invite_one()
        return took_ns

    def _span(self, stripe: int) -> tuple[int, int]:
        """Returns where a stripe begins, and its length."""
        start = stripe * self._arrival.stripe_bytes
        return start, min(self._arrival.stripe_bytes, self._before.st_size - start)

    def _copy_range(self, worker: CopyWorker, source: int, start: int, length: int) -> int:
        """Copies a range. Returns how long it took at the source."""
        part = CopyOutcome()
        span = copyfile.FileRange(source, self._target, start, length, copyfile.is_sparse(self._before))
        copyfile.copy_range(worker, span, part, self._step, self._writing)
        return part.read_ns

    def _step(self, size_bytes: int) -> None:
        """Runs before each chunk: ends a copy that is in vain, and waits for the rate."""
        self._stop_if_in_vain()
        if self._choice.is_beside:
            with self._lock:
                self._choice.beside_bytes += size_bytes
        if self._pace is not None:
            self._pace(size_bytes)

    def _arrived(self, stripe: int) -> None:
        """Shows a stripe, if the source is what it was when the copying began."""
        if self._arrival.is_shown:
            copyfile.check(self._source, self._before)
        self._arrival.arrived(stripe)

    # ---- aside

    def _stand_aside(self, worker: CopyWorker) -> bool:
        """Copies a stripe that stands aside. Returns whether there was one."""
        with self._lock:
            stripe = None if self._is_exhausted else self._choice.take_aside()
        if stripe is None:
            return False
        with self._failing():
            self._copy_aside(worker, stripe)
        with self._lock:
            self._choice.aside = None
        return True

    def _copy_aside(self, worker: CopyWorker, stripe: int) -> None:
        start, length = self._span(stripe)
        stop = start + length
        while start < stop and (chunk_bytes := self._await_quiet(stripe)) is not None:
            length = min(chunk_bytes, stop - start)
            self._pacing.ended(length, self._copy_range(worker, self._source_aside, start, length))
            start += length
        self._copy_range(worker, self._source, start, stop - start)
        self._arrived(stripe)

    def _await_quiet(self, stripe: int) -> int | None:
        """Waits until a chunk of what stands aside may begin. Returns its size; None if the stripe need not stand aside
        any more."""
        if self._quiet is None:
            with copyfile.local_errors():
                self._quiet, self._source_aside = Quiet(Path(nodedir.PAGE)), _open_at_random(self._source)
        while self._choice.is_beside:
            self._stop_if_in_vain()
            if self._choice.follows(stripe):
                self._arrival.coming(range(stripe, stripe + 1))
                break
            is_quiet = self._quiet.look()
            if self._choice.may_stand_aside and self._pacing.may_begin(self._quiet.quiet_ns, is_quiet=is_quiet):
                self._pacing.begins(self._quiet.quiet_ns)
                return self._pacing.chunk_bytes
            if not self._reading:
                self._invite_one()
            time.sleep(LOOK_EVERY_S / 2)
        return None

    # ---- from other nodes

    def _begins_asking(self) -> bool:
        with self._lock:
            begins = self._others is not None and not self._has_asked and not self._is_exhausted
            self._has_asked = self._has_asked or begins
            self._is_asking = self._is_asking or begins
            return begins

    def _ask_others(self, worker: CopyWorker) -> None:
        """Gets stripes from other nodes until there are none to be asked for."""
        others = self._others
        assert others is not None
        with self._failing():
            while self._ask_for_more(others) or others.is_waiting or self._asks_later(others):
                self._stop_if_in_vain()
                for stripe, data in others.answers(LOOK_S if others.is_waiting else LOOK_EVERY_S):
                    if data is None:
                        self._do_without(stripe)
                    else:
                        self._take(worker, stripe, data)
        others.close()
        with self._lock:
            self._is_asking = False

    def _ask_for_more(self, others: PeerStripes) -> bool:
        """Asks for what comes next, as far as there is room. Returns whether anything was asked for."""
        asked = False
        while others.has_room and (stripe := self._claim_elsewhere()) is not None:
            asked = True
            for lost in others.ask(stripe, time.monotonic()):
                self._do_without(lost)
        return asked

    def _claim_elsewhere(self) -> int | None:
        with self._lock:
            return None if self._is_exhausted else self._choice.take_elsewhere()

    def _asks_later(self, others: PeerStripes) -> bool:
        """Returns whether there are stripes that are still to be asked for."""
        with self._lock:
            return not self._is_exhausted and others.has_room and self._choice.needs_others()

    def _take(self, worker: CopyWorker, stripe: int, data: memoryview) -> None:
        """Writes a stripe that came, and shows it."""
        with self._writing:
            worker.write(self._target, data, stripe * self._arrival.stripe_bytes)
        self._arrived(stripe)
        worker.stats.received(len(data))

    def _do_without(self, stripe: int) -> None:
        """Leaves a stripe that does not come to the threads that read the source."""
        with self._lock:
            self._arrival.put_back(range(stripe, stripe + 1))

    # ---- the beginning and the end

    def _open(self, worker: CopyWorker) -> None:
        self._source = copyfile.open_source(self.job, worker.stats)
        self._before = copyfile.regular(self._source)
        size_bytes = self.outcome.size_bytes = self._before.st_size
        self.outcome.mtime_ns = self._before.st_mtime_ns
        self._target = copyfile.create(self.job.temporary)
        with copyfile.local_errors():
            if copyfile.is_sparse(self._before):
                os.ftruncate(self._target, size_bytes)
            else:
                _preallocate(self._target, size_bytes)
        self._arrival = self._show(self._before)
        self._join_others(size_bytes)
        self._choice = StripeChoice(self._arrival, self._others)
        self._invitations = min(1 if self._pace else MOST_THREADS - 1, size_bytes // RANGE_BYTES)
        if self._others is not None:
            self._invite(self)

    def _join_others(self, size_bytes: int) -> None:
        if self._arrival.share is not None:
            self._others = PeerStripes.connect(self.id, size_bytes, self._arrival.stripe_bytes, self._arrival.share)
        if self._others is not None:
            with contextlib.suppress(OSError):  # the kernel would read ahead what other nodes read
                os.posix_fadvise(self._source, 0, 0, os.POSIX_FADV_RANDOM)

    def _publish(self, worker: CopyWorker) -> None:
        self._stop_if_in_vain()
        began = time.monotonic_ns()
        is_mapped = self._arrival.is_shown and self._arrival.reads().faults_bytes > 0
        copyfile.check_and_stamp(self._source, self._target, self._before, is_mapped=is_mapped)
        self._close()
        copyfile.publish(self.job)
        worker.stats.copied()
        worker.stats.wrote(time.monotonic_ns() - began)

    def _give_up(self) -> None:
        """Removes a copy that comes to nothing, and frees its space, also where programs have it open."""
        self._arrival.hide()
        if self._target >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._target, 0)
        self._close()
        copyfile.discard(self.job.temporary)

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
