"""Decides how a report looks on this terminal: width, colour, characters. It owns no layout."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from typing import Any

from hpcstage.report.terminal.nodes import every
from hpcstage.report.terminal.page import plain_record, render
from hpcstage.report.terminal.text import Style

WIDEST = 100


def look(env: Mapping[str, str], *, no_color: bool) -> Style:
    """Returns the style: the terminal's width up to WIDEST, or 80 columns without one.

    Colour is used only on a terminal, and where neither `--no-color` nor the environment refuses it.
    """
    tty = sys.stdout.isatty()
    color = tty and not no_color and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST) if tty else 80
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return Style(width, color, unicode=encoding.startswith("utf"))


def shown(record: Mapping[str, Any], style: Style, *, every_node: bool = False) -> str:
    """Returns the report in that style, or the lines of all its nodes."""
    if every_node:
        return "\n".join(every(dict(record) if style.unicode else plain_record(dict(record)), style))
    return render(dict(record), width=style.width, color=style.color, unicode=style.unicode)
