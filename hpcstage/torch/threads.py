"""Threads that load the samples of batches side by side, and the turn in which samples may touch what they share.

Owns the order: a sample's turn has come when its batch is the one that is waited for and all samples before it are
done. So whatever is done in turn is done in the order in which one thread would do it. Knows nothing of PyTorch.
"""

from __future__ import annotations

import contextvars
import enum
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

STALL_S = 60.0
"""So long nothing is finished while samples wait for their turn: then one of them may hold what the others need."""
POLL_S = 0.005
JOIN_S = 2.0
"""So long the end waits for samples that are being loaded. PyTorch gives a worker 5."""
_here = threading.local()
_log = logging.getLogger(__name__)

Load = Callable[[], Any]


class GivenUp(BaseException):
    """Unwinds a sample that nobody waits for any more, or that is to be loaded again."""


class _State(enum.Enum):
    NEW = enum.auto()
    RUNNING = enum.auto()
    TO_REPEAT = enum.auto()
    """Told to unwind; it becomes new when it has."""
    DONE = enum.auto()


class _Unit:
    """One sample of a batch."""

    __slots__ = ("batch", "context", "error", "load", "place", "pool", "state", "value")

    def __init__(self, pool: Pool, batch: Batch, place: int, load: Load) -> None:
        self.pool = pool
        self.batch = batch
        self.place = place
        self.load: Load | None = load
        self.context = contextvars.copy_context()
        self.state = _State.NEW
        self.value: Any = None
        self.error: BaseException | None = None

    @property
    def has_turn(self) -> bool:
        """Whether all that comes before it is over."""
        return self.batch.current and not self.batch.given_up and self.batch.ready == self.place

    def finish(self, value: object, error: BaseException | None) -> None:
        """It was loaded, or raised."""
        self.state = _State.DONE
        self.value, self.error = value, error
        self.load = None
        self.batch.advance()


class Batch:
    """Samples that are waited for together."""

    def __init__(self) -> None:
        self.units: list[_Unit] = []
        self.current = False
        """It is waited for: all batches before it are over."""
        self.given_up = False
        self.ready = 0
        """So many samples, counted from the first, are loaded."""

    @property
    def settled(self) -> bool:
        """Whether it is known what comes of it: all samples, or the error of the first that has one."""
        return self.ready == len(self.units) or self.units[self.ready].error is not None

    def advance(self) -> None:
        """Counts what is loaded. What comes behind an error is never counted, and so never has its turn."""
        while self.ready < len(self.units):
            unit = self.units[self.ready]
            if unit.state is not _State.DONE or unit.error is not None:
                return
            self.ready += 1

    def values(self) -> list[Any]:
        """The samples in order. Raises what the first of them raised that did."""
        error = self.units[self.ready].error if self.ready < len(self.units) else None
        if error is None:
            return [unit.value for unit in self.units]
        try:
            raise error
        finally:
            del error  # its traceback holds this frame


def turn() -> None:
    """Waits until all samples before the calling one are loaded, as they are where one thread loads them all.

    For datasets whose samples share something that depends on the order, such as a generator of the dataset's own:
    from here to the sample's end no other sample of the same worker is past its `turn`. Returns at once where no
    sample is being loaded by a thread of a loader.
    """
    unit: _Unit | None = getattr(_here, "unit", None)
    if unit is not None:
        unit.pool.wait_for_turn(unit)
        _here.unit = None


