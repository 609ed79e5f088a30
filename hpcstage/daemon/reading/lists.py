"""Reads the lists of paths that the program leaves below orders/, as ids of the manifest.

Owns their files and the helpers that map long ones; short ones are mapped at once. `ordering` decides what an order is
used for.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcstage.daemon.reading import epochs, scanning
from hpcstage.forked import Helpers
from hpcstage.protocol import nodedir

HELPER = "order "
SHORT_BYTES = 256 << 10
"""The size of a few thousand paths, which are looked up in milliseconds, less than a fork takes."""


@dataclass(frozen=True)
class ReadList:
    """A list that was read."""

    name: str
    ids: array[int]
    """The files of the manifest that the list names, those below a named directory included."""


class Lists:
    """Reads lists, at once or in helpers, and gives each to `on_list`; it passes over one that cannot be read."""

    def __init__(self, node_dir: Path, helpers: Helpers, files: int, on_list: Callable[[ReadList], None]) -> None:
        """`files` is the number of files in the manifest."""
        self._node_dir = node_dir
        self._helpers = helpers
        self._files = files
        self._on_list = on_list

    def read(self, name: str) -> None:
        """Reads the list of this name, if it is the name of a file."""
        if not epochs.is_name(name):
            return
        with contextlib.suppress(OSError):
            if (self._node_dir / nodedir.ORDERS / name).stat().st_size <= SHORT_BYTES:
                self._mapped(name, scanning.map_order(self._node_dir, name))
                return
        self._helpers.start(
            HELPER + name,
            lambda: scanning.map_order(self._node_dir, name),
            lambda data: self._mapped(name, data),
        )

    def _mapped(self, name: str, data: bytes | None) -> None:
        if data is None:
            return
        ids = scanning.load_order(self._node_dir, name, self._files)
        for left in (name, name + ".ids"):
            (self._node_dir / nodedir.ORDERS / left).unlink(missing_ok=True)
        self._on_list(ReadList(name, ids))
