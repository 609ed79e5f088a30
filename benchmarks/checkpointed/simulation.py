"""Paper 001's figure 6 on two processors: counted and measured work of a node, and a simulation with measured terms.

A simulated node computes one thing after the other, the lowest stripe that is ready first, and sends and receives at
the same time. Each message takes its bytes at the rate of a lane, in the sender's and in the receiver's, and a latency
in between. How fast a node codes, hashes, reads and writes, and what a lane carries, is measured on this machine.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpointed.storegroup import GroupStore, StoreGroup
from benchmarks.files import empty, write_back
from benchmarks.peer import Cell, launching
from benchmarks.programs import run
from hpcstage.checkpoint.coding.kernels import best_kernel
from hpcstage.checkpoint.coding.stripes import CodedBlock, Duty, Stripe, Striping
from hpcstage.checkpoint.generations.files import GenerationId, GenerationPart, generation_path
from hpcstage.checkpoint.generations.layout import BLOCK_BYTES
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.checkpoint.protection.record import checksum

DATA_NODES = (8, 16, 32)
CODING_NODES = 2
PLACED = {"coding nodes apart": False, "parities rotated": True}
"""As in the paper, two more nodes hold nothing but parities; or all nodes hold data and parities."""
_SMALL_BYTES = 64


@dataclass(frozen=True)
class Terms:
    """What a node and a lane do."""

    coder_bytes_per_s: float
    """Products that are computed and added up, for each parity."""
    hash_bytes_per_s: float
    read_bytes_per_s: float
    write_bytes_per_s: float
    lane_bytes_per_s: float
    lane_latency_s: float


@dataclass(frozen=True)
class Layout:
    """So many data nodes with so many bytes each, and two coding nodes or as many parities among them."""

    data_nodes: int
    rotated: bool
    node_bytes: int

    @property
    def nodes(self) -> int:
        """In all."""
        return self.data_nodes + CODING_NODES

    @property
    def blocks(self) -> int:
        """The blocks of a data node; a multiple of the data nodes, so that each cycle of stripes is whole."""
        return self.node_bytes // BLOCK_BYTES // self.data_nodes * self.data_nodes

    def stripes(self) -> Iterator[Stripe]:
        """All stripes. After a cycle they are those before, with other numbers."""
        k, m = self.data_nodes, CODING_NODES
        if not self.rotated:
            data = tuple(CodedBlock(index, m + index, 0, BLOCK_BYTES) for index in range(k))
            parities = tuple(CodedBlock(k + row, row, 0, BLOCK_BYTES) for row in range(m))
            return itertools.repeat(Stripe(0, data, parities), self.blocks)
        first = Striping(self.nodes, k, m, BLOCK_BYTES).stripes([k * BLOCK_BYTES] * self.nodes)
        return itertools.islice(itertools.cycle(first), self.blocks * self.nodes // k)


@dataclass
class NodeLoad:
    """The work of one node."""

    sent_bytes: int = 0
    received_bytes: int = 0
    multiplied_bytes: int = 0
    """Of products that it computes and adds up."""
    messages: int = 0
    """Those that it sends."""


def loads(stripes: Iterable[Stripe]) -> dict[int, NodeLoad]:
    """The work of each node."""
    made: defaultdict[int, NodeLoad] = defaultdict(NodeLoad)
    for stripe in stripes:
        for duty in stripe.duties():
            load = made[duty.block.node]
            load.sent_bytes += duty.sent_bytes * len(duty.receivers)
            load.received_bytes += duty.received_bytes
            load.multiplied_bytes += multiplied_bytes(duty)
            load.messages += len(duty.receivers)
    return made


def multiplied_bytes(duty: Duty) -> int:
    """The bytes of products of a duty."""
    return 0 if duty.keeps else duty.m * duty.block.size_bytes


def counted(layout: Layout) -> dict[str, Any]:
    """The most that one node does, in bytes for each byte of a data node and in messages for each of its blocks."""
    found = loads(layout.stripes()).values()
    size, blocks = layout.blocks * BLOCK_BYTES, layout.blocks

    def most(value: Callable[[NodeLoad], int]) -> int:
        return max(map(value, found))

    return {
        "sent": most(lambda load: load.sent_bytes) / size,
        "received": most(lambda load: load.received_bytes) / size,
        "multiplied": most(lambda load: load.multiplied_bytes) / size,
        "messages": most(lambda load: load.messages) / blocks,
    }


def simulated(layout: Layout, terms: Terms) -> dict[str, Any]:
    """The seconds from the first block to the last parity."""
    seconds = Simulation(terms).run(layout.stripes())
    return {"seconds": seconds, "s_per_gb": seconds / (layout.blocks * BLOCK_BYTES) * 1e9}


@dataclass
class Simulation:
    """Events in the order of their times."""

    terms: Terms
    _events: list[tuple[float, int, int, int, Duty | None]] = field(default_factory=list)
    """Time, a number of its own, node, stripe, and the duty that is ready; None where the node is free again."""
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _ready: dict[int, list[tuple[int, int, Duty]]] = field(default_factory=lambda: defaultdict(list))
    _busy: set[int] = field(default_factory=set)
    _waiting: dict[tuple[int, int], Duty] = field(default_factory=dict)
    """Duties to which the message has not come, by stripe and index."""
    _out_free_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    _in_free_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    def run(self, stripes: Iterator[Stripe]) -> float:
        """Encodes all stripes; returns the time of the last duty."""
        for number, whole in enumerate(stripes):
            for duty in whole.duties():
                if duty.sender is not None:
                    self._waiting[number, duty.block.index] = duty
                else:
                    self._event(0.0, duty.block.node, number, duty)
        now_s = 0.0
        while self._events:
            now_s, _, node, stripe, ready = heapq.heappop(self._events)
            if ready is None:
                self._busy.discard(node)
            else:
                heapq.heappush(self._ready[node], (stripe, next(self._numbers), ready))
            if node not in self._busy and self._ready[node]:
                self._begin(now_s, node)
        assert not self._waiting
        return now_s

    def _event(self, at_s: float, node: int, stripe: int, duty: Duty | None) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), node, stripe, duty))

    def _begin(self, now_s: float, node: int) -> None:
        """Lets a node do the first of what is ready, and send it."""
        stripe, _, duty = heapq.heappop(self._ready[node])
        self._busy.add(node)
        done_s = now_s + self._work_s(duty)
        self._event(done_s, node, -1, None)
        for receiver in duty.receivers:
            comes_s = self._sent_s(done_s, node, receiver.node, duty.sent_bytes)
            self._event(comes_s, receiver.node, stripe, self._waiting.pop((stripe, receiver.index)))

    def _sent_s(self, now_s: float, sender: int, receiver: int, size_bytes: int) -> float:
        """Returns when a message has come."""
        took_s = size_bytes / self.terms.lane_bytes_per_s
        begins_s = max(now_s, self._out_free_s[sender])
        self._out_free_s[sender] = begins_s + took_s
        comes_s = max(begins_s + self.terms.lane_latency_s, self._in_free_s[receiver]) + took_s
        self._in_free_s[receiver] = comes_s
        return comes_s

    def _work_s(self, duty: Duty) -> float:
        """A node reads and hashes its block, multiplies and adds; one that keeps a parity hashes and writes it."""
        terms, size = self.terms, duty.block.size_bytes
        coded_s = multiplied_bytes(duty) / terms.coder_bytes_per_s
        moved_s = size / (terms.read_bytes_per_s if duty.receivers else terms.write_bytes_per_s)
        return coded_s + moved_s + size / terms.hash_bytes_per_s


class Encoded:
    """Stores of virtual nodes with one generation, which one process encodes: the processor time of all their work."""

    def __init__(self, directory: Path, layout: Layout) -> None:
        self._directory = empty(directory)
        self._size = CodeSize(layout.data_nodes, CODING_NODES)
        self._stores = tuple(GroupStore(f"node{n}", self._directory / f"{n}") for n in range(self._size.nodes))
        self._bytes = layout.blocks * BLOCK_BYTES
        chance, identity = np.random.default_rng(0), GenerationId.new(1)
        state = self._directory / "state"
        state.mkdir()
        for store in self._stores:
            (state / "weights").write_bytes(chance.bytes(self._bytes))
            with GenerationStore(store.directory) as opened:
                opened.commit(FileTree(state), identity)

    def sample(self) -> dict[str, Any]:
        """Encodes; the parities of the sample before are removed first."""
        for store in self._stores:
            for part in (GenerationPart.PARITY, GenerationPart.CODING):
                (generation_path(store.directory, 1) / part).unlink(missing_ok=True)
        write_back(self._directory)
        began_s, before_s = time.monotonic(), time.process_time()
        StoreGroup(self._stores, self._size).encode(1)
        used_s = (time.process_time() - before_s) / len(self._stores)
        return {"seconds": time.monotonic() - began_s, "s_per_gb": used_s / self._bytes * 1e9}


class Speeds:
    """What the terms of the simulation are measured with: blocks of 64 KB, more of them than the caches hold."""

    def __init__(self, directory: Path, quick: bool) -> None:
        self._directory, self._messages = directory, 200 if quick else 5000
        count = 64 if quick else 1024
        self._file = directory / "blocks"
        self._blocks = list(np.random.default_rng(0).integers(0, 256, (count, BLOCK_BYTES), np.uint8))
        self._file.write_bytes(b"".join(block.tobytes() for block in self._blocks))

    def node(self) -> dict[str, Any]:
        """Bytes per second of coding, hashing, reading and writing."""
        kernel, sums = best_kernel(), [bytearray(BLOCK_BYTES) for _ in range(CODING_NODES)]
        into = memoryview(bytearray(BLOCK_BYTES))
        fd = os.open(self._file, os.O_RDWR)
        try:
            made = {
                "coder": CODING_NODES * self._rate(lambda at: kernel.addition((1, 2), self._blocks[at], sums)),
                "hash": self._rate(lambda at: checksum(self._blocks[at].data)),
                "read": self._rate(lambda at: os.preadv(fd, [into], at * BLOCK_BYTES)),
                "write": self._rate(lambda at: os.pwrite(fd, self._blocks[at], at * BLOCK_BYTES)),
            }
        finally:
            os.close(fd)
        return {"seconds": len(self._blocks) * BLOCK_BYTES / made["coder"], **made}

    def _rate(self, work: Callable[[int], object]) -> float:
        rates = []
        for _ in range(5):
            began_s = time.perf_counter()
            for at in range(len(self._blocks)):
                work(at)
            rates.append(len(self._blocks) * BLOCK_BYTES / (time.perf_counter() - began_s))
        return statistics.median(rates)

    def lane(self, way: str) -> dict[str, Any]:
        """A lane's latency from small messages, and its rate from those of the size of a pipeline's."""
        small = self._ping_pong(way, _SMALL_BYTES)
        large = self._ping_pong(way, CODING_NODES * BLOCK_BYTES)
        return {"seconds": large, "latency": small, "rate": CODING_NODES * BLOCK_BYTES / max(large - small, 1e-9)}

    def _ping_pong(self, way: str, size: int) -> float:
        """The seconds of one message."""
        cell = Cell(self._messages, size, "memory", way)
        with launching(cell, self._directory) as how:
            settings = [f"{name}={value}" for name, value in how.environment.items()]
            program = [sys.executable, "-m", "benchmarks.pingpong", str(size), str(self._messages), "many"]
            done = run(["env", *settings, *how.mpiexec, *program], self._directory)
        return float(json.loads(done.stdout)["seconds"]) / (2 * self._messages)
