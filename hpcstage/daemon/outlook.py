"""Holds what is known of a node's staging besides the files: the scan, the budget, the mode and why, what failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from hpcstage.daemon.reading.scanning import Scanned
from hpcstage.plan.types import Budget
from hpcstage.problem import Problem


@dataclass
class Outlook:
    """Holds what is known of a node's staging; `preparing` and `staging` fill it as they learn it."""

    scanned: Scanned | None = None
    budget: Budget | None = None
    mode: str = ""
    mode_why: str = "asked for"
    staged_at: float | None = None
    problems: list[Problem] = field(default_factory=list)
