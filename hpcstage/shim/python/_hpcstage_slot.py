"""Owns this process's slot in the shared page, from Python: for the layers that work without the C extension.

The module gives out slots of the Python range under a file lock on the page, so that it needs no daemon and no message,
and works in a forked child. It takes slots of ended processes first, which the daemon marks as free. Without a page or
a free slot the counts go to private memory. A slot whose process is killed while it takes it is lost for the run.
Python is not told of children that _Fork, clone or a C library's fork makes: they count into the slot of their parent,
and, once that has ended, for the process that has the slot next.
"""

from __future__ import annotations

import os
from time import CLOCK_BOOTTIME, clock_gettime_ns, monotonic_ns

import _hpcstage_wire as wire  # type: ignore[import-not-found]
from _hpcstage_mapping import mapped  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

LOCK_TRIES = 200
LOCK_PAUSE_S = 0.001
_open = os.open
_close = os.close
_stat = os.stat


class Slot:
    """The counters of this process. `counters` and `hist_open` are views; a forked child gets new ones by `claim`."""

    def __init__(self, page: bytes, layer: int, python_version: int) -> None:
        self._page = page
        self._layer = layer
        self._python_version = python_version
        self._map: Any = None
        self._pid = 0
        self.number = -1
        private = memoryview(bytearray(wire.SLOT_BYTES))
        self._view(private)
        self.state: Any = memoryview(bytearray(4)).cast("I")
        self.gate: Any = memoryview(bytearray(wire.GATE_BYTES)).cast("I")
        self.linked: Any = memoryview(bytearray(4)).cast("I")

    def _view(self, slot: Any) -> None:
        end = wire.COUNTERS_OFFSET + 8 * wire.COUNTERS
        hist_end = wire.HIST_OPEN_OFFSET + 4 * wire.HIST_BUCKETS
        self._head = slot[: wire.COUNTERS_OFFSET]
        self.counters: Any = slot[wire.COUNTERS_OFFSET : end].cast("Q")
        self.hist_open: Any = slot[wire.HIST_OPEN_OFFSET : hist_end].cast("I")

    def open(self) -> None:
        """Maps the page. Raises OSError if there is none."""
        if self._map is None:
            fd = _open(self._page, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._map = _map(fd)
            finally:
                _close(fd)
            self.state = self._map[wire.STATE_OFFSET : wire.STATE_OFFSET + 4].cast("I")
            self.linked = self._map[wire.LINKED_OFFSET : wire.LINKED_OFFSET + 4].cast("I")
            self.gate = self._map[wire.GATE_OFFSET : wire.GATE_OFFSET + wire.GATE_BYTES].cast("I")

    def serves(self) -> bool:
        """Returns whether copies may be opened."""
        given_up, caught_up, closed, held = self.gate
        return bool(given_up == caught_up and not closed and not held)

    def give_up(self) -> None:
        """Lets no copy be opened until the daemon has read what was sent."""
        self.gate[wire.GIVEN_UP] = int.from_bytes(os.urandom(4), "little") | 1

    def close_store(self) -> None:
        """Lets no copy be opened ever again."""
        self.gate[wire.CLOSED] = 1

    def claim(self) -> None:
        """Takes a slot for this process, once."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self.number = -1
        try:
            self._claim()
        except OSError:
            self._view(memoryview(bytearray(wire.SLOT_BYTES)))

    def _claim(self) -> None:
        self.open()
        fd = _open(self._page, os.O_RDWR | os.O_CLOEXEC)  # of our own: a lock belongs to what open gave
        try:
            self.number = _next(fd, self._map)
        finally:
            _close(fd)
        is_again = _has_slot(self._map, self._pid)
        begin = _at(self.number)
        self._view(self._map[begin : begin + wire.SLOT_BYTES])
        self.counters[wire.COUNTER_IS_AGAIN] = is_again
        head = self._head.cast("I")
        head[1] = self._layer
        head[2] = self._python_version
        head[3] = os.getppid()
        self._head.cast("Q")[2] = monotonic_ns()
        self._head.cast("Q")[wire.PID_SPACE_OFFSET >> 3] = _pid_space()
        head[0] = self._pid

    def count(self, counter: int, value: int) -> None:
        """Adds to a counter."""
        self.counters[counter] += value

    def loader_step(self, begin_ns: int, end_ns: int, workers: int) -> None:
        """Counts a batch that was waited for."""
        counters = self.counters
        counters[wire.COUNTER_LOADER_STEPS] += 1
        counters[wire.COUNTER_LOADER_WAIT_NS] += end_ns - begin_ns
        if not counters[wire.COUNTER_LOADER_FIRST_NS]:
            counters[wire.COUNTER_LOADER_FIRST_NS] = begin_ns
        counters[wire.COUNTER_LOADER_LAST_NS] = end_ns
        counters[wire.COUNTER_LOADER_WORKERS] = max(counters[wire.COUNTER_LOADER_WORKERS], workers)

    def source_open(self, took_ns: int, reason: int) -> None:
        """Counts an open for reading that went to the source."""
        counters = self.counters
        counters[wire.COUNTER_SOURCE_OPENS] += 1
        counters[wire.COUNTER_SOURCE_OPEN_NS] += took_ns
        if reason:
            counters[wire.COUNTER_DIRECT_BASE + reason] += 1
        self.hist_open[wire.bucket_of_ns(took_ns)] += 1

    def finish(self) -> None:
        """Notes the time of an orderly exit, and what the process has read itself."""
        if self._pid == os.getpid():
            self.counters[wire.COUNTER_EXIT_NS] = monotonic_ns()
            self.counters[wire.COUNTER_OWN_READ_BYTES] = _own_read_bytes(self._pid)


def _own_read_bytes(pid: int) -> int:
    """Returns what the main thread has read, by the kernel's counter, since the process's own also holds what its
    children have read; 0 where the kernel does not tell."""
    try:
        fd = _open(f"/proc/self/task/{pid}/io", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return int(os.read(fd, 96).split()[1])
        finally:
            _close(fd)
    except (OSError, ValueError, IndexError):
        return 0


def _map(fd: int) -> Any:
    if os.fstat(fd).st_size < wire.PAGE_BYTES:
        raise OSError("no page")
    view = mapped(fd, wire.PAGE_BYTES)
    if bytes(view[:8]) != wire.PAGE_MAGIC or view[8] != wire.VERSION:
        raise OSError("a page of another version")
    return view


def _pid_space() -> int:
    try:
        return int(_stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return 0


def _next(fd: int, page: Any) -> int:
    _lock(fd)  # until the descriptor is closed
    free = page[wire.FREE_OFFSET : wire.FREE_OFFSET + wire.SLOTS]
    number = free.tobytes().find(wire.SLOT_FREE, wire.PYTHON_SLOTS_FROM)
    if number >= 0:
        free[number] = 0
        return int(number)
    word = page[wire.NEXT_PYTHON_OFFSET : wire.NEXT_PYTHON_OFFSET + 4].cast("I")
    number = int(word[0])
    word[0] = number + 1
    if number >= wire.SLOTS:
        raise OSError("no slot left")
    return number


def _at(number: int) -> int:
    return int(wire.PAGE_HEADER_BYTES + number * wire.SLOT_BYTES)


def _has_slot(page: Any, pid: int) -> bool:
    """Returns whether a process has a slot of this layer: one with its number that was taken since it has begun, as the
    kernel gives numbers again."""
    end = min(int.from_bytes(page[wire.NEXT_PYTHON_OFFSET : wire.NEXT_PYTHON_OFFSET + 4], "little"), wire.SLOTS)
    own = pid.to_bytes(4, "little")
    taken_ns = [
        int.from_bytes(page[at + 16 : at + 24], "little")
        for at in map(_at, range(wire.PYTHON_SLOTS_FROM, end))
        if page[at : at + 4] == own
    ]
    return any(taken_ns) and max(taken_ns) >= _begun_ns()


def _begun_ns() -> int:
    """Returns the monotonic time at which this process began, to a tick of the kernel's clock; a late one where the
    kernel does not tell."""
    try:
        fd = _open("/proc/self/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            ticks = int(os.read(fd, 4096).rpartition(b")")[2].split()[19])
        finally:
            _close(fd)
    except (OSError, ValueError, IndexError):
        return 1 << 63
    return ticks * 10**9 // os.sysconf("SC_CLK_TCK") - (clock_gettime_ns(CLOCK_BOOTTIME) - monotonic_ns())


def _lock(fd: int) -> None:
    import fcntl
    import time

    for _ in range(LOCK_TRIES):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(LOCK_PAUSE_S)
    raise OSError("the page stays locked")
