"""Files between source and nodes: transfers, links, who has what.

Owns the clock's heap, the placement, the queues of the nodes and what each holds. When a file that a reader waits for
has come, `_arrived` is called, which is the training's.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from heapq import heappush

from benchmarks.simulated.values import DIRECT, Machine, Outcome, Work
from hpcstage.plan.placement.placements import Placement, Placing, place
from hpcstage.plan.types import Budget

FETCHED, READ, GOT, STEP = range(4)
UNASKED, COMING, HERE = range(3)


class Moving:
    """The nodes' stores and all that is on its way."""

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

    def _arrived(self, file_id: int) -> None:
        """The reader of an id has it."""
        raise NotImplementedError

    def _place(self, kind: Placing) -> None:
        work = self.work
        blocks = -(-work.file_bytes // 4096)
        room = Budget(int(work.room * blocks * work.files) * 4096, work.files)
        sizes = array("Q", [work.file_bytes]) * work.files
        self._share = place(kind, sizes, [room] * work.nodes)
        self._most_held = int(work.room * work.files)
        if kind is Placing.PRIVATE:
            return
        for file_id in self.shuffled(0) if work.known else ():
            # What `own` gives for this order, in one pass for all nodes.
            if not self._share.unplaced(file_id):
                self._todo[self._share.fetcher(file_id)].append(file_id)
        for node in range(work.nodes) if not work.known else ():
            self._todo[node].extend(self._share.own(node))
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
