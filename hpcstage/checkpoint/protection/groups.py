"""Chooses which nodes of a job protect each other: groups, each with so many data blocks and parities in a stripe.

Pure. Nodes that fail together, because they share a failure domain (a chassis, a rack), are dealt to different groups
as far as there are groups; a group that holds more of one domain than it has parities would not outlive its loss, which
is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hpcstage.errors import HpcstageError

USUAL_MOST_K = 8
"""The most data blocks of a stripe where nobody asked for a number: parities take an eighth, a rebuild reads eight."""


ON_ONE_NODE = "on one node checkpoints are protected by their copies in DIR alone"


class CannotProtect(HpcstageError):
    """The nodes of a job do not allow the protection that was asked for, and nothing less was to be taken."""

    exit_code = 125


@dataclass(frozen=True)
class CodeSize:
    """How many data blocks and parities a stripe has; as many parts as parities may be lost."""

    k: int
    m: int

    @property
    def nodes(self) -> int:
        """Returns how many nodes it needs at least."""
        return self.k + self.m

    def __str__(self) -> str:
        return f"{self.k}+{self.m}"


@dataclass(frozen=True)
class ProtectionPlan:
    """The groups of a job."""

    size: CodeSize | None
    """None: the nodes cannot protect each other."""
    groups: tuple[tuple[str, ...], ...]
    """The nodes of each group, in the order of the job's nodes."""
    line: str = ""
    """Says what is not as it was asked for, or not as safe as it could seem."""


def protect(
    nodes: Sequence[str],
    asked: CodeSize | None = None,
    domains: Mapping[str, str] | None = None,
    *,
    strict: bool = False,
) -> ProtectionPlan:
    """Returns how the nodes of a job protect each other: as was asked, or the most that fits.

    Nobody asked: one parity, and the most data blocks with which the loss of any one failure domain is outlived.
    `domains` names the failure domain of nodes that share one. With `strict`, CannotProtect is raised where there would
    be a line.
    """
    if len(set(nodes)) < len(nodes):
        raise ValueError("a node of a job is named twice")
    where = {node: (domains or {}).get(node, f"\0{node}") for node in nodes}
    if len(nodes) < 2:
        plan = ProtectionPlan(None, (), f"{asked} needs {asked.nodes} nodes; {ON_ONE_NODE}" if asked else "")
    elif asked is None:
        plan = _widest(nodes, where)
    else:
        size = _most_that_fits(asked, len(nodes))
        shortage = f"{asked} needs {asked.nodes} nodes; on {len(nodes)} it is {size}" if size != asked else ""
        plan = _planned(nodes, size, where, shortage)
    if strict and plan.line:
        raise CannotProtect(f"checkpoints cannot be protected as was asked: {plan.line}", "ask for less")
    return plan


def _most_that_fits(asked: CodeSize, count: int) -> CodeSize:
    """Gives up data blocks before parities: these are what was asked to be safe against."""
    m = min(asked.m, count - 1)
    return CodeSize(min(asked.k, count - m), m)


def _widest(nodes: Sequence[str], where: Mapping[str, str]) -> ProtectionPlan:
    sizes = [CodeSize(k, 1) for k in range(min(USUAL_MOST_K, len(nodes) - 1), 0, -1)]
    plans = [_planned(nodes, size, where) for size in sizes]
    return next((plan for plan in plans if not plan.line), plans[0])


def _planned(nodes: Sequence[str], size: CodeSize, where: Mapping[str, str], line: str = "") -> ProtectionPlan:
    """Deals the nodes, domain by domain, round the groups: each has as few of a domain as can be."""
    shared = Counter(where.values())
    ordered = sorted(nodes, key=lambda node: (-shared[where[node]], where[node]))
    count = len(nodes) // size.nodes
    dealt = {node: place % count for place, node in enumerate(ordered)}
    groups = tuple(tuple(node for node in nodes if dealt[node] == group) for group in range(count))
    plan = ProtectionPlan(size, groups, line)
    most, domain = max((lost, domain) for group in groups for domain, lost in Counter(where[n] for n in group).items())
    if most > size.m:
        loss = f"the loss of {domain!r} would take {most} parts of a group, of which {size.m} may be lost"
        return replace(plan, line=f"{line}; {loss}" if line else loss)
    return plan
