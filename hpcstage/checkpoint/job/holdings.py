"""Knows where the shares of a generation are: on this node, on others, or nowhere any more, to be rebuilt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hpcstage.checkpoint.generations.reading import BlockSource, LocalSource
from hpcstage.checkpoint.job.families import StorePlace
from hpcstage.checkpoint.job.gathering import Share
from hpcstage.checkpoint.job.ledger import JobGeneration
from hpcstage.checkpoint.protection.link import GroupLink
from hpcstage.checkpoint.protection.rebuilding import GroupSource
from hpcstage.checkpoint.protection.remote import RemoteSource

OWN = "own"
"""The key of the store to which this run writes."""


class RunStores:
    """The stores of one run's nodes, as far as they can be read."""

    def __init__(self, sources: Mapping[str, BlockSource]) -> None:
        self._sources = sources
        self._rebuilding: dict[str, GroupSource] = {}

    @classmethod
    @contextmanager
    def opened(
        cls, stores: Mapping[str, StorePlace], me: int, local: Mapping[str, Path], link: GroupLink | None
    ) -> Iterator[RunStores]:
        """Gives the stores; `local` has the directories of those of this node by their keys."""
        with ExitStack() as stack:
            found: dict[str, BlockSource] = {}
            for member, store in stores.items():
                if store.node == me and store.key in local:
                    found[member] = stack.enter_context(LocalSource(local[store.key]))
                elif store.node != me and link is not None:
                    found[member] = RemoteSource(link, store.node, store.key)
            yield cls(found)

    def source(self, member: str) -> GroupSource:
        """Returns the generations of a node: what is intact from there, all else rebuilt from the others."""
        if member not in self._rebuilding:
            self._rebuilding[member] = GroupSource(member, self._sources)
        return self._rebuilding[member]

    def shares(self, generation: JobGeneration) -> list[Share]:
        """Returns all parts of a generation."""
        return [Share(node, number, self.source(node), names) for number, node, names in generation.parts]

    @property
    def rebuilt_bytes(self) -> int:
        """Returns the bytes that were rebuilt."""
        return sum(one.rebuilt_bytes for one in self._rebuilding.values())
