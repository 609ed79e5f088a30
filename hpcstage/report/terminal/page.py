"""Lays out the report for a terminal: at most 40 lines of plain text. From record to text."""

from __future__ import annotations

from typing import Any

from hpcstage.report.terminal import nodes as nodes_text
from hpcstage.report.terminal import text
from hpcstage.report.terminal.nodes import nodes
from hpcstage.report.terminal.sections import SECTIONS, header
from hpcstage.report.terminal.text import Style

LINES = 40
EXPLAINED = "docs/report.md explains every word and figure of this report."
NOTES = 5
LEAST_NOTES = 8
"""The lines that one note takes at most, with heading and remedy."""
TEXT_LINES, REMEDY_LINES = 4, 3
"""The most lines of a note: hpcstage's own texts are shorter, those with the user's names in them may be cut."""
NARROWEST = 80
"""A narrower terminal breaks lines itself, as complete figures matter more than fitting lines."""
UNWATCHED = ("aside", "not started")
"""States without figures: the command did not run, or ran without hpcstage."""
MARKS = {"error": "!!", "warning": "! ", "info": "- "}


def render(record: dict[str, Any], *, width: int = 80, color: bool = False, unicode: bool = True) -> str:
    """Returns the whole report; colour and other characters than ASCII only where asked for."""
    style = Style(max(width, NARROWEST), color, unicode)
    record = record if unicode else plain_record(record)
    if record["run"].get("state") in UNWATCHED:
        return "\n\n".join("\n".join(block) for block in (header(record, style), notes(record, style, LINES)) if block)
    blocks = [section(record, style) for section in SECTIONS]
    room = LINES - sum(map(len, blocks)) - (LEAST_NOTES if record["notes"] else 0)
    blocks.insert(2, nodes(record, style, max(nodes_text.LEAST, min(nodes_text.LINES, room))))
    blocks.append(notes(record, style, LINES - sum(map(len, blocks))))
    blocks = [block for block in blocks if block]
    if sum(map(len, blocks)) < LINES:
        blocks.append([text.clip(EXPLAINED, style.width)])
    airy = sum(map(len, blocks)) + len(blocks) - 1 <= LINES
    return ("\n\n" if airy else "\n").join("\n".join(block) for block in blocks)


def plain_record(value: Any) -> Any:  # noqa: ANN401  any JSON value
    """Returns the same value with all text in ASCII; the layout needs that first."""
    if isinstance(value, str):
        return text.plain(text.clean(value))
    if isinstance(value, dict):
        return {key: plain_record(member) for key, member in value.items()}
    return [plain_record(member) for member in value] if isinstance(value, list) else value


def notes(record: dict[str, Any], style: Style, room: int) -> list[str]:
    """Returns as many notes as fit into `room` lines, worst first, each with its remedy."""
    found = record["notes"]
    if not found:
        return []
    lines: list[str] = []
    shown = 0
    for note in found[:NOTES]:
        block = _note(note, style)
        if not lines and 1 + len(block) > room:
            block = _note(note, style, 1, 1)
        if 1 + len(lines) + len(block) > room:
            break
        lines += block
        shown += 1
    more = f" ({len(found) - shown} more with --json)" if shown < len(found) else ""
    return [style.bold(f"Notes{more}"), *lines]


def _note(
    note: dict[str, Any], style: Style, text_lines: int = TEXT_LINES, remedy_lines: int = REMEDY_LINES
) -> list[str]:
    mark = MARKS.get(note["severity"], "- ")
    paint = {"error": style.red, "warning": style.yellow}.get(note["severity"], str)
    first, *rest = text.wrap(note["text"], style.width - 5, lines=text_lines) or [""]
    told = [f"  {paint(mark)} {first}", *(f"     {line}" for line in rest)]
    remedy = text.wrap(note["remedy"], style.width - 8, lines=remedy_lines)
    return told + [f"     {'>' if index == 0 else ' '} {line}" for index, line in enumerate(remedy)]
