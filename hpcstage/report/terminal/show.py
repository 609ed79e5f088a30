"""How a report looks on this terminal: width, colour, characters. Owns no layout."""

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
    """80 columns unless the terminal has more, or less; colour only on a terminal, and where nobody refuses it."""
    tty = sys.stdout.isatty()
    color = tty and not no_color and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
    width = min(shutil.get_terminal_size((80, 24)).columns, WIDEST) if tty else 80
    encoding = (sys.stdout.encoding or "ascii").lower().replace("-", "")
    return Style(width, color, unicode=encoding.startswith("utf"))


def shown(record: Mapping[str, Any], style: Style, *, every_node: bool = False) -> str:
    """The report in that look, or all of its nodes."""
    if every_node:
        return "\n".join(every(dict(record) if style.unicode else plain_record(dict(record)), style))
    return render(dict(record), width=style.width, color=style.color, unicode=style.unicode)
