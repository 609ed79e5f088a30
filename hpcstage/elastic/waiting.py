"""Waits that end: calls that have no bound of their own, such as those of PyTorch's store and of a file system that
hangs, and what has not changed for too long, by one clock: hosts' clocks are never compared.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from hpcstage.errors import HpcstageError
from hpcstage.units import format_duration

T = TypeVar("T")
_SLICE_S = 0.1


class NoAnswer(HpcstageError):
    """A call took longer than it may."""


class Caller:
    """Makes calls in a thread, one after the other. While one hangs, those behind it have no answer either."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"calls to {what}", daemon=True).start()

    def begin(self, function: Callable[[], T]) -> Future[T]:
        """Has the function called, and returns what will have its result."""
        future: Future[T] = Future()
        self._calls.put((function, future))
        return future

    def call(self, function: Callable[[], T], limit_s: float, meanwhile: Callable[[], object] = int) -> T:
        """Returns what the function returns, or raises what it raises. Raises NoAnswer after `limit_s`: a call that has
        begun goes on and nobody takes its result, one that has not is not made. `meanwhile` is called ten times a
        second; what it raises ends the wait."""
        future = self.begin(function)
        left_s = limit_s
        while left_s > 0 and not wait([future], min(_SLICE_S, left_s)).done:
            left_s -= _SLICE_S  # a process that was stopped meanwhile has waited for its own part of the time only
            meanwhile()
        if not future.done():
            future.cancel()
            raise NoAnswer(f"{self.what} did not answer within {format_duration(limit_s)}")
        return future.result()

    def close(self) -> None:
        """Ends the thread after the calls that it has. One that hangs ends with the process."""
        self._calls.put(None)

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            function, future = asked
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 - the caller gets it
                    future.set_exception(error)
            del function, future, asked


class Watch:
    """Follows one value."""

    def __init__(self, now_s: float) -> None:
        self._value: Hashable = None
        self._since_s = self._looked_s = now_s

    def see(self, value: Hashable, now_s: float) -> None:
        """Takes what the value is now."""
        self._looked_s = now_s
        if value != self._value:
            self._value, self._since_s = value, now_s

    def miss(self, now_s: float) -> None:
        """Takes that the value could not be seen: the time since the last look does not count."""
        self._since_s += now_s - self._looked_s
        self._looked_s = now_s

    def unchanged_s(self, now_s: float) -> float:
        """Returns for how long it has been so."""
        return now_s - self._since_s


class AwakeClock:
    """A clock that stands while nobody looks at it, as when its own process does not run: what others said meanwhile
    could not be heard."""

    def __init__(self, now_s: float, most_s: float) -> None:
        """Between two looks at most `most_s` pass."""
        self._most_s = most_s
        self._last_s = now_s
        self._shown_s = now_s

    def show(self, now_s: float) -> float:
        """Returns the time."""
        self._shown_s += min(now_s - self._last_s, self._most_s)
        self._last_s = now_s
        return self._shown_s
