"""Defines the note that a rule returns, and texts and tests that several rules use. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from hpcstage.plan.budget import ASKED


class Severity(Enum):
    """How much a note matters, worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Note:
    """One thing that the user should know, and what to do about it."""

    id: str
    severity: Severity
    text: str
    remedy: str = ""


def percent(share: float) -> str:
    """Formats a share for people; a small share does not become 0 %, and a nearly whole one does not become 100 %."""
    value = 100 * share
    if 0 < value < 1:
        return "under 1 %"
    if 99 < value < 100:
        return f"{min(value, 99.9):.1f} %"
    return f"{value:.0f} %"


def number(count: int, one: str, many: str | None = None) -> str:
    """Formats a number with its noun: `1 file`, `2,000 files`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def more_room(budget_why: str) -> str:
    """Says what to do where the budget is too small: one that the user asked for can be raised."""
    if ASKED in budget_why:
        return "raise --budget, or name a larger disk with --local-dir"
    return "name a larger disk with --local-dir; --budget SIZE takes more than the default share of what is free"


def was_watched(record: dict[str, Any]) -> bool:
    """Returns whether the command ran with hpcstage beside it."""
    return record["run"]["state"] not in ("aside", "not started")


def stages(record: dict[str, Any]) -> bool:
    """Returns whether the run's mode stages files."""
    return record["run"]["mode"] in ("runtime", "upfront")
