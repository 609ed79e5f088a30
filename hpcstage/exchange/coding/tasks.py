"""Decides which of one node's duties in the stripes of an encoding can be carried out.

Stripes go in rounds, a bounded window of them: a node begins round r when all members have finished round r - 2. So
what is under way at a node is two rounds of it, whoever is slow, and no message waits for room. A duty is a task, which
is ready when all of its messages have come, in whatever order they do: arithmetic, disks and the network overlap.

Owns the rounds, the messages of tasks that are not done, and what a duty makes: messages for others, or a block to
keep, of the node's own block and what came from others. A duty of a stripe whose blocks are all there and of full
length is the same in every cycle, but for the numbers; it adds to the sums in the buffer in which they came, and sends
that on. The stripes at the end do as `coding.stages` says. `stripework` carries tasks out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hpcstage.checkpoint.coding.blocks import Block, Kernel, seen
from hpcstage.checkpoint.coding.coder import Coder
from hpcstage.checkpoint.coding.erasurecode import ErasureCode
from hpcstage.checkpoint.coding.kernels import best_kernel
from hpcstage.checkpoint.coding.routes import Duty, Hop, pipeline
from hpcstage.checkpoint.coding.stages import RouteWork, encoding_work
from hpcstage.checkpoint.coding.stripes import CodedBlock, Stripe, Striping
from hpcstage.checkpoint.protection.orders import EncodeOrder
from hpcstage.exchange.coding.wire import BLOCK_HEAD_BYTES, BlockHead
from hpcstage.exchange.transport.frames import FrameError

Sending = tuple[int, int, bytearray]
"""The node of the receiver, the index of its block, and a message that has room for its head."""
Received = Mapping[int, memoryview]
"""By the index of the sender's block: the message, with its head."""


class NodeDuty(Protocol):
    """The duty of one node in one stripe, or in all that are like it."""

    block: CodedBlock
    keeps: bool
    sizes: dict[int, int]
    """The bytes of each message that it waits for, without the head, by the index of the sender's block."""

    def sent(self, own: bytearray, received: Received) -> Sequence[Sending]:
        """Returns what a source sends. Its own block and the messages may be changed."""

    def kept(self, received: Received) -> Block:
        """Returns the block of a target."""


class GeneralDuty:
    """A duty in a stripe of any shape."""

    def __init__(self, duty: Duty, work: RouteWork) -> None:
        self.block = duty.block
        self.keeps = work.keeps(duty)
        self.sizes = {hop.sender.index: hop.size_bytes for hop in duty.receives}
        self._duty = duty
        self._work = work

    def sent(self, own: bytearray, received: Received) -> Sequence[Sending]:
        """See NodeDuty."""
        made = []
        for hop, parts in self._work.sent(self._duty, own, self._split(received)).items():
            message = bytearray(BLOCK_HEAD_BYTES)
            for part in parts:
                message += seen(part).data  # an array would be added up
            made.append((hop.receiver.node, hop.receiver.index, message))
        return made

    def kept(self, received: Received) -> Block:
        """See NodeDuty."""
        return self._work.kept(self._duty, self._split(received))

    def _split(self, received: Received) -> dict[Hop, list[memoryview]]:
        found = {}
        for hop in self._duty.receives:
            parts, at = [], BLOCK_HEAD_BYTES
            for size in hop.sizes_bytes:
                parts.append(received[hop.sender.index][at : at + size])
                at += size
            found[hop] = parts
        return found


class FullDuty:
    """A duty in a stripe of full blocks."""

    def __init__(self, duty: Duty, work: RouteWork, kernel: Kernel) -> None:
        self.block = duty.block
        self.keeps = work.keeps(duty)
        self.sizes = {hop.sender.index: hop.size_bytes for hop in duty.receives}
        self._sends = duty.sends
        self._kernel = kernel
        self._m = len(work.targets)
        self._size = duty.block.size_bytes
        if not self.keeps:
            place = work.sources.index(duty.block)
            self._column = tuple(row[place] for row in work.rows)

    def sent(self, own: bytearray, received: Received) -> Sequence[Sending]:
        """See NodeDuty."""
        sums = self._summed(own, received)
        if len(self._sends) == 1:
            return [(*_to(self._sends[0]), sums)]
        made = []
        for hop in self._sends:
            start = BLOCK_HEAD_BYTES + hop.rows[0] * self._size
            made.append((*_to(hop), bytearray(BLOCK_HEAD_BYTES) + memoryview(sums)[start : start + self._size]))
        return made

    def kept(self, received: Received) -> Block:
        """See NodeDuty."""
        (message,) = received.values()
        return message[BLOCK_HEAD_BYTES:]

    def _summed(self, own: bytearray, received: Received) -> bytearray:
        """Returns a message with the sums: the one that came, where one did."""
        if not received:
            made = bytearray(BLOCK_HEAD_BYTES + self._m * self._size)
            self._kernel.product(tuple((c,) for c in self._column), (own,), self._parts(memoryview(made)))()
            return made
        (sums,) = received.values()
        self._kernel.addition(self._column, own, self._parts(sums))()
        assert isinstance(sums.obj, bytearray)
        return sums.obj

    def _parts(self, message: memoryview) -> list[memoryview]:
        starts = range(BLOCK_HEAD_BYTES, BLOCK_HEAD_BYTES + self._m * self._size, self._size)
        return [message[start : start + self._size] for start in starts]


