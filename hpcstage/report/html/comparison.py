"""Draws runs side by side as one HTML page that needs no other file. From a comparison to text."""

from __future__ import annotations

import time

from hpcstage.report.canvas import cleaned
from hpcstage.report.comparison import Comparison
from hpcstage.report.html.page import template

PARTS = (
    "before the command",
    "compute",
    "waited for decoding",
    "waited for the source",
    "waited for local disk",
    "start and end",
)


def page(found: Comparison) -> str:
    """Returns the page."""
    found = cleaned(found, unicode=True)
    return template("comparison.html.j2").render(
        runs=found.runs,
        rows=found.rows,
        unlike=found.unlike,
        remark=found.remark,
        parts=PARTS,
        bars=_bars(found),
        started=lambda run: time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_unix_s)),
    )


def _bars(found: Comparison) -> list[dict[str, object]]:
    """Returns the parts of the time of each run in percent of the longest; empty where no run has a time."""
    rows = {row.name.strip(): row for row in found.rows}
    totals = [float(value or 0) for value in rows["total"].values] if "total" in rows else []
    longest_s = max(totals, default=0.0)
    if not longest_s:
        return []
    bars: list[dict[str, object]] = []
    for at, run in enumerate(found.runs):
        parts = []
        for name in PARTS:
            value = rows[name].values[at] if name in rows else None
            width = 100 * float(value or 0) / longest_s
            told = f"{name}: {rows[name].text(at)}" if name in rows else ""
            parts.append({"percent": f"{width:.2f}", "told": told})
        bars.append({"label": run.label, "total": rows["total"].text(at), "parts": parts})
    return bars
