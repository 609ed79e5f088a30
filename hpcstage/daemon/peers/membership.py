"""Knows which nodes of the job are in the group, from what the exchange says, and compares manifests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hpcstage.daemon.peers.routes import Members
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Budget
from hpcstage.protocol import exchange

_HEAD_BYTES = 96
"""The bytes of the head of a manifest's file, which holds counts and a checksum."""


class Membership:
    """Owns what is known of the nodes in the group. This node is number `index` of the job's `nodes` nodes."""

    def __init__(self, index: int, nodes: int) -> None:
        self.index = index
        self.nodes = nodes
        self.members: Members | None = None
        """The nodes of the group; None while there is no group."""
        self.generations = 0
        """The number of groups that this node was in."""
        self.why = "no exchange has connected"
        """Why there is no group, or how the last one ended."""
        self._ready: dict[int, Budget] = {}

    @property
    def leads(self) -> bool:
        """Whether the others wait for this node's manifest."""
        return self.index == (0 if self.members is None else self.members.present[0])

    def begin(self) -> None:
        """Forgets the last group, since a new exchange has connected."""
        self.members = None
        self._ready = {}

    def take(self, message: exchange.Ready) -> bool:
        """Takes a part of the list of nodes. Returns True once the list is complete: the group stands."""
        self._ready |= {node.index: Budget(node.budget_bytes, node.budget_inodes) for node in message.nodes}
        if len(self._ready) < message.total or self.index not in self._ready:
            return False
        self.members = Members(self.nodes, dict(self._ready))
        self.generations += 1
        return True

    def lose(self, node: int) -> bool:
        """Takes out a node that has left. Returns False if it was not in the group."""
        if self.members is None or node not in self.members.budgets:
            return False
        self.why = f"node {node} has left the group"
        budgets = {index: budget for index, budget in self.members.budgets.items() if index != node}
        self.members = Members(self.nodes, budgets)
        return True

    def end(self, why: str) -> None:
        """Notes that the group has ended, and why."""
        self.why = why
        self.members = None

    def supposed(self, limit: Budget) -> Members:
        """Returns the members that are assumed before the group stands: all nodes, with this node's budget."""
        return Members(self.nodes, dict.fromkeys(range(self.nodes), limit))

    def to_json(self, last: Members | None) -> dict[str, Any]:
        """Returns NodePart.group; `last` are the nodes that shared files with this one last."""
        there = {self.index} if last is None or not self.generations else set(last.present)
        missing = [index for index in range(self.nodes) if index not in there]
        return {"generations": self.generations, "size": len(there), "missing": missing, "why": self.why}


class Staged:
    """Holds the manifest that is staged and compares it with the group's."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._path = path
        self._head = _head(path)

    def is_groups(self) -> bool:
        """Returns whether the manifest in the node directory names the same files under the same ids."""
        if _head(self._path) == self._head:
            return True
        theirs, ours = Manifest.open(self._path, verify=False), self.manifest
        return theirs.sizes == ours.sizes and theirs.paths_digest() == ours.paths_digest()


def size_of(path: Path) -> int:
    """Returns the bytes of a file; 0 if it is not there."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD_BYTES)
