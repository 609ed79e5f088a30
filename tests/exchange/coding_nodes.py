"""A group of real exchanges whose agents the test plays, and the stores of its nodes."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from group_nodes import Group

from benchmarks.checkpointed.storegroup import GroupStore, StoreGroup
from hpcstage.checkpoint.generations.files import GenerationId, GenerationPart, generation_path
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.generations.terms import GenerationPolicy
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.checkpoint.protection.link import Event, GroupLink
from hpcstage.protocol.coding import Encode, EncodeEnded

BLOCK = 512
POLICY = GenerationPolicy(block_bytes=512)
KEY = "own"
CODED = (GenerationPart.PARITY, GenerationPart.CODING)


class CodingGroup:
    """Nodes with stores, exchanges and links."""

    def __init__(self, directory: Path, size: CodeSize, nodes: int | None = None, **options) -> None:
        self.group = Group(directory, nodes or size.nodes, [1], **options)
        self.directory = directory
        self.size = size
        self.block_bytes = BLOCK
        self.links: list[GroupLink] = []
        self.names = tuple(f"n{index}" for index in range(len(self.group.nodes)))
        self.store(0).parent.mkdir()

    def store(self, index: int) -> Path:
        return self.directory / "stores" / self.names[index]

    def state(self, index: int) -> Path:
        return self.directory / "states" / self.names[index]

    def part(self, index: int, part: GenerationPart, number: int = 1) -> Path:
        return generation_path(self.store(index), number) / part

    def commit(self, sizes: Sequence[int], number: int = 1) -> GenerationId:
        """Makes a state of a size for each node, and its generation."""
        identity = GenerationId.new(number)
        for index, size in enumerate(sizes):
            state = self.state(index)
            state.mkdir(parents=True, exist_ok=True)
            if size:
                (state / "step").write_bytes(random.Random(number * 100 + index).randbytes(size))
            with GenerationStore(self.store(index), POLICY) as store:
                store.commit(FileTree(state), identity)
        return identity

    def start(self, **options) -> CodingGroup:
        self.group.start(**options)
        self.group.ready()
        self.open()
        return self

    def open(self) -> None:
        """Opens the links, in place of earlier ones."""
        self.close_links()
        self.links = [GroupLink.open(node.path, 10.0) for node in self.group.nodes]
        for index, link in enumerate(self.links):
            link.hold(KEY, self.store(index))

    def order(self, identity: GenerationId, index: int, **changes) -> Encode:
        group = list(range(len(self.names))), list(self.names), self.size.k, self.size.m
        order = Encode(identity.number, identity.attempt, 0, str(self.store(index)), *group)
        return replace(order, block_bytes=self.block_bytes, processor_share=0.0, **changes)

    def encode(self, identity: GenerationId, **changes) -> list[EncodeEnded]:
        for index, link in enumerate(self.links):
            link.encode(self.order(identity, index, **changes))
        return self.encoded()

    def encoded(self) -> list[EncodeEnded]:
        """Waits until the order has ended on all nodes."""
        return [
            next(one for one in self.heard(index, _is_encoded) if _is_encoded(one)) for index in range(len(self.links))
        ]

    def heard(self, index: int, until: Callable[[Event], bool], timeout_s: float = 120.0) -> list[Event]:
        """Returns the events of a node, up to one that is waited for."""
        found, deadline = list[Event](), time.monotonic() + timeout_s
        while not any(map(until, found)):
            assert time.monotonic() < deadline, found
            found += self.links[index].events(0.5)
        return found

    def coded(self, number: int = 1) -> list[bytes]:
        """Returns what encoding has left on all nodes."""
        return [self.part(index, part, number).read_bytes() for index in range(len(self.names)) for part in CODED]

    def coded_here(self, number: int = 1) -> list[bytes]:
        """Returns the same as one process makes it from the same generations."""
        kept = self.directory / "stores"
        copies = self.directory / "copies"
        shutil.copytree(kept, copies)
        for index, name in enumerate(self.names):
            for part in CODED:
                (generation_path(copies / name, number) / part).unlink(missing_ok=True)
            assert self.part(index, GenerationPart.MANIFEST, number).exists()
        stores = tuple(GroupStore(name, copies / name) for name in self.names)
        StoreGroup(stores, self.size, self.block_bytes).encode(number)
        made = [(generation_path(copies / name, number) / part).read_bytes() for name in self.names for part in CODED]
        shutil.rmtree(copies)
        return made

    def is_untouched(self, number: int = 1) -> bool:
        """Whether nothing but the generation itself is there on any node."""
        whole = {"data", "blocks", "manifest.json"}
        return all(
            {path.name for path in generation_path(self.store(index), number).iterdir()} <= whole
            for index in range(len(self.names))
            if generation_path(self.store(index), number).exists()
        )

    def close_links(self) -> None:
        for link in self.links:
            link.close()
        self.links = []

    def end(self) -> int:
        self.close_links()
        return self.group.end()

    def remove(self) -> None:
        self.close_links()
        self.group.remove()


def _is_encoded(event: Event) -> bool:
    return isinstance(event, EncodeEnded)
