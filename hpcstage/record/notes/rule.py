"""What a rule gives, and words that several rules use. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from hpcstage.plan.types import BUDGET_ASKED


class Severity(Enum):
    """Worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Note:
    """One thing to know, and what to do about it."""

    id: str
    severity: Severity
    text: str
    remedy: str = ""


def percent(share: float) -> str:
    """A share for people; small ones do not become 0 %."""
    value = 100 * share
    if 0 < value < 1:
        return "under 1 %"
    if 99 < value < 100:
        return f"{min(value, 99.9):.1f} %"
    return f"{value:.0f} %"


def number(count: int, one: str, many: str | None = None) -> str:
    """`1 file`, `2,000 files`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def more_room(budget_why: str) -> str:
    """What to do where the budget is too small: one that was asked for can be raised."""
    if budget_why == BUDGET_ASKED:
        return "raise --budget, or name a larger disk with --local-dir"
    return "name a larger disk with --local-dir; --budget SIZE takes more than the default share of what is free"


def was_watched(record: dict[str, Any]) -> bool:
    """Whether the command ran, and hpcstage beside it."""
    return record["run"]["state"] not in ("aside", "not started")


def stages(record: dict[str, Any]) -> bool:
    """Whether this run staged anything (every mode but direct)."""
    return record["run"]["mode"] in ("runtime", "upfront")
