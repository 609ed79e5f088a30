"""Prints the estimates of what staging saved. From record to lines."""

from __future__ import annotations

from typing import Any

from hpcstage.report.terminal import text
from hpcstage.report.terminal.text import Style


def savings(record: dict[str, Any], style: Style) -> list[str]:
    """Returns the estimates with their formulas; with several nodes without these, as the nodes need the lines."""
    part = record["savings"]
    if record.get("group"):
        line = text.clip(
            f"Saved (estimates): {saved(part) or 'cannot tell: ' + part['vs_direct']['reason']}", style.width
        )
        return [style.bold("Saved") + line.removeprefix("Saved")]
    lines = [line for name in ("direct", "upfront") for line in _estimate(name, part[f"vs_{name}"], style)]
    return [style.bold("Saved (estimates)"), *lines]


def saved(part: dict[str, Any]) -> str:
    """Returns the known estimates in one line."""
    known = [
        (text.seconds(part[f"vs_{name}_s"]), name) for name in ("direct", "upfront") if part[f"vs_{name}_s"] is not None
    ]
    return ", ".join(f"{value} against {name}" for value, name in known)


def _estimate(name: str, part: dict[str, Any], style: Style) -> list[str]:
    label = f"  against {name:<8} "
    if part["saved_s"] is None:
        lines = text.wrap(f"cannot tell: {part['reason']}", style.width - len(label) - 1, lines=2)
        return [f"{label} {lines[0]}", *(" " * (len(label) + 1) + line for line in lines[1:])]
    head = f"{label}{text.seconds(part['saved_s']):>10} = "
    lines = text.wrap(part["formula"], style.width - len(head), lines=2)
    return [head + lines[0], *(" " * len(head) + line for line in lines[1:])]
