"""What programs of this job write to, across its nodes: who writes on one makes the others drop their copies.

Owns what this node has told, since a group that is started anew must hear it again, and what it was told before it had
a manifest. A node that no group reaches hears nothing: its programs may read what was staged before the write.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from hpcstage.protocol import exchange

Send = Callable[[exchange.Message], None]


class Written:
    """See the module. `drop` makes copies invisible."""

    def __init__(self, drop: Callable[[list[int]], None]) -> None:
        self._drop = drop
        self._told = array("I")
        self._early: list[int] | None = []
        """None: there is a manifest."""

    def tell(self, ids: Iterable[int], send: Send | None) -> None:
        """A program of this node writes; `send` is None while there is no group."""
        new = array("I", ids)
        self._told.extend(new)
        if send is not None:
            _send(new, send)

    def connect(self, send: Send) -> None:
        """A group stands: all is said that was said before."""
        _send(self._told, send)

    def hear(self, ids: Iterable[int]) -> None:
        """A program of another node writes."""
        if self._early is None:
            self._drop(list(ids))
        else:
            self._early.extend(ids)

    def open(self) -> None:
        """The manifest is here."""
        early, self._early = self._early, None
        if early:
            self._drop(early)


def _send(ids: array[int], send: Send) -> None:
    for message in exchange.in_messages(exchange.Written(tuple(ids))):
        send(message)
