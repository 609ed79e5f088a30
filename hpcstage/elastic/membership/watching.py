"""Tells for how long something has not changed, by one clock: hosts' clocks are never compared."""

from __future__ import annotations

from collections.abc import Hashable


class Watch:
    """Follows one value."""

    def __init__(self, now_s: float) -> None:
        self._value: Hashable = None
        self._since_s = now_s

    def see(self, value: Hashable, now_s: float) -> None:
        """Takes what the value is now."""
        if value != self._value:
            self._value, self._since_s = value, now_s

    def unchanged_s(self, now_s: float) -> float:
        """Returns for how long it has been so."""
        return now_s - self._since_s
