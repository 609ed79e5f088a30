"""The membership of a node group: which nodes a job has and which of them are there, as one frozen value.

The wrapper makes generation 0, in which all nodes are expected. The lead makes a newer one for each MPI program, of the
nodes that are up; the exchanges make the next ones, when they have met and when a node's run has ended. A value travels
whole, in the specifications and in messages, and only a newer generation replaces it. Owns the value and its JSON, no
decision.
"""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcstage.jsonform import read, written
from hpcstage.plan.types import Budget


@dataclass(frozen=True)
class GroupNode:
    """A node of a job."""

    host: str
    node_dir: str = ""
    """The node's directory; empty until the node is up, as is the next."""
    sock: str = ""
    """The node's socket, by a name that is short enough to connect to."""
    is_present: bool = True
    """Whether the node is in the group, or, before there is one, is expected to be."""
    budget: Budget | None = None
    """The budget of the node's store; None as long as the node has not said it."""


@dataclass(frozen=True)
class Membership:
    """All nodes of a job. A node is named by its index in `nodes`, which it keeps whoever comes or goes."""

    generation: int
    nodes: tuple[GroupNode, ...]

    @classmethod
    def of(cls, hosts: Sequence[str]) -> Membership:
        """Returns generation 0."""
        return cls(0, tuple(map(GroupNode, hosts)))

    def __len__(self) -> int:
        """Returns the number of nodes of the job, whether they are there or not."""
        return len(self.nodes)

    @property
    def hosts(self) -> list[str]:
        """Returns the hosts of all nodes, by index."""
        return [node.host for node in self.nodes]

    @property
    def present(self) -> list[int]:
        """Returns the indices of the nodes that are there."""
        return [index for index, node in enumerate(self.nodes) if node.is_present]

    @property
    def missing(self) -> list[int]:
        """Returns the indices of the nodes that are not there."""
        return [index for index, node in enumerate(self.nodes) if not node.is_present]

    def knowing(self, index: int, **facts: Any) -> Membership:  # noqa: ANN401  a GroupNode's fields
        """Returns the same generation with more facts about a node."""
        nodes = list(self.nodes)
        nodes[index] = replace(nodes[index], **facts)
        return replace(self, nodes=tuple(nodes))

    def followed(self, budgets: Mapping[int, Budget | None]) -> Membership:
        """Returns the next generation, in which these nodes are there and no others."""
        found = (
            replace(node, is_present=index in budgets, budget=budgets.get(index))
            for index, node in enumerate(self.nodes)
        )
        return Membership(self.generation + 1, tuple(found))

    def without(self, indices: Container[int]) -> Membership:
        """Returns the next generation, in which these nodes are not there any more."""
        return self.followed({index: self.nodes[index].budget for index in self.present if index not in indices})

    def pack(self) -> bytes:
        """Returns the value's JSON."""
        return json.dumps(written(self), separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Membership:
        """Reads what `pack` returned. Raises ValueError."""
        return read(cls, json.loads(data))
