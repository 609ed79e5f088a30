"""Matches glob patterns step by step, so that the walk knows which directories to enter and which files to take.

Patterns work as in a shell: `*`, `?` and `[...]` do not cross slashes and do not match a leading dot; `**` is any
number of directories. A directory that the whole pattern matches is taken with all its files, as a shell would pass it.
"""

from __future__ import annotations

import fnmatch
import re
from functools import lru_cache

Positions = frozenset[int]
"""The components of the pattern that may come next (several because of `**`)."""
EVERYTHING = -1
"""The position below a directory of which all files are taken."""


class Pattern:
    """A glob, split into the components of its path."""

    def __init__(self, text: bytes) -> None:
        self._parts = text.split(b"/")
        self._tests = [_test(part) for part in self._parts]
        self.start: Positions = self._closed({0})

    def into(self, positions: Positions, name: bytes) -> Positions:
        """Returns the positions below a directory of this name; empty: the walk does not enter it."""
        if EVERYTHING in positions:
            return positions
        after = set()
        for position in positions:
            if self._parts[position] == b"**":
                if not name.startswith(b"."):
                    after.add(position)
            elif self._tests[position].match(name):
                after.add(position + 1)
        if len(self._parts) in after:
            return frozenset({EVERYTHING})
        return self._closed(after)

    def takes_file(self, positions: Positions, name: bytes) -> bool:
        """Returns whether the pattern matches a file of this name."""
        if EVERYTHING in positions:
            return True
        last = len(self._parts) - 1
        if last not in positions:
            return False
        return self._parts[last] == b"**" or self._tests[last].match(name) is not None

    def _closed(self, positions: set[int]) -> Positions:
        """Adds the positions that `**` reaches by matching no directory."""
        closed = set(positions)
        for position in sorted(positions):
            while position < len(self._parts) - 1 and self._parts[position] == b"**":
                position += 1
                closed.add(position)
        return frozenset(closed)


class _Whole(Pattern):
    """A pattern that takes all files."""

    def __init__(self) -> None:
        super().__init__(b"**")
        self.start = frozenset({EVERYTHING})


@lru_cache(maxsize=256)
def _test(part: bytes) -> re.Pattern[bytes]:
    text = fnmatch.translate(part.decode("latin-1")).encode("latin-1")
    hidden = b"" if part.startswith(b".") else rb"(?!\.)"
    return re.compile(hidden + text, re.DOTALL)


WHOLE = _Whole()
