"""The work of one node in an order: its duties in all stripes, from the first block to parities under their name.

Stripes go in rounds, a bounded window of them: a node begins round r when all members have finished round r - 2. So
what is under way at a node is two rounds of it, whoever is slow, and no message waits for room. A duty is ready when
its message has come, in whatever order they do: arithmetic, disks and the network overlap. Sends nothing.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hpcstage.checkpoint.coding.erasurecode import ErasureCode
from hpcstage.checkpoint.coding.kernels import best_kernel
from hpcstage.checkpoint.coding.stripes import Duty, Striping, summed
from hpcstage.checkpoint.generations.files import OWN_PARTS, Files, GenerationId, generation_path
from hpcstage.checkpoint.generations.manifest import DamagedGeneration
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.protection.record import (
    CodedMember,
    CodingRecord,
    MemberChecksums,
    checksum,
    made_parities,
    read_data,
    read_record,
    write_record,
)
from hpcstage.exchange.coding.wire import BLOCK_HEAD_BYTES, ContentOffer, read_head, write_head
from hpcstage.exchange.transport.frames import FrameError
from hpcstage.protocol.coding import Encode

ROUND_BYTES = 4 << 20
"""About so many bytes of its own each node gives in a round."""
ROUNDS = 2
"""The rounds that are under way."""
_SYNCED_BYTES = 64 << 20
"""Parities go to the disk in steps of so many bytes, so that the last one does not take long."""


@dataclass
class Task:
    """A duty of this node, and the message that came for it."""

    stripe: int
    duty: Duty
    message: bytearray | None = None


class StripeWork:
    """Owns the tasks of one node, and its files: the generation that is read, and the parities."""

    def __init__(self, order: Encode, place: int, sizes_bytes: list[tuple[int, ...]]) -> None:
        """`sizes_bytes` are those of the files of each member."""
        self._order = order
        self._place = place
        self._own_sizes = sizes_bytes[place]
        self._totals = [sum(sizes) for sizes in sizes_bytes]
        self._striping = Striping(len(order.nodes), order.k, order.m, order.block_bytes)
        self._code, self._kernel = ErasureCode.cauchy(order.k, order.m), best_kernel()
        self._checksums = MemberChecksums(self._striping, self._totals, place)
        self._per_round = len(order.nodes) * max(1, ROUND_BYTES // (order.block_bytes * order.k))
        self._rounds = -(-self._striping.count(self._totals) // self._per_round)
        self._left: list[int] = []
        """The tasks that are not done, of each round that has begun."""
        self.finished = 0
        """The rounds that are finished, from the first one on."""
        self.ready: deque[Task] = deque()
        self._waiting: dict[int, Task] = {}
        """By stripe: the tasks whose message has not come."""
        self.bytes_read = 0
        self._files = Files()
        self._unsynced_bytes = 0
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> StripeWork:
        """Opens the generation and makes the file of its parities. Raises OSError."""
        self._source = self._opened.enter_context(LocalSource(Path(self._order.directory), self._files))
        self._parities = self._opened.enter_context(made_parities(self._files, _path(self._order)))
        return self

    def __exit__(self, *raised: object) -> None:
        """Gives the parities their name: they are on the disk. Removes them if anything was raised."""
        self._opened.__exit__(*raised)  # type: ignore[arg-type]

    # ---- what there is to do

    @property
    def is_done(self) -> bool:
        """Whether all rounds are finished."""
        return self.finished == self._rounds

    def begin(self, finished: int) -> None:
        """Begins what may begin when all members have finished so many rounds."""
        while len(self._left) < min(finished + ROUNDS, self._rounds):
            first = len(self._left) * self._per_round
            tasks = [task for stripe in range(first, first + self._per_round) for task in self._tasks(stripe)]
            self._left.append(len(tasks))
            for task in tasks:
                if task.duty.sender is None:
                    self.ready.append(task)
                else:
                    self._waiting[task.stripe] = task
        self._count()

    def _tasks(self, number: int) -> Iterator[Task]:
        """Gives the task of this node in a stripe, if it has one."""
        stripe = self._striping.stripe(number, self._totals)
        if stripe is not None and (duty := stripe.duty(self._place)) is not None:
            yield Task(number, duty)

    def _count(self) -> None:
        while self.finished < len(self._left) and not self._left[self.finished]:
            self.finished += 1

    def take(self, data: memoryview) -> bool:
        """Takes a block of a stripe, or sums of it, if its round has begun; returns whether. Raises FrameError."""
        stripe, _ = read_head(data)
        if stripe // self._per_round >= len(self._left):
            return False
        task = self._waiting.pop(stripe, None)
        if task is None or len(data) != BLOCK_HEAD_BYTES + task.duty.received_bytes:
            raise FrameError(f"a block of stripe {stripe} that nobody waits for")
        assert isinstance(data.obj, bytearray)
        task.message = data.obj
        self.ready.append(task)
        return True

    # ---- doing it

    def carry_out(self) -> list[tuple[int, bytearray]]:
        """Carries out the first task that is ready; returns what is to be sent to which members. Raises OSError."""
        task = self.ready.popleft()
        messages = self._kept(task) if task.duty.keeps else list(self._sent(task))
        self._left[task.stripe // self._per_round] -= 1
        self._count()
        return messages

    def _sent(self, task: Task) -> Iterator[tuple[int, bytearray]]:
        duty, own = task.duty, bytearray(task.duty.block.size_bytes)
        number, offset = self._order.number, duty.block.number * self._order.block_bytes
        if read_data(self._source, number, self._own_sizes, memoryview(own), offset) < len(own):
            raise DamagedGeneration("the generation became shorter")
        self.bytes_read += len(own)
        self._checksums.note(duty.block, own)
        sums = summed(self._kernel, self._code.column(duty.block.index), own, task.message, BLOCK_HEAD_BYTES)
        for place, receiver in enumerate(duty.receivers):
            start = BLOCK_HEAD_BYTES + place * duty.sent_bytes
            part = memoryview(sums)[start : start + duty.sent_bytes]
            message = sums if len(duty.receivers) == 1 else sums[:BLOCK_HEAD_BYTES] + part
            write_head(message, task.stripe, self._order.digest)
            yield receiver.node, message

    def _kept(self, task: Task) -> list[tuple[int, bytearray]]:
        assert task.message is not None
        content = memoryview(task.message)[BLOCK_HEAD_BYTES:]
        self._checksums.note(task.duty.block, content)
        self._files.write(self._parities, content, task.duty.block.number * self._order.block_bytes)
        self._unsynced_bytes += len(content)
        if self._unsynced_bytes >= _SYNCED_BYTES:
            self._unsynced_bytes = 0
            os.fdatasync(self._parities)
        return []

    @property
    def checksums(self) -> bytes:
        """Those of this node's blocks and parities, as a record has them."""
        return self._checksums.to_bytes()


