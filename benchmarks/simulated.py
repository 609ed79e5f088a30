"""Nodes, links and one source as a discrete-event simulation, driven by the placement that real nodes compute.

Owns the clock and what waits for what; what is run and what it should come to is in `scale`. What is modelled: the
source serves one transfer at a time at its rate (first come, first served), each with a latency; a node's link carries
one file at a time in each direction; each node keeps a number of transfers from the source and of requests to others
in flight, and its readers work a number of files ahead of the training; a step needs all files of its batch; epochs
begin together. Reading what is on the node takes no time. What is not: stragglers, other jobs, processors.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from hpcstage.plan.placement.placements import Placement, Placing, place
from hpcstage.plan.types import Budget

DIRECT = "direct"
FETCHED, READ, GOT, STEP = range(4)
UNASKED, COMING, HERE = range(3)


@dataclass(frozen=True)
class Machine:
    """Rates and limits."""

    source_bytes_per_s: float
    link_bytes_per_s: float
    source_file_s: float = 0.002
    link_file_s: float = 0.0001
    transfers: int = 32
    asks: int = 64
    asked_bytes: int = 64 << 20


@dataclass(frozen=True)
class Work:
    """What is trained, and how the files are placed."""

    nodes: int
    kind: str
    files: int
    file_bytes: int
    epochs: int
    compute_s: float
    """Of an epoch on one node."""
    batch: int = 8
    """Files of a step on each node."""
    ahead: int = 32
    """Files that a node's readers may be ahead of the training."""
    seed: int = 1

    @property
    def dataset_bytes(self) -> int:
        """Of all files."""
        return self.files * self.file_bytes


@dataclass
class Outcome:
    """What came out."""

    epoch_s: list[float] = field(default_factory=list)
    source_bytes: int = 0
    peer_bytes: int = 0
    messages: int = 0
    """Between nodes: requests and files."""
    most_messages: int = 0
    """Of one node, sent and received."""
    most_sent_bytes: int = 0
    """By one node to others."""
    local: list[float] = field(default_factory=list)
    """Per epoch: the share of reads that found the file on the node."""
    peers: list[float] = field(default_factory=list)
    source: list[float] = field(default_factory=list)


