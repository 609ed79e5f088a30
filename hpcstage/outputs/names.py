"""Finds what is below a directory among many names without a look at each. It is pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

V = TypeVar("V")


class Names(dict[str, V]):
    """A dictionary by name."""

    def __init__(self, items: Iterable[tuple[str, V]] = ()) -> None:
        super().__init__()
        self._inside: dict[str, set[str]] = {}
        """By directory: the names directly in it that are here, or have something below them that is."""
        for name, value in items:
            self[name] = value

    def __setitem__(self, name: str, value: V) -> None:
        super().__setitem__(name, value)
        while name:
            directory = name.rpartition("/")[0]
            inside = self._inside.setdefault(directory, set())
            if name in inside:
                return
            inside.add(name)
            name = directory

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        while name and name not in self and name not in self._inside:
            directory = name.rpartition("/")[0]
            inside = self._inside[directory]
            inside.discard(name)
            if inside:
                return
            del self._inside[directory]
            name = directory

    def pop(self, name: str, *default: V | None) -> V:  # type: ignore[override]
        """See dict."""
        if name not in self and default:
            return default[0]  # type: ignore[return-value]
        value = self[name]
        del self[name]
        return value

    def clear(self) -> None:
        """See dict."""
        super().clear()
        self._inside.clear()

    def has_below(self, directory: str) -> bool:
        """Tells whether a name is the directory's or below it."""
        return directory in self or directory in self._inside

    def below(self, directory: str) -> list[str]:
        """Returns the names below a directory and then its own, as far as they are here."""
        found, left = [], [directory]
        while left:
            name = left.pop()
            left += self._inside.get(name, ())
            if name in self:
                found.append(name)
        return found[::-1]
