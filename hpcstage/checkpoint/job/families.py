"""Finds the states that a job can begin with, among what earlier runs left on its nodes. Pure.

What a run left is a family: a store for each of its nodes, which may be on other nodes of this job, or gone. A state is
a generation that all nodes of its run had committed; any node's facts tell of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hpcstage.checkpoint.job.ledger import JobGeneration
from hpcstage.jsonform import read


@dataclass(frozen=True)
class FoundStore:
    """The store of one node of an earlier run, as the node tells that has it now."""

    run_id: str
    member: str
    """The node's name in that run, by which coding records know it."""
    key: str
    """The name under which others read it."""
    generations: tuple[JobGeneration, ...]
    """Those that all nodes of the run had committed, as far as this store knows."""
    origins: tuple[str, ...] = ()
    """The run from which that one went on, and those before it."""
    seen: tuple[str, ...] | None = None
    """The entries that the programs of that run and of those before it had before it; None: nobody knows."""
    completed: tuple[str, ...] = ()
    """Entries in the directory of a run on one node that are complete and in none of its generations as they are."""
    completed_ns: int = 0
    """When the newest of them was made."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FoundStore:
        """Reads what `to_json` returned."""
        return read(cls, data)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)


@dataclass(frozen=True)
class StorePlace:
    """Where a store can be read."""

    node: int
    key: str


@dataclass(frozen=True)
class EarlierState:
    """A state that may be restored."""

    run_id: str
    generation: JobGeneration
    stores: Mapping[str, StorePlace]
    """By member of the run: the stores that are there."""
    origins: tuple[str, ...] = ()
    """The run from which that one went on, and those before it."""
    seen: tuple[str, ...] | None = None
    """The entries that the programs of that run and of those before it had before it; None: nobody knows."""
    completed: tuple[str, ...] = ()
    """Entries that are restored, too, as they lie in the directory of the run."""
    completed_ns: int = 0

    @property
    def time_ns(self) -> int:
        """Returns when the newest of it was made."""
        return max(self.generation.created_ns, self.completed_ns)

    @property
    def key(self) -> str:
        """Returns by what a failed one is remembered."""
        return f"{self.run_id}:{self.generation.number}:{self.generation.attempt}"

    @property
    def missing(self) -> tuple[str, ...]:
        """Returns the nodes of the run whose stores are gone."""
        holders = {*self.generation.nodes, *(node for _, node, _ in self.generation.parts)}
        return tuple(sorted(holders - self.stores.keys()))

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EarlierState:
        """Reads what `to_json` returned."""
        return read(cls, data)


def earlier_states(found: Mapping[int, Sequence[FoundStore]], *, with_completed: bool = False) -> list[EarlierState]:
    """Returns the states of all families, the newest first; `with_completed`: with what is in no generation."""
    stores: dict[str, dict[str, StorePlace]] = {}
    states: dict[tuple[str, int, str], JobGeneration] = {}
    origins: dict[str, tuple[str, ...]] = {}
    seen: dict[str, tuple[str, ...]] = {}
    for node in sorted(found):
        for store in found[node]:
            stores.setdefault(store.run_id, {}).setdefault(store.member, StorePlace(node, store.key))
            origins[store.run_id] = max(origins.get(store.run_id, ()), store.origins, key=len)
            if store.seen is not None:
                seen[store.run_id] = tuple(sorted({*seen.get(store.run_id, ()), *store.seen}))
            for one in store.generations:
                key = store.run_id, one.number, one.attempt
                states[key] = max(states.get(key, one), one, key=lambda known: known.created_ns)
    completed: dict[str, tuple[tuple[str, ...], int]] = {}
    for store in (one for node in found.values() for one in node if with_completed and one.completed):
        completed[store.run_id] = store.completed, store.completed_ns
        states[store.run_id, 0, ""] = JobGeneration(0, "", 0, (store.member,))
    made = [
        EarlierState(run_id, one, stores[run_id], origins[run_id], seen.get(run_id), *completed.get(run_id, ()))
        for (run_id, _, _), one in states.items()
    ]
    return sorted(made, key=lambda one: (one.time_ns, one.generation.number), reverse=True)
