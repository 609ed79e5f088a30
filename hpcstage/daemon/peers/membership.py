"""Which nodes of the job are in the group, from what the exchange says; and whether two manifests are the same."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol

from hpcstage.daemon.peers.routes import Members
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Budget
from hpcstage.protocol import exchange

_HEAD_BYTES = 96
"""Of a manifest's file: counts and a checksum."""


class Stage(Protocol):
    """What the staging does when it is told."""

    def scan(self) -> None:
        """This node makes the manifest."""

    def stage_received(self, directories: int) -> None:
        """The manifest of another node lies in the node directory."""

    def written_elsewhere(self, ids: list[int]) -> None:
        """Programs of other nodes write to these."""

    def read_elsewhere(self, ids: Collection[int]) -> None:
        """Programs of other nodes read these large files at the source."""

    def problem(self, id_: str, text: str, remedy: str) -> None:
        """For the record."""


class Membership:
    """This node, `index` out of `nodes`, and the others."""

    def __init__(self, index: int, nodes: int) -> None:
        self.index = index
        self.nodes = nodes
        self.members: Members | None = None
        """While a group stands."""
        self.generations = 0
        """So many groups this node was in."""
        self.why = "no exchange has connected"
        """Why there is no group, or how the last one ended."""
        self._ready: dict[int, Budget] = {}

    @property
    def leads(self) -> bool:
        """Whether the others wait for this node's manifest."""
        return self.index == (0 if self.members is None else self.members.present[0])

    def begin(self) -> None:
        """A new exchange is here."""
        self.members = None
        self._ready = {}

    def take(self, message: exchange.Ready) -> bool:
        """A part of the list of nodes. True: the group stands."""
        self._ready |= {node.index: Budget(node.budget_bytes, node.budget_inodes) for node in message.nodes}
        if len(self._ready) < message.total or self.index not in self._ready:
            return False
        self.members = Members(self.nodes, dict(self._ready))
        self.generations += 1
        return True

    def lose(self, node: int) -> bool:
        """A node has left. False: it was not there."""
        if self.members is None or node not in self.members.budgets:
            return False
        self.why = f"node {node} has left the group"
        budgets = {index: budget for index, budget in self.members.budgets.items() if index != node}
        self.members = Members(self.nodes, budgets)
        return True

    def end(self, why: str) -> None:
        """The group is gone."""
        self.why = why
        self.members = None

    def supposed(self, limit: Budget) -> Members:
        """Before the group stands: as if all nodes were there and like this one."""
        return Members(self.nodes, dict.fromkeys(range(self.nodes), limit))

    def to_json(self, last: Members | None) -> dict[str, Any]:
        """See NodePart.group; `last`: the nodes that shared files with this one last."""
        there = {self.index} if last is None or not self.generations else set(last.present)
        missing = [index for index in range(self.nodes) if index not in there]
        return {"generations": self.generations, "size": len(there), "missing": missing, "why": self.why}


class Staged:
    """The manifest that is staged, to be compared with the group's."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._path = path
        self._head = _head(path)

    def is_groups(self) -> bool:
        """Whether the manifest in the node directory names the same files under the same ids."""
        if _head(self._path) == self._head:
            return True
        theirs, ours = Manifest.open(self._path, verify=False), self.manifest
        return theirs.sizes == ours.sizes and theirs.paths_digest() == ours.paths_digest()


def size_of(path: Path) -> int:
    """Of a file; 0 if it is not there."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD_BYTES)
