"""Keeps what comes before there is a manifest, in order: messages of programs and of other nodes.

Writes, orders and announcements are answered when they come; requests and waits for the staging are answered when they
are taken out.
"""

from __future__ import annotations

from hpcstage.daemon.service import Message
from hpcstage.protocol import exchange
from hpcstage.protocol.shim import Kind

Item = Message | exchange.Written | exchange.Ask
UNANSWERED = frozenset({Kind.REQUEST, Kind.STAGED})
"""The kinds of messages that are not answered before they are taken out."""
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
        """Keeps a message. Returns False if there are too many of its kind."""
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

    def take_requests(self) -> list[Message]:
        """Takes out the requests, which have waited long enough."""
        requests = [item for item in self._items if isinstance(item, Message) and item.kind is Kind.REQUEST]
        self._items = [item for item in self._items if _kind(item) is not Kind.REQUEST]
        return requests

    def drop(self, token: int) -> None:
        """Forgets the messages that wait for an answer on a connection that has ended."""
        self._items = [item for item in self._items if not _waits(item, token)]

    def take_asks(self) -> list[exchange.Ask]:
        """Takes out what other nodes asked for."""
        asks = [item for item in self._items if isinstance(item, exchange.Ask)]
        self._items = [item for item in self._items if not isinstance(item, exchange.Ask)]
        return asks


def _waits(item: Item, token: int) -> bool:
    return isinstance(item, Message) and item.kind in UNANSWERED and item.token == token


def _kind(item: Item) -> object:
    """Returns the kind of a message of a program, or the class of one of a node."""
    return item.kind if isinstance(item, Message) else type(item)
