"""Decides which node of the group an id comes from, when some of the job's nodes may be missing. Pure.

The placement is made for all nodes of the job, as if those that are missing were like the smallest of the others. It
stays the same when nodes are lost or come late; only the files that a missing node would read are divided among the
rest. When nodes are missing, the others are asked which copies they have of such files (`Inquiry`), before the source
is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcstage.plan.budget import for_files, for_temporary
from hpcstage.plan.placement.owners import needed_bytes
from hpcstage.plan.placement.placements import Placement, Placing, decide, place_shares
from hpcstage.plan.types import Budget
from hpcstage.protocol.membership import Membership

_SPREAD = 2654435761
"""Knuth's multiplier: neighbours go to different nodes."""


def budgets_of(members: Membership) -> list[Budget]:
    """Returns the budget of every node of the job; a node that has not said its budget gets the smallest of the
    others."""
    known = [node.budget for node in members.nodes if node.budget is not None]
    least = Budget(min(budget.size_bytes for budget in known), min(budget.inodes for budget in known))
    return [node.budget or least for node in members.nodes]


@dataclass(frozen=True)
class Estate:
    """What a node knows of the files that missing nodes would read."""

    is_divided: bool = True
    """Whether the others have said what they have of them. Before that, none is read from the source."""
    holders: Mapping[int, int] = field(default_factory=dict)
    """By id: another node that has a copy. The node that takes the id over asks that one for it."""


ALL_DEALT = Estate()


class Routes:
    """Answers, for one node, where files come from."""

    def __init__(self, placement: Placement, members: Membership, node: int, why: str, estate: Estate) -> None:
        self.placement = placement
        self.members = members
        self.node = node
        self.why = why
        self._present = members.present
        self._missing = frozenset(members.missing)
        self._estate = estate

    @property
    def kind(self) -> Placing:
        """How files are shared."""
        return self.placement.kind

    @property
    def is_divided(self) -> bool:
        """Whether the files of missing nodes are divided among the others."""
        return self._estate.is_divided

    @property
    def keeps_all(self) -> bool:
        """Whether every node ends with every file (with `private`: as far as its budget allows)."""
        return self.kind.keeps_all

    def fetcher(self, id_: int) -> int:
        """Returns the node that reads an id from the source; other nodes ask it for the file. An id of a missing node
        of which another node has a copy, and which this node takes over, comes from that one."""
        found = self._present_node(id_, self.placement.fetcher(id_, self.node))
        return self._estate.holders.get(id_, found) if found == self.node else found

    def _present_node(self, id_: int, node: int) -> int:
        if node not in self._missing:
            return node
        return self._present[(id_ * _SPREAD >> 8) % len(self._present)]

    def own(self) -> array[int]:
        """Returns the ids that this node reads from the source, with those that it takes over from missing nodes."""
        found = self.placement.own(self.node)
        found.extend(id_ for id_ in self._taken_over() if id_ not in self._estate.holders)
        return found

    def left(self) -> array[int]:
        """Returns the ids that missing nodes would read."""
        found = array("I")
        if self.kind is not Placing.PRIVATE:
            for missing in sorted(self._missing):
                found.extend(self.placement.own(missing))
        return found

    def _taken_over(self) -> list[int]:
        """Returns the ids of missing nodes that this node takes over."""
        fetcher = self.placement.fetcher
        if not self._estate.is_divided:
            return []
        return [id_ for id_ in self.left() if self._present_node(id_, fetcher(id_, self.node)) == self.node]

    def others(self) -> array[int]:
        """Returns the ids beside its own that this node keeps: it asks other nodes for them before a program requests
        them."""
        found = self.placement.others(self.node)
        taken_over = [id_ for id_ in self._taken_over() if id_ in self._estate.holders]
        known = frozenset(found) if taken_over else frozenset()
        found.extend(id_ for id_ in taken_over if id_ not in known)
        return found

    def unplaced(self) -> array[int]:
        """Returns the ids of which nodes keep nothing."""
        return self.placement.unplaced()


def make(
    asked: str, sizes: Sequence[int], directories: int, members: Membership, node: int, estate: Estate = ALL_DEALT
) -> Routes:
    """Makes the placement for what the user asked for, the name of a kind."""
    nodes = [for_files(budget, directories) for budget in budgets_of(members)]
    kind, why = decide(asked, needed_bytes(sizes), len(sizes), nodes)
    return Routes(place_shares(kind, sizes, nodes), members, node, why, estate)


def temporary_budget_of(members: Membership, node: int, directories: int) -> Budget:
    """Returns the budget for temporary copies that `make` has set aside on a node."""
    return for_temporary(for_files(budgets_of(members)[node], directories))


MOST_S = 1.0
"""A file that nobody has is read from the source so much later, at most. A program that asks for it does not wait for
that."""


class Inquiry:
    """What this node has asked the others, once or more often."""

    def __init__(self) -> None:
        self.until: float | None = None
        """When the wait for the others ends; None while there is none."""
        self._unheard: set[int] = set()
        self._holders: dict[int, int] = {}

    def begin(self, others: Iterable[int], now: float) -> None:
        """Waits for these nodes."""
        self._unheard = set(others)
        self.until = now + MOST_S if self._unheard else now

    def heard(self, node: int, ids: Collection[int]) -> None:
        """Takes what a node has; without ids, that this was all."""
        self._holders.update(dict.fromkeys(ids, node))
        if not ids:
            self._unheard.discard(node)

    def is_over(self, now: float) -> bool:
        """Returns whether there was a wait, and nothing is to be waited for any more."""
        return self.until is not None and (not self._unheard or now >= self.until)

    def end(self) -> None:
        """Waits no more."""
        self.until = None

    def estate(self, present: Collection[int], here: Collection[int]) -> Estate:
        """Returns what is known. Of the ids that are `here` this node needs no copy; a node that is not there any more
        gives none."""
        found = {id_: node for id_, node in self._holders.items() if node in present and id_ not in here}
        return Estate(is_divided=True, holders=found)
