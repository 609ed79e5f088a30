"""Runs threads that load the samples of batches side by side, and gives each sample its turn to touch what they share.

The module owns the threads and their waits. A sample's turn has come when its batch is the one that is waited for and
all samples before it are done (`units`). So whatever is done in turn is done in the order in which one thread would do
it. The module knows nothing of PyTorch.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from hpcstage.torch.units import Batch, GivenUp, Load, Unit, UnitState

STALL_S = 60.0
"""If nothing is finished for so many seconds while samples wait for their turn, one of them may hold what the others
need."""
POLL_S = 0.005
JOIN_S = 2.0
"""The end waits so many seconds for samples that are being loaded. PyTorch gives a worker 5."""
_here = threading.local()
_log = logging.getLogger(__name__)


def turn() -> None:
    """Waits until all samples before the calling one are loaded, as they are where one thread loads them all.

    The function is for datasets whose samples share something that depends on the order, such as a generator of the
    dataset's own: from here to the sample's end no other sample of the same worker is past its `turn`. It returns at
    once in a thread that is not loading a sample for a loader.
    """
    unit: Unit | None = getattr(_here, "unit", None)
    if unit is not None:
        unit.wait_for_turn(unit)
        _here.unit = None


class LoadingThreads:
    """Loads what is announced, in the order of the announcements, in `threads` threads; the caller collects the
    results."""

    def __init__(self, threads: int, prepare: Callable[[], None] | None = None) -> None:
        """Makes the pool. `prepare` is called first in each thread."""
        self.threads = threads
        self._prepare = prepare
        self._pid = os.getpid()
        lock = threading.RLock()  # the collection of garbage may close a pool while a thread of it has the lock
        self._lock = lock
        self._work = threading.Condition(lock)
        self._changed = threading.Condition(lock)
        """The condition of the thread that collects. A thread that waits for its turn has a condition of its own, and
        is woken when its turn comes."""
        self._new: deque[Unit] = deque()
        self._waiting: dict[Unit, threading.Condition] = {}
        self._idle = 0
        self._closed = False
        self._one_by_one = False
        self._moved_s = monotonic()
        self._running: list[threading.Thread] = []

    def announce(self, loads: Sequence[Load]) -> Batch:
        """Announces a batch, which will be collected after all that were announced before it."""
        batch = Batch()
        batch.units = [Unit(batch, place, load, self.wait_for_turn) for place, load in enumerate(loads)]
        with self._work:
            if not self._one_by_one:
                self._new.extend(batch.units)
                self._work.notify(len(loads))
        self._start()
        return batch

    def collect(self, batch: Batch, when_idle: Callable[[], object] | None = None) -> list[Any]:
        """Returns the samples of a batch in order. Raises the error of the first sample that has one.

        `when_idle` is called now and then while a thread has nothing to do: it may announce more.
        """
        with self._lock:
            batch.current = True
            self._moved(batch)
        try:
            while not self._settled(batch):
                if not self._load_here(batch):
                    self._wait(batch, when_idle)
            return batch.values()
        finally:
            self.give_up(batch)

    def give_up(self, batch: Batch) -> None:
        """Gives a batch up: nobody will collect it (again)."""
        with self._lock:
            batch.given_up = True
            if any(unit.state is UnitState.NEW for unit in batch.units):
                self._new = deque(unit for unit in self._new if unit.batch is not batch)
            for unit in batch.units:
                unit.value = unit.error = None
            self._wake()

    def close(self, join_s: float = JOIN_S) -> None:
        """Ends the threads: those that load a sample end after it, and are waited for so long."""
        if os.getpid() != self._pid:
            return  # threads do not follow a fork, and the lock may be held for ever
        with self._lock:
            self._closed = True
            self._new.clear()
            self._work.notify_all()
            self._wake()
        until_s = monotonic() + join_s
        for thread in self._running:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - monotonic()))

    def wait_for_turn(self, unit: Unit) -> None:
        """Waits for the turn of a sample, in the thread that loads it. Raises GivenUp if the turn will never come."""
        with self._lock:
            self._waiting[unit] = turned = threading.Condition(self._lock)
            try:
                while not unit.has_turn:
                    if self._one_by_one:
                        unit.state = UnitState.TO_REPEAT
                    if unit.state is UnitState.TO_REPEAT or unit.batch.given_up or self._closed:
                        raise GivenUp
                    turned.wait()
            finally:
                del self._waiting[unit]

    def _wake(self) -> None:
        """Wakes all threads that wait for their turn, so that they see that it will not come."""
        for turned in self._waiting.values():
            turned.notify()

    def _moved(self, batch: Batch) -> None:
        """Notes that something of a batch was finished, and wakes the thread whose turn it is."""
        self._moved_s = monotonic()
        if batch.settled or self._one_by_one:
            self._changed.notify_all()
        elif (turned := self._waiting.get(batch.units[batch.ready])) is not None:
            turned.notify()

    def _start(self) -> None:
        if self._running:
            return
        self._running = [
            threading.Thread(target=self._serve, name=f"hpcstage-loader-{number}", daemon=True)
            for number in range(self.threads)
        ]
        for thread in self._running:
            thread.start()

    def _serve(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while (unit := self._next()) is not None:
            self._run(unit)
            del unit  # an idle thread keeps no sample

    def _run(self, unit: Unit) -> None:
        """Loads a sample in this thread, which is one of the pool's."""
        load, error, value = unit.load, None, None
        assert load is not None
        _here.unit = unit
        try:
            value = unit.context.run(load)
        except BaseException as caught:  # noqa: BLE001 - raised where the batch is collected
            error = caught
        _here.unit = None
        with self._lock:
            if unit.state is UnitState.TO_REPEAT:
                unit.state = UnitState.NEW
            else:
                unit.finish(value, error)
            self._moved(unit.batch)
        del error, value

    def _next(self) -> Unit | None:
        with self._work:
            self._idle += 1
            if not self._new:
                self._changed.notify_all()  # the collecting thread may have more
            while not self._new and not self._closed:
                self._work.wait()
            self._idle -= 1
            if self._closed:
                return None
            unit = self._new.popleft()
            unit.state = UnitState.RUNNING
            return unit

    def _settled(self, batch: Batch) -> bool:
        with self._lock:
            return batch.settled

    def _wait(self, batch: Batch, when_idle: Callable[[], object] | None) -> None:
        with self._changed:
            if batch.settled:
                return
            polls = when_idle is not None and self._idle > 0
            self._changed.wait(POLL_S if polls else STALL_S)
            stalled = bool(self._waiting) and monotonic() - self._moved_s >= STALL_S
        if stalled:
            self._give_way()
        if when_idle is not None and polls:
            when_idle()

    def _give_way(self) -> None:
        """Has samples loaded one by one from now on: a sample that waits for its turn may hold a lock that the sample
        whose turn it is needs."""
        with self._lock:
            self._one_by_one = True
            self._new.clear()
            self._wake()
        _log.warning(
            "samples waited for their turn and none was finished: perhaps one draws random numbers while it holds a "
            "lock that others need. Samples are loaded one by one from here on; draw outside the lock."
        )

    def _load_here(self, batch: Batch) -> bool:
        """Loads the next sample in this thread, if samples are loaded one by one and no other thread loads it. Returns
        whether it did."""
        with self._lock:
            unit = None if batch.settled else batch.units[batch.ready]
            if not self._one_by_one or unit is None or unit.state is not UnitState.NEW:
                return False
            unit.state = UnitState.RUNNING
        load, error, value = unit.load, None, None
        assert load is not None
        try:
            value = load()
        except Exception as caught:  # noqa: BLE001 - raised by values()
            error = caught
        with self._lock:
            unit.finish(value, error)
        return True
