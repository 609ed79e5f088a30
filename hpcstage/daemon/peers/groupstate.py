"""Knows which nodes of the job are in the group, from what the exchange says, and compares manifests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Budget
from hpcstage.protocol import exchange
from hpcstage.protocol.membership import Membership

if TYPE_CHECKING:
    from hpcstage.record.parts.part import GroupPart

_HEAD_BYTES = 96
"""The bytes of the head of a manifest's file, which holds counts and a checksum."""


class GroupState:
    """Owns what this node knows of its group: its membership, and why there is none. This node has number `index`."""

    def __init__(self, index: int, expected: Membership) -> None:
        self.index = index
        self.members: Membership | None = None
        """The membership; None while there is no group."""
        self.groups = 0
        """The number of groups that this node was in."""
        self.why = "no exchange has connected"
        """Why there is no group, or how the last one ended."""
        self._latest = expected
        self._pieces = exchange.GroupPieces()

    @property
    def leads(self) -> bool:
        """Whether the others wait for this node's manifest."""
        return self.index == (0 if self.members is None else self.members.present[0])

    @property
    def nodes(self) -> int:
        """The number of nodes of the job."""
        return len(self._latest)

    def begin(self) -> None:
        """Forgets the last group, since a new exchange has connected: generations count within one MPI program, as the
        lead, which numbers them, may not have learnt of the last ones of an earlier program."""
        self.members = None
        self._latest = replace(self._latest, generation=0)
        self._pieces = exchange.GroupPieces()

    def take(self, message: exchange.Group) -> list[int] | None:
        """Takes a piece of a membership. Returns the nodes that have left once a newer one is whole and has this node,
        else None. Raises LinkError."""
        found = self._pieces.add(message)
        if found is None or found.generation <= self._latest.generation or self.index not in found.present:
            return None
        before = [] if self.members is None else self.members.present
        self.groups += self.members is None
        self.members = self._latest = found
        left = [node for node in before if node not in found.present]
        if left:
            self.why = f"node {left[-1]} has left the group"
        return left

    def end(self, why: str) -> None:
        """Notes that the group has ended, and why."""
        self.why = why
        self.members = None

    def supposed(self, limit: Budget) -> Membership:
        """Returns the membership that is assumed before a group stands: all nodes, with this node's budget."""
        hosts = Membership.of(self._latest.hosts)
        return hosts.knowing(self.index, budget=limit)

    def record(self) -> GroupPart:
        """Returns the group as the record shows it."""
        from hpcstage.record.parts.part import GroupPart

        return GroupPart(generations=self.groups, why=self.why)


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


def _head(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD_BYTES)
