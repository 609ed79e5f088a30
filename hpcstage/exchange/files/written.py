"""Tells the other nodes which files programs of this node write to, and its daemon when none has copies any more.

Owns how long that may take. A daemon that does not drop its copies in time has its node's store closed: no program
there opens a copy any more. An exchange that does not answer ends the group, after which its daemon serves nothing.
"""

from __future__ import annotations

import time
from pathlib import Path

from hpcstage.exchange.service import ExchangeService, Silence, Station
from hpcstage.exchange.transport.frames import CONTROL_TAG, ControlFrame, Sort
from hpcstage.exchange.transport.mpi import Mail
from hpcstage.node import page
from hpcstage.protocol import exchange, nodedir
from hpcstage.protocol.exchange import Confirmed, Written

CLOSE_S = 1.0
"""A daemon has so long to drop its copies."""
LOST_S = 2.0
"""Another exchange has so long to say that they are dropped."""


class WrittenService(ExchangeService):
    """Owns what is told and not confirmed yet, of this node's writes and of others'."""

    sorts = (Sort.WRITTEN, Sort.CONFIRMED)
    orders = (Written, Confirmed)

    def __init__(self, station: Station) -> None:
        super().__init__(station)
        self._awaited: dict[int, tuple[set[int], float]] = {}
        """By number of a message: the positions that have not confirmed it, and until when they may."""
        self._owed: dict[tuple[int, int], float] = {}
        """By position and number of a message: until when this node's daemon may confirm it."""

    def obey(self, message: exchange.Message) -> None:
        """Tells all others of writes, or another node that this one has no copies any more."""
        if isinstance(message, Confirmed):
            place = self.station.nodes.index(message.node)
            for owed in [one for one in self._owed if one[0] == place and one[1] <= message.number]:
                self._confirm(*owed)
        elif isinstance(message, Written):
            self._tell(message)

    def _tell(self, message: Written) -> None:
        others = {place for place, node in enumerate(self.station.nodes) if self.station.place(node) is not None}
        packed = ControlFrame(Sort.WRITTEN, ids=(message.number, *message.ids)).pack()
        for place in others:
            self.station.post.send(packed, place, CONTROL_TAG)
        self._awaited[message.number] = others, time.monotonic() + LOST_S

    def take(self, mail: Mail) -> None:
        """Takes what another node writes to, or has no copies of any more."""
        message = ControlFrame.unpack(mail.data)
        if not message.ids:
            return
        number, *ids = message.ids
        if message.sort is Sort.CONFIRMED:
            for awaited, (others, _) in self._awaited.items():
                if awaited <= number:
                    others.discard(mail.source)
            return
        self._owed[mail.source, number] = time.monotonic() + CLOSE_S
        if self.station.ended:
            self._confirm(mail.source, number)
        else:
            self.station.tell(Written(self.station.nodes[mail.source], number, tuple(ids)))

    def _confirm(self, place: int, number: int) -> None:
        del self._owed[place, number]
        self.station.post.send(ControlFrame(Sort.CONFIRMED, ids=(number,)).pack(), place, CONTROL_TAG)

    def pump(self) -> bool:
        """Tells the daemon what all have confirmed, and does not wait longer than it may. Raises Silence."""
        now = time.monotonic()
        if self._owed and now > min(self._owed.values()):
            page.close(Path(nodedir.PAGE))
            self._confirm_all()
        done = [number for number, (others, _) in self._awaited.items() if not others]
        for number in done:
            del self._awaited[number]
            self.station.tell(Confirmed(self.station.daemon.hello.index, number))
        for others, until in self._awaited.values():
            if now > until:
                node = self.station.nodes[min(others)]
                raise Silence(f"node {node} did not confirm in {LOST_S:g} s that its copies of written files are gone")
        return bool(done)

    def next_at(self) -> float:
        """See ExchangeService."""
        return min((*self._owed.values(), *(until for _, until in self._awaited.values())), default=super().next_at())

    def left(self, node: int) -> None:
        """Waits for a node no more whose run has ended."""
        place = self.station.nodes.index(node)
        for others, _ in self._awaited.values():
            others.discard(place)

    def stop(self) -> None:
        """Waits for nobody, and lets nobody wait: no program of this node reads any more."""
        self._awaited.clear()
        self._confirm_all()

    def _confirm_all(self) -> None:
        """Confirms all that others wait for."""
        for owed in list(self._owed):
            self._confirm(*owed)
