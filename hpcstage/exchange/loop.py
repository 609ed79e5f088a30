"""Runs the exchange of a node: one loop over its daemon's link, the messages of other exchanges, and two threads for
files.

The module owns when the loop sleeps: the longer nothing has happened, the longer, since MPI has nothing that one could
wait for. An exchange ends with its daemon, with the process that started it, and with any other exchange, so that
nobody waits for what cannot come.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from hpcstage.errors import UsageError
from hpcstage.exchange.broadcast import Spread
from hpcstage.exchange.daemonlink import DaemonLink
from hpcstage.exchange.files.lane import Lane, Wake
from hpcstage.exchange.files.receiver import Receiver
from hpcstage.exchange.files.sender import Sender
from hpcstage.exchange.handover import Handed
from hpcstage.exchange.transport.buffers import Pool
from hpcstage.exchange.transport.frames import CONTROL_TAG, Bundle, Control, Place, Sort, open_bundle
from hpcstage.exchange.transport.mpi import Mail, Post
from hpcstage.protocol import exchange, nodedir
from hpcstage.protocol.exchange import Why
from hpcstage.store.catalog import Catalog

BUFFERS = 16
"""The number of buffers for each direction, of 1 MiB of data each."""
SPIN_S = 500e-6
"""The loop asks MPI again and again for so long while something is under way: each time MPI moves a piece of it."""
BUSY_S = 2e-3
"""After so long without anything the other side is slow, and the loop asks less."""
SLOW_SPIN_S = 100e-6
LEAST_SLEEP_S = 50e-6
MOST_SLEEP_S = 20e-3
SLEEP_SHARE = 1 / 8
"""The loop sleeps for this part of the time since something last happened: what comes then is late by at most so much
of it."""


class Silence(Exception):
    """Nothing came from a neighbour for too long, or the process that started the exchange has gone."""


class Exchange:
    """The exchange of this node. `nodes` are the indices of the nodes of the group, by position."""

    def __init__(self, daemon: DaemonLink, posts: tuple[Post, Pool], nodes: Sequence[int], silence_s: float) -> None:
        self._daemon = daemon
        self._post, arrivals = posts
        self._arrivals = arrivals
        self._nodes = list(nodes)
        self._places = {node: place for place, node in enumerate(nodes)}
        self._position = self._places[daemon.hello.index]
        self._silence_s = silence_s
        self._wake = Wake()
        self._reading, self._writing = Lane("reading", self._wake), Lane("writing", self._wake)
        sends = Pool(BUFFERS)
        self._sender = Sender(self._post, self._reading, sends)
        self._receiver = Receiver(self._post, self._writing, arrivals, nodes)
        lanes, at = (self._reading, self._writing), (self._position, len(self._nodes))
        self._spread = Spread(self._post, lanes, (sends, arrivals), at)
        self._incoming = _fresh_incoming()
        self._handed = Handed(self._spread, self._incoming)
        self._catalog: Catalog | None = None
        self._parent = os.pidfd_open(os.getppid())
        self._moved = self._heard = time.monotonic()
        self._beat_due = self._moved
        self._at_rest = False
        self._beaten = self._moved
        self.ended = False
        """Whether the daemon has said End."""

    def step(self) -> None:
        """Waits a little if nothing happened in the step before, and does what there is to do."""
        now = time.monotonic()
        moved = self._wait(now) | self._post.poll(self._spin_s(now))
        for mail in self._post.take():
            self._mail(mail)
            moved = True
        moved |= self._spread.pump()
        if self._catalog is not None:
            moved |= self._sender.pump(self._catalog)
        moved |= self._reading.collect() | self._writing.collect()
        self._at_rest = not moved
        if moved:
            self._moved = now
            self._report()
        self._beat(now)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing of this node is under way to another."""
        return not self._post.sending and not self._reading.pending

    def close(self) -> None:
        """Removes what was not published."""
        shutil.rmtree(self._incoming, ignore_errors=True)

    # ---- the daemon

    def _obey(self, message: exchange.Message) -> None:
        if isinstance(message, exchange.Fetch):
            self._fetch(message)
        elif isinstance(message, exchange.Offer):
            self._offer(message)
        elif isinstance(message, exchange.Manifest):
            self._handed.begin(message)
        elif isinstance(message, exchange.Written):
            self._tell_others(Sort.WRITTEN, message.ids)
        elif isinstance(message, exchange.Reading):
            self._tell_others(Sort.READING, message.ids)
        elif isinstance(message, exchange.End):
            self.ended = True
            self._sender.stop()

    def _fetch(self, message: exchange.Fetch) -> None:
        catalog = self._look()
        place = self._places.get(message.node, self._position)
        if place == self._position:
            self._missed(message.node, Why.ABSENT, message.ids)
        elif catalog is None:
            self._missed(message.node, Why.UNKNOWN, message.ids)
        else:
            self._receiver.fetch(place, message.ids, catalog)

    def _offer(self, message: exchange.Offer) -> None:
        to = self._places.get(message.node, self._position)
        if to == self._position:
            return
        if message.why is not Why.NONE:
            self._sender.refuse(to, message.why, message.ids)
        elif self._look() is None:
            self._sender.refuse(to, Why.UNKNOWN, message.ids)
        else:
            self._sender.offer(to, message.ids)

    def _tell_others(self, sort: Sort, ids: tuple[int, ...]) -> None:
        catalog = self._look()
        if catalog is None:
            return  # the others have no copies by a manifest that they have not seen
        packed = Control(sort, catalog.fingerprint, ids=ids).pack()
        for place in range(len(self._nodes)):
            if place != self._position:
                self._post.send(packed, place, CONTROL_TAG)

    def _missed(self, node: int, why: Why, ids: Sequence[int]) -> None:
        self._daemon.send(*exchange.in_messages(exchange.Missed(node, why, tuple(ids))))

    def _look(self) -> Catalog | None:
        """Returns the catalog of the node's manifest, once the manifest is there."""
        if self._catalog is None:
            with contextlib.suppress(UsageError):
                self._catalog = Catalog(Path(nodedir.MANIFEST), os.fsencode(self._incoming) + b"/")
        return self._catalog

    def _report(self) -> None:
        """Tells the daemon what has come and gone."""
        manifest = self._handed.finished()
        if manifest is not None and (catalog := self._look()) is not None:
            catalog.fingerprint = self._handed.fingerprint
        receiver, sent = self._receiver, self._sender.sent()
        if self.ended:
            receiver.got.clear()
            receiver.missed.clear()
            receiver.gone.clear()
            return
        if manifest is not None:
            self._daemon.send(manifest)
        if receiver.got:
            self._daemon.send_got(receiver.got)
            receiver.got.clear()
        for missed in receiver.missed:
            self._daemon.send(*exchange.in_messages(missed))
        receiver.missed.clear()
        for place in receiver.gone:
            if self._places.pop(self._nodes[place], None) is not None:
                self._daemon.send(exchange.Gone(self._nodes[place]))
        receiver.gone.clear()
        self._daemon.send(*(exchange.Sent(self._nodes[to], files, size) for to, files, size in sent))

    # ---- other exchanges

    def _mail(self, mail: Mail) -> None:
        self._heard = time.monotonic()
        if mail.buffer is None:
            self._control(mail.source, Control.unpack(mail.data))
            return
        bundle = open_bundle(mail.data)
        if bundle.place is Place.STORE:
            self._files(mail, bundle)
        else:
            self._spread.bundle(mail, bundle, self._handed.scratch(bundle.place))

    def _files(self, mail: Mail, bundle: Bundle) -> None:
        if self._catalog is None or self.ended:
            assert mail.buffer is not None
            self._arrivals.give(mail.buffer)
        else:
            self._receiver.bundle(mail, bundle, self._catalog)

    def _control(self, source: int, message: Control) -> None:
        if message.sort is Sort.ASK:
            self._asked(source, message)
        elif message.sort is Sort.REFUSE:
            self._receiver.refused(source, message.why, message.ids)
        elif message.sort in (Sort.WRITTEN, Sort.READING) and not self.ended:
            catalog = self._look()
            if catalog is not None and catalog.fingerprint == message.fingerprint:
                told = exchange.Written(message.ids) if message.sort is Sort.WRITTEN else exchange.Reading(message.ids)
                self._daemon.send(told)

    def _asked(self, source: int, message: Control) -> None:
        catalog = self._look()
        if self.ended:
            self._sender.refuse(source, Why.ENDED, message.ids)
        elif catalog is None or catalog.fingerprint != message.fingerprint:
            self._sender.refuse(source, Why.UNKNOWN, message.ids)
        else:
            self._daemon.send(*exchange.in_messages(exchange.Ask(self._nodes[source], message.ids)))

    def _beat(self, now: float) -> None:
        """Sends a beat to the next node of the ring, and raises Silence if nothing has come for too long. Time in which
        this process was stopped is not counted."""
        if len(self._nodes) == 1:
            return
        if now - self._beaten > self._silence_s / 4:
            self._heard = now
        self._beaten = now
        if now > self._beat_due:
            self._beat_due = now + self._silence_s / 4
            self._post.send(Control(Sort.BEAT).pack(), (self._position + 1) % len(self._nodes), CONTROL_TAG)
        if now - self._heard > self._silence_s:
            neighbour = self._nodes[self._position - 1]
            raise Silence(f"nothing was heard of node {neighbour} for {self._silence_s:g} s")

    # ---- waiting

    def _spin_s(self, now: float) -> float:
        if not self._at_rest:
            return 0.0
        return SPIN_S if now - self._moved < BUSY_S else SLOW_SPIN_S

    def _sleep_s(self, still_s: float) -> float:
        if self._post.is_active and still_s < BUSY_S:
            return 0.0
        return min(MOST_SLEEP_S, max(LEAST_SLEEP_S, still_s * SLEEP_SHARE))

    def _wait(self, now: float) -> bool:
        """Waits for the daemon, for the threads, or as long as messages of others may be late. Obeys the daemon.
        Returns whether anything came."""
        timeout = self._sleep_s(now - self._moved) if self._at_rest else 0.0
        link_open = () if self.ended else (self._daemon,)
        unsent = link_open if self._daemon.has_unsent else ()
        readable, _, _ = select.select((*link_open, self._wake, self._parent), unsent, (), timeout)
        if unsent:
            self._daemon.flush()
        if not readable:
            return False
        if self._parent in readable:
            raise Silence("who started it has gone")
        if self._wake in readable:
            self._wake.clear()
        if self._daemon in readable:
            for message in self._daemon.receive():
                self._obey(message)
        return True


def _fresh_incoming() -> str:
    """Makes this exchange's directory below `incoming`, and removes those of earlier exchanges."""
    os.makedirs(nodedir.INCOMING, mode=0o700, exist_ok=True)
    for name in os.listdir(nodedir.INCOMING):
        if name.startswith("peer-"):
            shutil.rmtree(os.path.join(nodedir.INCOMING, name), ignore_errors=True)
    path = f"{nodedir.INCOMING}/peer-{os.getpid()}"
    os.mkdir(path, 0o700)
    return path