def _to(hop: Hop) -> tuple[int, int]:
    return hop.receiver.node, hop.receiver.index


ROUND_BYTES = 4 << 20
"""About so many bytes of its own each node gives in a round."""
ROUNDS = 2
"""The rounds that are under way."""


@dataclass
class Task:
    """One duty with what has come for it."""

    stripe: int
    number: int
    """The number of the node's block, or of its parity."""
    duty: NodeDuty
    received: dict[int, memoryview] = field(default_factory=dict)

    @property
    def is_ready(self) -> bool:
        """Whether all messages have come."""
        return len(self.received) == len(self.duty.sizes)


class StripeTasks:
    """Owns the tasks of one node."""

    def __init__(self, order: EncodeOrder, place: int, totals: Sequence[int]) -> None:
        """`totals` are the bytes that each member gives to the code."""
        self._order = order
        self._place = place
        self._totals = totals
        self._nodes = len(totals)
        self.striping = Striping(self._nodes, order.size.k, order.size.m, order.block_bytes)
        self._coder = Coder(ErasureCode.cauchy(order.size.k, order.size.m), best_kernel())
        self._full_cycles = min(totals) // order.block_bytes // order.size.k
        """In so many cycles all blocks of all stripes are there and of full length."""
        self._full: dict[int, FullDuty | None] = {}
        """The duty of this node in them, by the turn of the cycle; None: it has none."""
        self._per_round = self._nodes * max(1, ROUND_BYTES // (order.block_bytes * order.size.k))
        self.rounds = -(-self.striping.count(totals) // self._per_round)
        self._begun = 0
        self._left: dict[int, int] = {}
        """The tasks that are not done, by round."""
        self._waiting: dict[tuple[int, int], Task] = {}
        self._early: dict[tuple[int, int], list[tuple[int, memoryview]]] = {}
        self.ready: deque[Task] = deque()
        """The tasks that can be carried out; who takes one calls `done` later."""

    def begin(self, finished: int) -> list[int]:
        """Begins what may begin when so many rounds are finished; returns the rounds in which this node has nothing to
        do."""
        idle = []
        while self._begun < min(finished + ROUNDS, self.rounds):
            tasks = list(self._made(self._begun))
            self._left[self._begun] = len(tasks)
            if not tasks:
                idle.append(self._begun)
            for task in tasks:
                self._add(task)
            self._begun += 1
        return idle

    def _made(self, number: int) -> Iterator[Task]:
        first = number * self._per_round
        for stripe in range(first, first + self._per_round):
            cycle, turn = divmod(stripe, self._nodes)
            if cycle < self._full_cycles:
                duty: NodeDuty | None = self._full_duty(turn)
                if duty is not None:
                    step = self._order.size.m if duty.keeps else self._order.size.k
                    yield Task(stripe, duty.block.number + cycle * step, duty)
            elif (found := self.striping.stripe(stripe, self._totals)) is not None:
                duty = self._duty(found, is_full=False)
                if duty is not None:
                    yield Task(stripe, duty.block.number, duty)

    def _full_duty(self, turn: int) -> FullDuty | None:
        if turn not in self._full:
            stripe = self.striping.stripe(turn, self._totals)
            duty = None if stripe is None else self._duty(stripe, is_full=True)
            assert duty is None or isinstance(duty, FullDuty)
            self._full[turn] = duty
        return self._full[turn]

    def _duty(self, stripe: Stripe, *, is_full: bool) -> NodeDuty | None:
        """Returns what this node does in a stripe; a node has one block of it at most."""
        if self._place not in stripe.nodes:
            return None
        work = encoding_work(self._coder, stripe)
        duties = pipeline(stripe.data, stripe.parities).duties
        (own,) = (duty for duty in duties if duty.block.node == self._place)
        return FullDuty(own, work, self._coder.kernel) if is_full else GeneralDuty(own, work)

    def _add(self, task: Task) -> None:
        key = task.stripe, task.duty.block.index
        self._waiting[key] = task
        for sender, data in self._early.pop(key, ()):
            self._give(task, sender, data)
        if task.is_ready:
            self.ready.append(self._waiting.pop(key))

    @property
    def is_done(self) -> bool:
        """Whether all duties are done."""
        return self._begun == self.rounds and not any(self._left.values())

    def take(self, head: BlockHead, message: memoryview) -> None:
        """Takes a message of a member. Raises FrameError."""
        key = head.stripe, head.receiver
        number = head.stripe // self._per_round
        if number >= self._begun:
            if number >= self._begun + ROUNDS:
                raise FrameError(f"a block of stripe {head.stripe}, which nobody may send yet")
            self._early.setdefault(key, []).append((head.sender, message))
            return
        task = self._waiting.get(key)
        if task is None:
            raise FrameError(f"a block of stripe {head.stripe} that nobody waits for")
        self._give(task, head.sender, message)
        if task.is_ready:
            self.ready.append(self._waiting.pop(key))

    def _give(self, task: Task, sender: int, message: memoryview) -> None:
        size = task.duty.sizes.get(sender)
        if sender in task.received or size != len(message) - BLOCK_HEAD_BYTES:
            raise FrameError(f"a block of stripe {task.stripe} that is none of its way")
        task.received[sender] = message

    def done(self, task: Task) -> int | None:
        """Notes that a task is done; returns its round if that is finished with it."""
        number = task.stripe // self._per_round
        self._left[number] -= 1
        return None if self._left[number] else number
