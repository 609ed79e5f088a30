"""Lists of paths that the program leaves below orders/: reads them, as ids of the manifest.

Owns their files and the helpers that map long ones; short ones are mapped at once. What an order is used for is
`ordering`'s.
"""

from __future__ import annotations

import contextlib
import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hpcstage.daemon.process.helpers import Helpers
from hpcstage.daemon.reading import scanning

HELPER = "order "
SHORT_BYTES = 256 << 10
"""A few thousand paths: looked up in milliseconds, less than a fork."""


@dataclass(frozen=True)
class Listed:
    """A list that was read."""

    name: str
    ids: array[int]
    paths: int
    """Of the dataset's files, as often as they are named."""


class Lists:
    """`on_list` gets each list once it is read; one that cannot be read is passed over."""

    def __init__(self, node_dir: Path, helpers: Helpers, on_list: Callable[[Listed], None]) -> None:
        self._node_dir = node_dir
        self._helpers = helpers
        self._on_list = on_list

    def read(self, name: str, files: int) -> None:
        """Reads the list of this name; `files` are in the manifest."""
        with contextlib.suppress(OSError):
            if (self._node_dir / "orders" / name).stat().st_size <= SHORT_BYTES:
                self._mapped(name, files, scanning.map_order(self._node_dir, name))
                return
        self._helpers.start(
            HELPER + name,
            lambda: scanning.map_order(self._node_dir, name),
            lambda data: self._mapped(name, files, data),
        )

    def _mapped(self, name: str, files: int, data: bytes | None) -> None:
        if data is None:
            return
        ids = scanning.load_order(self._node_dir, name, files)
        for left in (name, name + ".ids"):
            (self._node_dir / "orders" / left).unlink(missing_ok=True)
        self._on_list(Listed(name, ids, int(json.loads(data)["ids"])))
