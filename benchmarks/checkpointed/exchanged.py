"""Generations of virtual nodes encoded by real exchanges over MPI.

The nodes share the processors of one machine and pass messages in its memory: what a
network with a lane for each node makes of them is simulated (`benchmarks.checkpointed.simulation`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.files import empty, write_back
from benchmarks.peernodes import Node, launch, manifest_of, serve
from hpcstage.checkpoint.generations.files import GenerationId, GenerationPart, generation_path
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.checkpoint.protection.link import GroupLink
from hpcstage.protocol.coding import Encode, EncodeEnded

SIZES = (CodeSize(2, 1), CodeSize(2, 2), CodeSize(3, 2))
_LINK_S, _ENCODED_S, _END_S = 10.0, 120.0, 30.0


class NotEncoded(RuntimeError):
    """An exchange could not encode; the message says why."""


@dataclass
class ExchangedGroup:
    """Nodes that are up, with a generation each."""

    size: CodeSize
    identity: GenerationId
    stores: tuple[Path, ...]
    links: tuple[GroupLink, ...]
    trial: int = field(default=0, init=False)

    def sample(self) -> dict[str, Any]:
        """Encodes with the whole of the processors; parities of the sample before are removed first."""
        for store in self.stores:
            for part in (GenerationPart.PARITY, GenerationPart.CODING):
                (generation_path(store, self.identity.number) / part).unlink(missing_ok=True)
        write_back(self.stores[0])
        self.trial += 1
        nodes, known = list(range(len(self.links))), (self.identity.number, self.identity.attempt, self.trial)
        names, size = [f"node{node}" for node in nodes], self.size
        for link, store in zip(self.links, self.stores, strict=True):
            link.encode(Encode(*known, str(store), nodes, names, size.k, size.m, processor_share=0.0))
        ended = [_ended(link) for link in self.links]
        if failures := [one.failure for one in ended if one.failure]:
            raise NotEncoded(failures[0])
        sent = [one.bytes_sent for one in ended]
        return {"seconds": max(one.seconds for one in ended), "sent_bytes": sum(sent), "most_sent_bytes": max(sent)}


def _ended(link: GroupLink) -> EncodeEnded:
    """Waits until a node's order has ended."""
    deadline = time.monotonic() + _ENCODED_S
    while time.monotonic() < deadline:
        for event in link.events(1.0):
            if isinstance(event, EncodeEnded):
                return event
    raise NotEncoded(f"a node has not encoded within {_ENCODED_S:g} s")


@contextlib.contextmanager
def exchanged(directory: Path, size: CodeSize, node_bytes: int) -> Iterator[ExchangedGroup]:
    """Starts the exchanges of as many nodes as a code has parts, each with a generation of so many bytes."""
    stores, identity = _stores(empty(directory), size, node_bytes)
    manifest = manifest_of([1])
    nodes = [Node(directory / f"v{number}", number, size.nodes, manifest) for number in range(size.nodes)]
    process = launch(nodes, directory)
    try:
        with contextlib.ExitStack() as opened:
            serve(nodes, lambda: all(node.is_ready for node in nodes))
            links = tuple(opened.enter_context(contextlib.closing(GroupLink.open(n.path, _LINK_S))) for n in nodes)
            yield ExchangedGroup(size, identity, stores, links)
        for node in nodes:
            node.end()
        process.wait(_END_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        for node in nodes:
            node.remove()


def _stores(directory: Path, size: CodeSize, node_bytes: int) -> tuple[tuple[Path, ...], GenerationId]:
    identity, chance = GenerationId.new(1), np.random.default_rng(0)
    state, stores = directory / "state", tuple(directory / f"store{number}" for number in range(size.nodes))
    state.mkdir()
    for store in stores:
        (state / "weights").write_bytes(chance.bytes(node_bytes))
        with GenerationStore(store) as opened:
            opened.commit(FileTree(state), identity)
    return stores, identity
