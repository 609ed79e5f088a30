"""Frees space where the local disk fills: a command that writes output files there must not fail because of copies that
it could do without.

Owns when the disk counts as full, and the order. The store goes first, which leaves a part of what is free to the
output files: programs read the source from then on, and the copies are removed. After that, links take the place of
output files that are drained and open nowhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from hpcstage.daemon.resources import Resources
from hpcstage.daemon.service import Service
from hpcstage.protocol import nodedir
from hpcstage.store import storedir
from hpcstage.units import format_size

LOOK_EVERY_S = 1.0
LEAST_SHARE = 0.1
"""The share of what was free at the start that stays free for output files; the store leaves twice as much."""
MOST_LEAST_BYTES = 16 << 30
_HELPER = "give way"


class GivingWay(Service):
    """Looks at the free space of the local disk, and removes what can go when there is little left."""

    def __init__(self, base: Resources, outputs: Sequence[Callable[[int], None]]) -> None:
        """`outputs` free so many bytes of the output files."""
        self._base = base
        self._outputs = outputs
        self._store = storedir.Store(base.node_dir)
        self._has_store = base.spec.stages
        self._is_removing = False
        """Whether the copies of the store are being removed."""
        self._least_bytes = min(MOST_LEAST_BYTES, int(LEAST_SHARE * _free_bytes(base.node_dir)))
        self._next_look = time.monotonic() + LOOK_EVERY_S
        self._is_over = False

    def work(self, now: float) -> None:
        """See Service."""
        if self._is_over or now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        with suppress(OSError):
            left_bytes = _free_bytes(self._base.node_dir)
            if left_bytes < self._least_bytes and not self._is_removing:
                self._give_way(left_bytes)

    def wake_after(self, now: float) -> float | None:
        """See Service."""
        return None if self._is_over else self._next_look - now

    def drain(self) -> Collection[str]:
        """See Service."""
        self._is_over = True
        return ()

    def _give_way(self, left_bytes: int) -> None:
        if self._has_store:
            self._has_store = False
            self._remove_store(left_bytes)
            return
        for free in self._outputs:
            free(2 * self._least_bytes - left_bytes)

    def _remove_store(self, left_bytes: int) -> None:
        """Has no program open a copy any more, then removes all of them."""
        why = f"the local disk had only {format_size(left_bytes)} left, which output files need more than the store"
        self._base.gate.close_for(why)
        for name in os.listdir(self._store.root):
            with suppress(OSError):
                self._store.put_aside(name)
        aside = self._base.node_dir / nodedir.GONE
        self._is_removing = (
            self._base.helpers.start(_HELPER, lambda: _removed(aside), self._store_is_removed) is not None
        )

    def _store_is_removed(self, _result: bytes | None) -> None:
        self._is_removing = False


def _free_bytes(path: Path) -> int:
    now = os.statvfs(path)
    return now.f_bavail * now.f_frsize


def _removed(path: Path) -> bytes:
    storedir.remove_tree(path)
    return b""
