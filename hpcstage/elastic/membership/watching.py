"""Tells for how long something has not changed, by one clock: hosts' clocks are never compared."""

from __future__ import annotations

from collections.abc import Hashable


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
