"""Draws with rich: owns the console, and the few forms that rich does not have. It knows no records."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, TypeVar, cast

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hpcstage.report.figures import clean

WIDEST = 100
"""Lines of a report on a wider terminal are as long as this, as longer ones are hard to read."""
NARROWEST = 80
"""A narrower terminal breaks lines itself, as complete figures matter more than fitting lines."""
WIDE = 100_000
"""The width of what must not be wrapped."""
Fact = tuple[str, str]
"""A label and a sentence; a sentence without a label belongs to the one above."""
_LABEL = 7
_JUSTIFY: dict[str, Any] = {"l": "left", "r": "right", "w": "left"}
Value = TypeVar("Value")


class Canvas:
    """A width, and whether there may be colour and other characters than ASCII."""

    def __init__(self, width: int = 80, *, color: bool = False, unicode: bool = True) -> None:
        self.unicode = unicode
        self._console = Console(
            file=io.TextIOWrapper(io.BytesIO(), "utf-8" if unicode else "ascii"),
            width=width,
            force_terminal=color,
            color_system="standard" if color else None,
            no_color=False,
            markup=False,
            emoji=False,
            highlight=False,
            legacy_windows=False,
        )

    @classmethod
    def of_stdout(cls, *, least: int = NARROWEST, no_color: bool = False) -> Canvas:
        """Returns the canvas of this terminal, `least` columns wide, or plain text where stdout is none. Colour also
        needs that the environment does not refuse it."""
        console = Console(no_color=no_color or None)
        is_terminal = sys.stdout.isatty()
        width = max(least, min(console.width, WIDEST)) if is_terminal else least
        color = is_terminal and not console.no_color and not console.is_dumb_terminal
        return cls(width, color=color, unicode=console.encoding.startswith("utf"))

    def lines(self, *drawn: RenderableType) -> list[str]:
        """Returns what was drawn, line by line; text is one line, which is cut where it is too long."""
        with self._console.capture() as captured:
            self._console.print(Group(*map(line, drawn)))
        text = captured.get() if self.unicode else captured.get().replace("…", "~")
        return [one.rstrip() for one in text.split("\n")[:-1]]


def terminal_width() -> int:
    """Returns the columns of the terminal; off a terminal nothing is wrapped."""
    return Console().width if sys.stdout.isatty() else WIDE


def line(drawn: RenderableType) -> RenderableType:
    """Returns text as a line that is not wrapped, but cut where it is too long; anything else as it is."""
    return Text(drawn, no_wrap=True, overflow="ellipsis") if isinstance(drawn, str) else drawn


def section(title: str, *body: RenderableType) -> Group:
    """Returns a heading with its lines."""
    return Group(Text(title, "bold", no_wrap=True, overflow="ellipsis"), indented(*body))


def indented(*body: RenderableType) -> Padding:
    """Returns lines that stand below a heading."""
    return Padding(Group(*map(line, body)), (0, 0, 0, 2))


def grid(form: str, rows: Iterable[Sequence[RenderableType]], heads: Sequence[str] = (), *, gap: int = 2) -> Table:
    """Returns a table without lines. `form` has a letter for each column: l (left), r (right), or w for one that
    becomes narrower where there is not enough room: text in it is cut."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold", show_header=bool(heads))
    for at, letter in enumerate(form):
        table.add_column(heads[at] if heads else "", justify=_JUSTIFY[letter], no_wrap=letter != "w")
    for row in rows:
        table.add_row(*map(line, row))
    return table


def facts(told: Iterable[Fact]) -> Table:
    """Returns lines of labels with sentences, which are wrapped beside the label."""
    return grid("lw", ((name.ljust(_LABEL), Text(sentence, overflow="fold")) for name, sentence in told))


class Wrapped:
    """Text that takes at most so many lines; the last is cut where it is longer."""

    def __init__(self, text: str, lines: int) -> None:
        self._text = Text(text)
        self._lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the lines."""
        if self._lines == 1:
            yield line(self._text.plain)
            return
        found = list(self._text.wrap(console, options.max_width))
        if len(found) > self._lines:
            found = found[: self._lines]
            found[-1].rstrip()
            found[-1].append(" …")
            found[-1].truncate(options.max_width, overflow="ellipsis")
        yield from found

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Says that the text may be as narrow as one likes."""
        return Measurement(1, Measurement.get(console, options, self._text).maximum)


class Sparkline:
    """A row of bars, scaled to the largest value; a blank stands for 0 or an unknown value."""

    def __init__(self, values: Sequence[float | None]) -> None:
        self._values = values

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yields the bars; where there is not enough room, a bar is the mean of several values."""
        del console
        values, bars = self._values, ".:-=+*%#" if options.ascii_only else "▁▂▃▄▅▆▇█"
        columns = max(1, min(options.max_width, len(values)))
        edges = [round(at * len(values) / columns) for at in range(columns + 1)]
        known = ([value for value in values[start:stop] if value is not None] for start, stop in pairwise(edges))
        means = [fmean(part) if part else 0.0 for part in known]
        top = max(means, default=0.0)
        yield Text("".join(" " if not v else bars[min(int(v / top * len(bars)), len(bars) - 1)] for v in means))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Says that a column is needed for each value, but fewer do as well."""
        del console, options
        return Measurement(1, len(self._values))


def cleaned(value: Value, *, unicode: bool) -> Value:
    """Returns the same value (a record, or part of one) with all its text as one line without control characters, and
    in ASCII where the terminal has nothing else. The layout needs that before it measures."""
    found: Any = value
    if isinstance(value, str):
        found = clean(value) if unicode else clean(value).encode("ascii", "backslashreplace").decode()
    elif isinstance(value, tuple | list):
        found = type(value)(cleaned(member, unicode=unicode) for member in value)
    elif isinstance(value, dict):
        found = {key: cleaned(member, unicode=unicode) for key, member in value.items()}
    elif is_dataclass(value):
        members = {part.name: cleaned(getattr(value, part.name), unicode=unicode) for part in fields(value)}
        found = replace(value, **members)  # type: ignore[type-var]
    return cast("Value", found)
