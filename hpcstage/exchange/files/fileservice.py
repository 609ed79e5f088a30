"""Moves files between the nodes of a group: the service of an exchange that fetches, offers and tells of files by id.

Owns what the messages of daemons and exchanges about files lead to; `sender` and `receiver` do it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from hpcstage.exchange.files.filereading import Outgoing
from hpcstage.exchange.files.receiver import Receiver
from hpcstage.exchange.files.sender import Sender
from hpcstage.exchange.service import ExchangeService, Station
from hpcstage.exchange.transport.frames import CONTROL_TAG, ControlFrame, Sort, open_bundle
from hpcstage.exchange.transport.mpi import Mail
from hpcstage.protocol import exchange
from hpcstage.protocol.exchange import Ask, Fetch, Holdings, Offer, Reading, Sent, Together, Why
from hpcstage.store.catalog import LateCatalog


class FileService(ExchangeService):
    """Serves the messages about files."""

    sorts = (Sort.ASK, Sort.REFUSE, Sort.READING, Sort.TOGETHER, Sort.HELD, Sort.FILES)
    orders = (Fetch, Offer, Reading, Together, Holdings)

    def __init__(self, station: Station, store: LateCatalog) -> None:
        super().__init__(station)
        self._store = store
        self._sender = Sender(station.post, station.lanes.reading, Outgoing)
        self._receiver = Receiver(station.post, station.lanes.writing, station.nodes)
        self._asked: dict[int, set[int]] = {}
        """By position: what was asked of this node and its daemon has not answered."""

    # ---- the daemon

    def obey(self, message: exchange.Message) -> None:
        """Fetches files, sends or refuses them, or tells all others what programs do here."""
        if isinstance(message, Fetch):
            self._fetch(message)
        elif isinstance(message, Offer):
            self._offer(message)
        elif isinstance(message, Reading):
            self._tell_others(Sort.READING, message.ids)
        elif isinstance(message, Together):
            self._tell_others(Sort.TOGETHER, (message.id, *message.ids))
        elif isinstance(message, Holdings):
            self._tell_others(Sort.HELD, message.ids)

    def _fetch(self, message: Fetch) -> None:
        catalog, place = self._store.catalog, self.station.place(message.node)
        if place is not None and catalog is not None:
            self._receiver.fetch(place, message.ids, catalog)
        else:
            why = Why.ABSENT if place is None else Why.UNKNOWN
            self.station.tell(*exchange.in_messages(exchange.Missed(message.node, why, message.ids)))

    def _offer(self, message: Offer) -> None:
        place = self.station.place(message.node)
        if place is None:
            return
        self._asked.setdefault(place, set()).difference_update(message.ids)
        why = Why.UNKNOWN if self._store.catalog is None else Why.NONE
        if message.why or why:
            self._sender.refuse(place, message.why or why, message.ids)
        else:
            self._sender.offer(place, message.ids)

    def _tell_others(self, sort: Sort, ids: tuple[int, ...]) -> None:
        catalog = self._store.catalog
        if catalog is None:
            return  # the others have no copies by a manifest that they have not seen
        packed, own = ControlFrame(sort, catalog.fingerprint, ids=ids).pack(), self.station.position
        for place in range(len(self.station.nodes)):
            if place != own:
                self.station.post.send(packed, place, CONTROL_TAG)

    def report(self) -> None:
        """Tells the daemon what has come and gone."""
        receiver, sent = self._receiver, self._sender.sent()
        if self.station.ended:
            return
        if receiver.got:
            self.station.daemon.send_got(receiver.got)
            receiver.got.clear()
        early = [message for message in receiver.missed if self._is_early(message)]
        for message in receiver.missed:
            if message not in early:
                self.station.tell(*exchange.in_messages(message))
        receiver.missed[:] = early
        if sent:
            self.station.tell(*(Sent(self.station.nodes[to], files, size_bytes) for to, files, size_bytes in sent))

    def _is_early(self, message: exchange.Missed) -> bool:
        """Returns whether the daemon is to hear of the membership without this node first: it then knows whom to
        ask."""
        return message.why is Why.ENDED and self.station.membership.nodes[message.node].is_present

    # ---- other exchanges

    def take(self, mail: Mail) -> None:
        """Takes files that have come, or what another node says of files."""
        if mail.buffer is None:
            self._control(mail.source, ControlFrame.unpack(mail.data))
            return
        self.station.files_at = time.monotonic()
        bundle, catalog = open_bundle(mail.data), self._store.catalog
        if catalog is None or self.station.ended:
            self.station.post.arrivals.give(mail.buffer)
        else:
            self._receiver.bundle(mail, bundle, catalog)

    def _control(self, source: int, message: ControlFrame) -> None:
        if message.sort is Sort.REFUSE:
            if message.why is Why.ENDED:
                self.station.ended_nodes.add(self.station.nodes[source])
            self._receiver.refused(source, message.why, message.ids)
            return
        catalog = self._store.catalog
        is_same = catalog is not None and catalog.fingerprint == message.fingerprint
        if message.sort is Sort.ASK:
            if self.station.ended or not is_same:
                self._sender.refuse(source, Why.ENDED if self.station.ended else Why.UNKNOWN, message.ids)
            else:
                self._asked.setdefault(source, set()).update(message.ids)
                self.station.tell(*exchange.in_messages(Ask(self.station.nodes[source], message.ids)))
        elif is_same:
            self.station.tell(*_told(message, self.station.nodes[source]))

    # ---- what there is to do

    def pump(self) -> bool:
        """Reads, sends and writes."""
        catalog = self._store.catalog if self._sender.has_turns else None
        started = catalog is not None and self._sender.pump(catalog)
        if self._sender.has_turns:
            self.station.files_at = time.monotonic()
        return self.station.lanes.collect() or started

    def left(self, node: int) -> None:
        """Gives up what a node asked for. What it was asked for it still sends or refuses, see `stop`."""
        place = self.station.nodes.index(node)
        self._sender.drop(place)
        self._asked.pop(place, None)

    def stop(self) -> None:
        """Refuses what others still wait for, but for what is on its way to them: an exchange lives until all have
        ended."""
        self._sender.stop()
        for place, ids in self._asked.items():
            self._sender.refuse(place, Why.ENDED, tuple(ids))
        self._asked.clear()

    def descriptors(self) -> Sequence[int]:
        """Returns what shows that files were read or written."""
        return (self.station.lanes.wake.fileno(),)

    def ready(self) -> None:
        """Clears that descriptor, before `pump` collects."""
        self.station.lanes.wake.clear()


def _told(message: ControlFrame, node: int) -> Iterator[exchange.Message]:
    """Yields what the daemon is told of what programs of a node do, or the node has."""
    if message.sort is Sort.READING:
        yield Reading(node, message.ids)
    elif message.sort is Sort.HELD:
        yield Holdings(node, message.ids)
    elif message.sort is Sort.TOGETHER and message.ids:
        yield Together(message.ids[0], message.ids[1:])
