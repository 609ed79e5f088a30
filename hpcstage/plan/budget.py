"""Decides the budget of a node's store from facts, so that `plan` and `run` say the same numbers and reason. Pure.

`job.localdir` measures what is free; the daemon measures it once more (`store.storedir`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcstage.plan.blocks import BLOCK_BYTES
from hpcstage.plan.types import Budget

DEFAULT_SHARE = 0.8
"""The share of the free disk that staging takes where nothing was asked for."""
MEMORY_PARTS = 2
"""Staging takes one of so many equal parts of the free memory; the training needs the rest."""
NO_LIMIT = 1 << 62
"""The budget in inodes on a file system that does not count them."""
ASKED = "as asked for"
TEMPORARY_SHARE = 0.1
"""The share of its budget that a node which keeps only some of the files sets aside for copies of the others."""
LEAST_TEMPORARY = Budget(64 << 20, 256)
"""It sets aside no less than this, but at most MOST_TEMPORARY_SHARE."""
MOST_TEMPORARY_SHARE = 0.25


@dataclass(frozen=True)
class BudgetAsked:
    """The wishes of the user: bytes or a share of what is free, and likewise inodes; None where nothing was said."""

    size_bytes: int | None = None
    size_share: float | None = None
    inodes: int | None = None
    inodes_share: float | None = None


@dataclass(frozen=True)
class BudgetFacts:
    """The facts that a budget follows from."""

    asked: BudgetAsked = field(default_factory=BudgetAsked)
    free_bytes: int = 0
    free_inodes: int | None = None
    """None: the file system does not count them."""
    is_memory: bool = False
    memory_left: int | None = None
    """The bytes of memory that the job may still take. None: the directory is no memory, or they are not known."""
    part: float = 1.0
    """The job's part of the node, where jobs share the node and its disk."""
    part_why: str = ""
    nodes: int = 1
    """The virtual nodes that divide the disk equally."""


def decide(facts: BudgetFacts) -> Budget:
    """Returns the budget of one node: what was asked for, else a share of what is free."""
    size_bytes, why = _bytes(facts)
    inodes, inodes_why = _inodes(facts)
    return Budget(size_bytes, inodes, why if inodes_why in ("", why) else f"bytes: {why}; inodes: {inodes_why}")


def _bytes(facts: BudgetFacts) -> tuple[int, str]:
    asked = facts.asked
    if asked.size_bytes is not None:
        return asked.size_bytes, ASKED
    usable, memory_why = _usable_memory(facts) if facts.is_memory else (facts.free_bytes, "")
    if asked.size_share is not None:
        return int(usable // facts.nodes * asked.size_share), ASKED
    if facts.is_memory:
        return usable // facts.nodes, memory_why + _divided(facts)
    return _default(usable, facts)


def _usable_memory(facts: BudgetFacts) -> tuple[int, str]:
    """Returns the bytes that staging may take, and why. The job's limit leaves other jobs their part of the memory."""
    if facts.memory_left is None:
        return facts.free_bytes // MEMORY_PARTS, "half of what is free in memory"
    half = facts.memory_left // MEMORY_PARTS
    if facts.free_bytes < half:
        return facts.free_bytes, "all that this directory in memory has free"
    return half, "half of the free memory"


def _inodes(facts: BudgetFacts) -> tuple[int, str]:
    asked = facts.asked
    if asked.inodes is not None:
        return asked.inodes, ASKED
    if facts.free_inodes is None:
        return NO_LIMIT, ""
    if asked.inodes_share is not None:
        return int(facts.free_inodes // facts.nodes * asked.inodes_share), ASKED
    return _default(facts.free_inodes, facts)


def _default(free: int, facts: BudgetFacts) -> tuple[int, str]:
    why = f"{DEFAULT_SHARE:.0%} of what is free" + (f" for {facts.part_why}" if facts.part_why else "")
    return int(free // facts.nodes * DEFAULT_SHARE * facts.part), why + _divided(facts)


def _divided(facts: BudgetFacts) -> str:
    return f", divided among {facts.nodes} virtual nodes" if facts.nodes > 1 else ""


def for_files(budget: Budget, directories: int) -> Budget:
    """Returns what is left of a budget for files: each directory takes a block and an inode."""
    return _without(budget, Budget(directories * BLOCK_BYTES, directories))


def for_temporary(budget: Budget) -> Budget:
    """Returns the part of a budget for files that is set aside for temporary copies, which only pass through."""
    return Budget(
        _set_aside(budget.size_bytes, LEAST_TEMPORARY.size_bytes), _set_aside(budget.inodes, LEAST_TEMPORARY.inodes)
    )


def for_kept(budget: Budget) -> Budget:
    """Returns the part of a budget for files that is left for those which the node keeps."""
    return _without(budget, for_temporary(budget))


def _set_aside(amount: int, least: int) -> int:
    return max(int(amount * TEMPORARY_SHARE), min(least, int(amount * MOST_TEMPORARY_SHARE)))


def _without(budget: Budget, taken: Budget) -> Budget:
    return Budget(max(0, budget.size_bytes - taken.size_bytes), max(0, budget.inodes - taken.inodes))


def more_space(budget_why: str) -> str:
    """Says what to do where the budget is too small: one that the user asked for can be raised."""
    if ASKED in budget_why:
        return "raise --budget, or name a larger disk with --local-dir"
    return "name a larger disk with --local-dir; --budget SIZE takes more than the default share of what is free"