class Pool:
    """Loads what is announced, in the order of the announcements, in `threads` threads; results are collected."""

    def __init__(self, threads: int, prepare: Callable[[], None] | None = None) -> None:
        """`prepare` is called first in each thread."""
        self.threads = threads
        self._prepare = prepare
        self._pid = os.getpid()
        lock = threading.RLock()  # the collection of garbage may close a pool while a thread of it has the lock
        self._work = threading.Condition(lock)
        self._changed = threading.Condition(lock)
        self._new: deque[_Unit] = deque()
        self._waiting: set[_Unit] = set()
        """For their turn."""
        self._idle = 0
        self._closed = False
        self._one_by_one = False
        self._moved_s = monotonic()
        self._running: list[threading.Thread] = []

    def announce(self, loads: Sequence[Load]) -> Batch:
        """A batch that will be collected after all that were announced before it."""
        batch = Batch()
        batch.units = [_Unit(self, batch, place, load) for place, load in enumerate(loads)]
        with self._work:
            if not self._one_by_one:
                self._new.extend(batch.units)
                self._work.notify(len(loads))
        self._start()
        return batch

    def collect(self, batch: Batch, when_idle: Callable[[], object] | None = None) -> list[Any]:
        """The samples of a batch in order. Raises the error of the first that has one.

        `when_idle` is called now and then while a thread has nothing to do: it may announce more.
        """
        with self._changed:
            batch.current = True
            self._moved_s = monotonic()
            self._changed.notify_all()
        try:
            while not self._settled(batch):
                if not self._load_here(batch):
                    self._wait(batch, when_idle)
            return batch.values()
        finally:
            self.give_up(batch)

    def give_up(self, batch: Batch) -> None:
        """Nobody will collect it (again)."""
        with self._changed:
            batch.given_up = True
            if any(unit.state is _State.NEW for unit in batch.units):
                self._new = deque(unit for unit in self._new if unit.batch is not batch)
            for unit in batch.units:
                unit.value = unit.error = None
            self._changed.notify_all()

    def close(self, join_s: float = JOIN_S) -> None:
        """Ends the threads: those that load a sample end after it, and are waited for so long."""
        if os.getpid() != self._pid:
            return  # threads do not follow a fork, and the lock may be held for ever
        with self._changed:
            self._closed = True
            self._new.clear()
            self._work.notify_all()
            self._changed.notify_all()
        until_s = monotonic() + join_s
        for thread in self._running:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until_s - monotonic()))

    def wait_for_turn(self, unit: _Unit) -> None:
        """Called by the thread that loads it. Raises GivenUp if it will never come."""
        with self._changed:
            self._waiting.add(unit)
            try:
                while not unit.has_turn:
                    if self._one_by_one:
                        unit.state = _State.TO_REPEAT
                    if unit.state is _State.TO_REPEAT or unit.batch.given_up or self._closed:
                        raise GivenUp
                    self._changed.wait()
            finally:
                self._waiting.discard(unit)

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

    def _run(self, unit: _Unit) -> None:
        """Loads a sample in this thread, which is one of the pool's."""
        load, error, value = unit.load, None, None
        assert load is not None
        _here.unit = unit
        try:
            value = unit.context.run(load)
        except BaseException as caught:  # noqa: BLE001 - raised where the batch is collected
            error = caught
        _here.unit = None
        with self._changed:
            self._moved_s = monotonic()
            if unit.state is _State.TO_REPEAT:
                unit.state = _State.NEW
            else:
                unit.finish(value, error)
            self._changed.notify_all()
        del error, value

    def _next(self) -> _Unit | None:
        with self._work:
            self._idle += 1
            if not self._new:
                self._changed.notify_all()  # somebody may have more
            while not self._new and not self._closed:
                self._work.wait()
            self._idle -= 1
            if self._closed:
                return None
            unit = self._new.popleft()
            unit.state = _State.RUNNING
            return unit

    def _settled(self, batch: Batch) -> bool:
        with self._changed:
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
        """One that waits for its turn may hold a lock that the one whose turn it is needs. From now on samples are
        loaded one by one."""
        with self._changed:
            self._one_by_one = True
            self._new.clear()
            self._changed.notify_all()
        _log.warning(
            "samples waited for their turn and none was finished: perhaps one draws random numbers while it holds a "
            "lock that others need. Samples are loaded one by one from here on; draw outside the lock."
        )

    def _load_here(self, batch: Batch) -> bool:
        """Loads the next sample in this thread, if no other thread does."""
        with self._changed:
            unit = None if batch.settled else batch.units[batch.ready]
            if not self._one_by_one or unit is None or unit.state is not _State.NEW:
                return False
            unit.state = _State.RUNNING
        load, error, value = unit.load, None, None
        assert load is not None
        try:
            value = load()
        except Exception as caught:  # noqa: BLE001 - raised by values()
            error = caught
        with self._changed:
            unit.finish(value, error)
        return True