class Simulation:
    """One job: the nodes' stores, all that is on its way, and the training."""

    def __init__(self, work: Work, machine: Machine) -> None:
        """Places the files."""
        self.work, self.machine = work, machine
        self.out = Outcome()
        self.now_s = 0.0
        count, files = work.nodes, work.files
        self._heap: list[tuple[float, int, int, int, int]] = []
        self._number = 0
        self._source_free_s = 0.0
        self._out_free_s, self._in_free_s = [0.0] * count, [0.0] * count
        self._sent, self._talk = [0] * count, [0] * count
        self._share: Placement | None = None
        self._state = bytearray(files)
        self._held: list[set[int]] = [set() for _ in range(count)]
        self._copies: list[bytearray] = []
        self._todo: list[deque[int]] = [deque() for _ in range(count)]
        self._wanted: list[deque[int]] = [deque() for _ in range(count)]
        self._fill: list[deque[int]] = [deque() for _ in range(count)]
        self._most_asked = max(1, min(machine.asks, machine.asked_bytes // max(1, work.file_bytes)))
        self._fetching, self._asking = [0] * count, [0] * count
        self._waiters: dict[int, list[int]] = {}
        self._reader = array("I", bytes(4 * files))
        self._pending = bytearray(files)
        if work.kind != DIRECT:
            self._place(Placing(work.kind))

    def _place(self, kind: Placing) -> None:
        work = self.work
        blocks = -(-work.file_bytes // 4096)
        room = Budget(blocks * work.files * 4096, work.files)
        sizes = array("Q", [work.file_bytes]) * work.files
        self._share = place(kind, sizes, [room] * work.nodes)
        if kind is Placing.PRIVATE:
            return
        for file_id in self.shuffled(0):
            # What `own` gives for this order, in one pass for all nodes.
            self._todo[self._share.fetcher(file_id)].append(file_id)
        if kind is Placing.REPLICATE:
            self._copies = [bytearray(work.files) for _ in range(work.nodes)]
            for node in range(work.nodes):
                self._fill[node].extend(self._share.others(node))

    def shuffled(self, epoch: int) -> list[int]:
        """What all nodes together read in an epoch: node n takes every p-th from the n-th on."""
        ids = list(range(self.work.files))
        random.Random(f"{self.work.seed}/{epoch}").shuffle(ids)
        return ids

    def _at(self, time_s: float, kind: int, node: int, file_id: int = 0) -> None:
        self._number += 1
        heappush(self._heap, (time_s, self._number, kind, node, file_id))

    # ---- moving files

    def _source(self) -> float:
        """When a transfer that begins now will have come."""
        size = self.work.file_bytes
        self.out.source_bytes += size
        self._source_free_s = max(self.now_s, self._source_free_s) + size / self.machine.source_bytes_per_s
        return self._source_free_s + self.machine.source_file_s

    def _pump(self, node: int) -> None:
        """Keeps the node's transfers from the source in flight: what is waited for, then its own in order."""
        while self._fetching[node] < self.machine.transfers:
            queue = self._wanted[node] or self._todo[node]
            if not queue:
                return
            file_id = queue.popleft()
            if self._state[file_id] == UNASKED:
                self._state[file_id] = COMING
                self._fetching[node] += 1
                self._at(self._source(), FETCHED, node, file_id)

    def _fetched(self, node: int, file_id: int) -> None:
        self._fetching[node] -= 1
        self._state[file_id] = HERE
        for other in self._waiters.pop(file_id, ()):
            self._send(node, other, file_id)
        if self._copies:
            self._copies[node][file_id] = HERE
        if self._reader[file_id] == node and self._pending[file_id]:
            self._arrived(file_id)
        self._pump(node)

    def _ask(self, node: int, owner: int, file_id: int) -> None:
        self._asking[node] += 1
        self.out.messages += 1
        self._talk[node] += 1
        self._talk[owner] += 1
        if self._state[file_id] == HERE:
            self._send(owner, node, file_id)
        else:
            self._waiters.setdefault(file_id, []).append(node)

    def _send(self, node: int, other: int, file_id: int) -> None:
        size, machine = self.work.file_bytes, self.machine
        time_s = size / machine.link_bytes_per_s
        begins_s = max(self.now_s + machine.link_file_s, self._out_free_s[node])
        self._out_free_s[node] = begins_s + time_s
        self._in_free_s[other] = max(begins_s, self._in_free_s[other]) + time_s
        self.out.messages += 1
        self.out.peer_bytes += size
        self._sent[node] += size
        self._talk[node] += 1
        self._talk[other] += 1
        self._at(self._in_free_s[other] + machine.link_file_s, GOT, other, file_id)

    def _got(self, node: int, file_id: int) -> None:
        self._asking[node] -= 1
        if self._copies:
            self._copies[node][file_id] = HERE
        if self._reader[file_id] == node and self._pending[file_id]:
            self._arrived(file_id)
        self._ask_ahead(node)

    def _ask_ahead(self, node: int) -> None:
        """Fills a replica in the background."""
        queue, share = self._fill[node], self._share
        while queue and share is not None and self._asking[node] < self._most_asked:
            file_id = queue.popleft()
            if self._copies[node][file_id] == UNASKED:
                self._copies[node][file_id] = COMING
                self._ask(node, share.fetcher(file_id), file_id)

    def run(self) -> Outcome:
        """All epochs."""
        handlers: tuple[Callable[[int, int], None], ...] = (self._fetched, self._read_done, self._got, self._stepped)
        self._handlers = handlers
        for node in range(self.work.nodes):
            self._pump(node)
            self._ask_ahead(node)
        for epoch in range(self.work.epochs):
            self._epoch(epoch)
        out = self.out
        out.most_sent_bytes, out.most_messages = max(self._sent), max(self._talk)
        return out

    # ---- an epoch

    def _epoch(self, epoch: int) -> None:
        work = self.work
        ids = self.shuffled(epoch)
        self._reading = [ids[node :: work.nodes] for node in range(work.nodes)]
        self._step_of = array("I", bytes(4 * work.files))
        for node, mine in enumerate(self._reading):
            for position, file_id in enumerate(mine):
                self._reader[file_id] = node
                self._step_of[file_id] = position // work.batch
        self._missing = [
            [min(work.batch, len(mine) - at) for at in range(0, len(mine), work.batch)] for mine in self._reading
        ]
        self._asked, self._step = [0] * work.nodes, [0] * work.nodes
        self._issuing, self._busy = [False] * work.nodes, [False] * work.nodes
        self._ended = 0
        self._found = [0, 0, 0]
        began_s = self.now_s
        for node in range(work.nodes):
            self._advance(node)
        while self._ended < work.nodes:
            self.now_s, _, kind, node, file_id = heappop(self._heap)
            self._handlers[kind](node, file_id)
        self.out.epoch_s.append(self.now_s - began_s)
        for share, reads in zip((self.out.local, self.out.peers, self.out.source), self._found, strict=True):
            share.append(reads / work.files)

    # ---- training

    def _advance(self, node: int) -> None:
        """Readers ask for what they may be ahead; training goes on if it can."""
        self._issue(node)
        self._begin_step(node)

    def _issue(self, node: int) -> None:
        if self._issuing[node]:
            return
        self._issuing[node] = True
        mine = self._reading[node]
        limit = min(len(mine), self._step[node] * self.work.batch + self.work.ahead)
        while self._asked[node] < limit:
            self._asked[node] += 1
            self._read(node, mine[self._asked[node] - 1])
        self._issuing[node] = False

    def _begin_step(self, node: int) -> None:
        step, missing = self._step[node], self._missing[node]
        if self._busy[node]:
            return
        if step == len(missing):
            self._busy[node] = True
            self._ended += 1
        elif missing[step] == 0:
            self._busy[node] = True
            part = min(self.work.batch, len(self._reading[node]) - step * self.work.batch)
            self._at(self.now_s + self.work.compute_s * part / self.work.files, STEP, node)

    def _stepped(self, node: int, _: int) -> None:
        self._busy[node] = False
        self._step[node] += 1
        self._advance(node)

    def _arrived(self, file_id: int) -> None:
        """The reader of an id has it."""
        self._pending[file_id] = 0
        node, step = self._reader[file_id], self._step_of[file_id]
        missing = self._missing[node]
        missing[step] -= 1
        self._issue(node)
        if not missing[step] and step == self._step[node]:
            self._begin_step(node)

    # ---- reading

    def _read(self, node: int, file_id: int) -> None:
        self._pending[file_id] = 1
        share = self._share
        if share is None:
            self._from_source(node, file_id)
        elif share.kind is Placing.PRIVATE:
            self._private(node, file_id)
        elif (owner := share.fetcher(file_id)) == node:
            self._own(node, file_id)
        else:
            self._others(node, owner, file_id)

    def _hit(self, where: int, file_id: int, *, here: bool = False) -> None:
        self._found[where] += 1
        if here:
            self._arrived(file_id)

    def _private(self, node: int, file_id: int) -> None:
        if file_id in self._held[node]:
            self._hit(0, file_id, here=True)
        else:
            self._from_source(node, file_id)

    def _own(self, node: int, file_id: int) -> None:
        here = self._state[file_id] == HERE
        self._hit(0, file_id, here=here)
        if self._state[file_id] == UNASKED:
            self._wanted[node].appendleft(file_id)
            self._pump(node)

    def _others(self, node: int, owner: int, file_id: int) -> None:
        held = self._copies[node][file_id] if self._copies else UNASKED
        if held == HERE:
            self._hit(0, file_id, here=True)
            return
        self._hit(1, file_id)
        if held == UNASKED:
            self._ask(node, owner, file_id)
            if self._copies:
                self._copies[node][file_id] = COMING
        if self._state[file_id] == UNASKED:
            # Also where the background has asked for it: now it is urgent.
            self._wanted[owner].append(file_id)
            self._pump(owner)

    def _from_source(self, node: int, file_id: int) -> None:
        self._hit(2, file_id)
        self._at(self._source(), READ, node, file_id)

    def _read_done(self, node: int, file_id: int) -> None:
        share = self._share
        if share is not None and share.kind is Placing.PRIVATE:
            self._held[node].add(file_id)
        self._arrived(file_id)
