"""Keeps what comes before there is a manifest, in order: requests of programs, and messages of other nodes.

Writes, orders and announcements are answered when they come; wants and waits for the staging are answered when they are
taken out.
"""

from __future__ import annotations

from hpcstage.daemon.service import Request
from hpcstage.protocol import exchange
from hpcstage.protocol.shim import Kind

Item = Request | exchange.Written | exchange.Ask
UNANSWERED = frozenset({Kind.WANT, Kind.STAGED})
"""The kinds of requests that are not answered before they are taken out."""
WRITES = frozenset({Kind.WROTE, Kind.LANDED, exchange.Written})
LIMITED = (frozenset({Kind.ORDER, Kind.EPOCH}), frozenset({exchange.Ask}))
MOST_LIMITED = 1024
"""The most orders and announcements, and the most messages of nodes that ask for files; without them staging only takes
longer."""


class Inbox:
    """Owns what came. A write is never dropped, since no stale copy may become visible."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def keep(self, item: Item) -> bool:
        """Keeps a request or a message. Returns False if there are too many of its kind."""
        for kinds in LIMITED:
            if _kind(item) in kinds and sum(_kind(other) in kinds for other in self._items) >= MOST_LIMITED:
                return False
        self._items.append(item)
        return True

    def take_writes(self) -> list[Item]:
        """Takes out the writes, which were answered: they hold before anything is copied."""
        writes = [item for item in self._items if _kind(item) in WRITES]
        self._items = [item for item in self._items if _kind(item) not in WRITES]
        return writes

    def take(self) -> list[Item]:
        """Takes out everything, in the order in which it came."""
        items, self._items = self._items, []
        return items

    def take_wants(self) -> list[Request]:
        """Takes out the wants, which have waited long enough."""
        wants = [item for item in self._items if isinstance(item, Request) and item.kind is Kind.WANT]
        self._items = [item for item in self._items if _kind(item) is not Kind.WANT]
        return wants

    def drop(self, token: int) -> None:
        """Forgets the requests that wait for an answer on a connection that has ended."""
        self._items = [item for item in self._items if not _waits(item, token)]

    def take_asks(self) -> list[exchange.Ask]:
        """Takes out what other nodes asked for."""
        asks = [item for item in self._items if isinstance(item, exchange.Ask)]
        self._items = [item for item in self._items if not isinstance(item, exchange.Ask)]
        return asks


def _waits(item: Item, token: int) -> bool:
    return isinstance(item, Request) and item.kind in UNANSWERED and item.token == token


def _kind(item: Item) -> object:
    """Returns the kind of a request, or the class of a message."""
    return item.kind if isinstance(item, Request) else type(item)
