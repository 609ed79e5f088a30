"""Training on all nodes: epochs, steps, readers that work ahead, and where each read is served."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from heapq import heappop

from benchmarks.simulated.moving import COMING, HERE, READ, STEP, UNASKED, Moving
from benchmarks.simulated.values import Outcome
from hpcstage.plan.placement.placements import Placing


class Simulation(Moving):
    """One job."""

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
        self._steps = max(len(missing) for missing in self._missing)
        self._asked, self._step = [0] * work.nodes, [0] * work.nodes
        self._open, self._issuing = [0] * work.nodes, [False] * work.nodes
        self._busy = [False] * work.nodes
        self._ready, self._ended = -1, 0
        self._found = [0, 0, 0]
        began_s = self.now_s
        for node in range(work.nodes):
            self._advance(node)
        if work.lockstep:
            self._check_all()
        self._loop()
        self.out.epoch_s.append(self.now_s - began_s)
        for share, reads in zip((self.out.local, self.out.peers, self.out.source), self._found, strict=True):
            share.append(reads / work.files)

    def _loop(self) -> None:
        while self._ended < self.work.nodes:
            self._next()

    def _next(self) -> None:
        self.now_s, _, kind, node, file_id = heappop(self._heap)
        self._handlers[kind](node, file_id)

    # ---- training

    def _advance(self, node: int) -> None:
        """Readers ask for what they may be ahead; training goes on if it can."""
        self._issue(node)
        if not self.work.lockstep:
            self._begin_step(node)

    def _issue(self, node: int) -> None:
        if self._issuing[node]:
            return
        self._issuing[node] = True
        mine = self._reading[node]
        limit = min(len(mine), self._step[node] * self.work.batch + self.work.ahead)
        while self._asked[node] < limit and self._open[node] < self.work.readers:
            self._asked[node] += 1
            self._open[node] += 1
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
        if self.work.lockstep:
            for each in range(self.work.nodes):
                self._step[each] += 1
                self._advance(each)
            self._check_all()
            return
        self._busy[node] = False
        self._step[node] += 1
        self._advance(node)

    def _check_all(self) -> None:
        """In lockstep: how many nodes have all of the coming step; goes on when all do."""
        step = self._step[0]
        if step == self._steps:
            self._ended = self.work.nodes
            return
        self._ready = sum(step >= len(missing) or missing[step] == 0 for missing in self._missing)
        self._go_on()

    def _go_on(self) -> None:
        if self._ready == self.work.nodes:
            self._ready = -1
            self._at(self.now_s + self.work.compute_s * self.work.batch / self.work.files, STEP, 0)

    def _arrived(self, file_id: int) -> None:
        """The reader of an id has it."""
        self._pending[file_id] = 0
        node, step = self._reader[file_id], self._step_of[file_id]
        missing = self._missing[node]
        missing[step] -= 1
        self._open[node] -= 1
        self._issue(node)
        if missing[step] or step != self._step[node]:
            return
        if not self.work.lockstep:
            self._begin_step(node)
        elif self._ready >= 0:
            self._ready += 1
            self._go_on()

    # ---- reading

    def _read(self, node: int, file_id: int) -> None:
        self._pending[file_id] = 1
        share = self._share
        if share is None or (share.kind is not Placing.PRIVATE and share.unplaced(file_id)):
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
        if share is not None and share.kind is Placing.PRIVATE and len(self._held[node]) < self._most_held:
            self._held[node].add(file_id)
        self._arrived(file_id)
