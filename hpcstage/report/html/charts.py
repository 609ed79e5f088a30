"""Draws the shapes of the page's charts as SVG. From figures to markup; words and scales stand beside it as text.

A chart is stretched to the width that it gets, so it holds shapes only: text would be stretched, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

WIDTH, HEIGHT = 1000.0, 100.0
LEVELS = 6
_SVG = Markup('<svg viewBox="0 0 {:g} {:g}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>')

_PART = Markup('<rect class="{}" x="{:.1f}" y="0" width="{:.1f}" height="20"><title>{}</title></rect>')
_BAND = Markup('<rect class="band" x="{:.1f}" y="0" width="{:.1f}" height="{:g}"><title>{}</title></rect>')
_MARK = Markup('<rect class="mark" x="{:.1f}" y="2" width="6" height="16"><title>{}</title></rect>')


@dataclass(frozen=True)
class Band:
    """A period on the time axis."""

    start_s: float
    end_s: float
    title: str


def stacked(parts: Sequence[tuple[str, float, str]], total: float, label: str) -> Markup:
    """Draws parts of a whole side by side. A part is a style, a value, and what it says."""
    drawn, at = Markup(""), 0.0
    for style, value, title in parts:
        width = WIDTH * value / total if total else 0.0
        drawn += _PART.format(style, at, max(0.5, width - 2), title)
        at += width
    return _SVG.format(WIDTH, 20, label, drawn)


def area(values: Sequence[float], style: str, label: str, end_s: float, bands: Iterable[Band] = ()) -> Markup:
    """Draws values at equal distances over time as an area, scaled to the largest, in front of marked periods."""
    top, step = max(values, default=0.0) or 1.0, WIDTH / max(1, len(values))
    drawn = Markup("")
    for band in bands:
        left, right = (
            WIDTH * min(1.0, max(0.0, at_s / end_s)) if end_s else 0.0 for at_s in (band.start_s, band.end_s)
        )
        drawn += _BAND.format(left, max(2.0, right - left), HEIGHT, band.title)
    line = " ".join(
        f"{x:.1f},{HEIGHT - value / top * (HEIGHT - 4):.1f}"
        for at, value in enumerate(values)
        for x in (at * step, (at + 1) * step)
    )
    ends = f"M0,{HEIGHT:g} L{line} L{WIDTH:g},{HEIGHT:g}Z"
    drawn += Markup('<path class="area {}" d="{}"/><path class="line {}" d="M{}"/>').format(style, ends, style, line)
    return _SVG.format(WIDTH, HEIGHT, label, drawn)


def heat(rows: Sequence[Sequence[float]], label: str) -> Markup:
    """Draws a row of cells for each sequence: the stronger the colour, the larger, in steps of the largest of all."""
    columns = max(map(len, rows), default=0)
    top = max((value for row in rows for value in row), default=0.0)
    if not columns or not top:
        return Markup("")
    runs: list[list[str]] = [[] for _ in range(LEVELS)]
    for y, row in enumerate(rows):
        levels = [min(LEVELS, int(value / top * LEVELS) + 1) if value > 0 else 0 for value in row]
        start = 0
        for x in range(1, len(levels) + 1):
            if x == len(levels) or levels[x] != levels[start]:
                if levels[start]:
                    runs[levels[start] - 1].append(f"M{start},{y}.5h{x - start}")
                start = x
    path = Markup('<path class="heat" stroke-opacity="{:.2f}" d="{}"/>')
    drawn = Markup("").join(path.format((at + 1) / LEVELS, "".join(run)) for at, run in enumerate(runs) if run)
    return _SVG.format(columns, len(rows), label, drawn)


def dots(values: Sequence[tuple[str, float]], low: float, high: float, label: str) -> Markup:
    """Draws the range of values and a mark at each, on a linear axis from `low` to `high`."""

    def place(value: float) -> float:
        return WIDTH * (value - low) / (high - low) if high > low else WIDTH / 2

    ends = [place(value) for _, value in values]
    drawn = Markup('<rect class="range" x="{:.1f}" y="8" width="{:.1f}" height="4"/>').format(
        min(ends), max(2.0, max(ends) - min(ends))
    )
    for (title, _), x in zip(values, ends, strict=True):
        drawn += _MARK.format(min(max(0.0, x - 3), WIDTH - 6), title)
    return _SVG.format(WIDTH, 20, label, drawn)
