"""Spreads the writes of programs to the other nodes of the job, which drop their copies of what was written to.

Owns the ids that this node has told the others, since it must tell a group that is started anew again, and those that
it was told before it had a manifest. A node that is in no group is told nothing: its programs may read copies that were
staged before the write.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from hpcstage.protocol import exchange

Send = Callable[[exchange.Message], None]


class Written:
    """Owns what the module says. `drop` makes copies invisible."""

    def __init__(self, drop: Callable[[list[int]], None]) -> None:
        self._drop = drop
        self._told = array("I")
        self._early: list[int] | None = []
        """Ids that were told before there was a manifest; None once there is one."""

    def tell(self, ids: Iterable[int], send: Send | None) -> None:
        """Tells the other nodes what a program of this node writes to; `send` is None while there is no group."""
        new = array("I", ids)
        self._told.extend(new)
        if send is not None:
            _send(new, send)

    def connect(self, send: Send) -> None:
        """Tells a new group everything that was told before."""
        _send(self._told, send)

    def hear(self, ids: Iterable[int]) -> None:
        """Drops the copies of files that a program of another node writes to."""
        if self._early is None:
            self._drop(list(ids))
        else:
            self._early.extend(ids)

    def open(self) -> None:
        """Drops what was told before, now that there is a manifest."""
        early, self._early = self._early, None
        if early:
            self._drop(early)


def _send(ids: array[int], send: Send) -> None:
    for message in exchange.in_messages(exchange.Written(tuple(ids))):
        send(message)
