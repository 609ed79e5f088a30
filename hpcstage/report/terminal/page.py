"""Lays out the report for a terminal: at most 40 lines of plain text. From record to text."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from hpcstage.record.schema import Note, Record, Severity
from hpcstage.record.verdict import untold
from hpcstage.report.canvas import Canvas, Wrapped, cleaned, grid, indented, section
from hpcstage.report.terminal import nodes
from hpcstage.report.terminal.sections import SECTIONS, WITHOUT_DATASET, header, verdict

LINES = 40
NOTES = 5
LEAST_NOTES = 8
"""The lines that one note takes at most, with heading and remedy."""
TEXT_LINES, REMEDY_LINES = 4, 3
"""The most lines of a note: hpcstage's own texts are shorter, those with the user's names in them may be cut."""
EXPLAINED = "Every word of it: hpcstage explain"
UNWATCHED = ("aside", "not started")
"""States without figures: the command did not run, or ran without hpcstage."""
MARKS = {Severity.ERROR: Text("!!", "red"), Severity.WARNING: Text("! ", "yellow"), Severity.INFO: Text("- ")}


def render(record: Record, canvas: Canvas, *, every_node: bool = False) -> str:
    """Returns the whole report, or the lines of all nodes."""
    record = cleaned(record, unicode=canvas.unicode)
    if every_node:
        return "\n".join(nodes.every(record, canvas))
    if record.run.state in UNWATCHED:
        blocks = [canvas.lines(verdict(record)), canvas.lines(header(record))]
        blocks.append(notes(record, canvas, LINES - sum(map(len, blocks))))
        return "\n\n".join("\n".join(block) for block in blocks if block)
    blocks = [canvas.lines(draw(record)) for draw in (SECTIONS if record.names_dataset else WITHOUT_DATASET)]
    left = LINES - sum(map(len, blocks)) - (LEAST_NOTES if untold(record) else 0)
    blocks.insert(3, nodes.nodes(record, canvas, max(nodes.LEAST, min(nodes.LINES, left))))
    blocks.append(notes(record, canvas, LINES - sum(map(len, blocks))))
    blocks = [block for block in blocks if block]
    if sum(map(len, blocks)) < LINES:
        blocks.append([EXPLAINED])
    airy = sum(map(len, blocks)) + len(blocks) - 1 <= LINES
    return ("\n\n" if airy else "\n").join("\n".join(block) for block in blocks)


def notes(record: Record, canvas: Canvas, left: int) -> list[str]:
    """Returns as many notes as fit into `left` lines, worst first, each with its remedy."""
    lines: list[str] = []
    shown = 0
    left_to_tell = untold(record)
    for note in left_to_tell[:NOTES]:
        block = canvas.lines(_note(note))
        if not lines and 1 + len(block) > left:
            block = canvas.lines(_note(note, 1, 1))
        if 1 + len(lines) + len(block) > left:
            break
        lines += block
        shown += 1
    more = f" ({len(left_to_tell) - shown} more with --json)" if shown < len(left_to_tell) else ""
    return [*canvas.lines(section(f"Notes{more}")), *lines] if left_to_tell else []


def _note(note: Note, text_lines: int = TEXT_LINES, remedy_lines: int = REMEDY_LINES) -> RenderableType:
    rows: list[tuple[RenderableType, RenderableType]] = [(MARKS[note.severity], Wrapped(note.text, text_lines))]
    if note.remedy:
        rows.append(("", grid("lw", [(">", Wrapped(note.remedy, remedy_lines))], gap=1)))
    return indented(grid("lw", rows, gap=1))