def offered(order: Encode) -> tuple[ContentOffer, bytes]:
    """Returns what this node has of a generation, and its record. Raises HpcstageError and OSError."""
    number = order.number
    with LocalSource(Path(order.directory)) as source:
        if GenerationReader(source).manifest(number).id != _identity(order):
            raise DamagedGeneration(f"generation {number} comes from another attempt: save it anew")
        sizes = [source.size_bytes(number, part) for part in OWN_PARTS]
        record = read_record(source, number)
    if record is None or record.generation != _identity(order):
        return ContentOffer(order.digest, sizes), b""
    if not _is_ours(order, record):
        return ContentOffer(order.digest, sizes, others=", ".join(member.name for member in record.members)), b""
    content = record.to_bytes()
    return ContentOffer(order.digest, sizes, checksum(content).hex()), content


def record_of(order: Encode, sizes_bytes: list[tuple[int, ...]], sums: list[bytes]) -> bytes:
    """Returns the record, which is the same on all members."""
    members = tuple(map(CodedMember, order.names, sizes_bytes, sums))
    code = ErasureCode.cauchy(order.k, order.m)
    return CodingRecord(_identity(order), order.block_bytes, code, members).to_bytes()


def _identity(order: Encode) -> GenerationId:
    return GenerationId(order.number, order.attempt)


def _path(order: Encode) -> Path:
    return generation_path(Path(order.directory), order.number)


def _is_ours(order: Encode, record: CodingRecord) -> bool:
    return record.is_of(order.names, order.k, order.m, order.block_bytes)


def keep_record(order: Encode, content: bytes) -> None:
    """Writes a record, if it is one of this order. Raises HpcstageError and OSError."""
    record = CodingRecord.from_bytes(content)
    if record.generation != _identity(order) or not _is_ours(order, record):
        raise DamagedGeneration("a coding record came that is another group's")
    write_record(Files(), _path(order), content)
