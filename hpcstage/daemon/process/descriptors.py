"""Keeps the daemon's selector up to date with the descriptors of copiers and helpers, whose numbers are used again."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Mapping
from contextlib import suppress

Receive = Callable[[int], bool]
"""Reads from a descriptor; returns True if it is closed."""


class Descriptors:
    """Owns the list of registered descriptors, so that only changes reach the selector."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._watched: dict[int, Receive] = {}

    def watch(self, wanted: Mapping[int, Receive]) -> None:
        """Watches these descriptors, and no others, from here on."""
        if wanted == self._watched:
            return
        for fd in self._watched:
            self._unregister(fd)
        for fd in wanted:
            self._selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._ready(fd))
        self._watched = dict(wanted)

    def _ready(self, fd: int) -> None:
        receive = self._watched.get(fd)
        if receive is not None and receive(fd) and self._watched.pop(fd, None) is not None:
            self._unregister(fd)

    def _unregister(self, fd: int) -> None:
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(fd)
