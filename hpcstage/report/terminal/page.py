"""Lays out the report for a terminal: at most 40 lines of plain text. From record to text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from hpcstage.record.index import Earlier
from hpcstage.record.schema import Note, Record, Severity
from hpcstage.report import figures
from hpcstage.report.canvas import Canvas, Wrapped, cleaned, grid, indented, section
from hpcstage.report.explained import explained
from hpcstage.report.terminal import nodes
from hpcstage.report.terminal.sections import SECTIONS, WITHOUT_DATASET, header, time

LINES = 40
NOTES = 5
LEAST_NOTES = 8
"""The lines that one note takes at most, with heading and remedy."""
TEXT_LINES, REMEDY_LINES = 4, 3
"""The most lines of a note: hpcstage's own texts are shorter, those with the user's names in them may be cut."""
UNWATCHED = ("aside", "not started")
"""States without figures: the command did not run, or ran without hpcstage."""
MARKS = {Severity.ERROR: Text("!!", "red"), Severity.WARNING: Text("! ", "yellow"), Severity.INFO: Text("- ")}


def render(record: Record, canvas: Canvas, earlier: Sequence[Earlier] = (), *, every_node: bool = False) -> str:
    """Returns the whole report, or the lines of all nodes. `earlier` are the command's earlier runs."""
    record = cleaned(record, unicode=canvas.unicode)
    if every_node:
        return "\n".join(nodes.every(record, canvas))
    if record.run.state in UNWATCHED:
        return "\n\n".join("\n".join(block) for block in (canvas.lines(header(record)), notes(record, canvas, LINES)))
    blocks = [canvas.lines(draw(record)) for draw in (SECTIONS if record.names_dataset else WITHOUT_DATASET)]
    if earlier and record.names_dataset:
        told = cleaned(figures.earlier(earlier), unicode=canvas.unicode)
        blocks[SECTIONS.index(time)] += canvas.lines(indented(told))
    left = LINES - sum(map(len, blocks)) - (LEAST_NOTES if record.notes else 0)
    blocks.insert(2, nodes.nodes(record, canvas, max(nodes.LEAST, min(nodes.LINES, left))))
    blocks.append(notes(record, canvas, LINES - sum(map(len, blocks))))
    blocks = [block for block in blocks if block]
    if sum(map(len, blocks)) < LINES:
        blocks.append([cleaned(explained(), unicode=canvas.unicode)])  # a path that is cut or wrapped leads nowhere
    airy = sum(map(len, blocks)) + len(blocks) - 1 <= LINES
    return ("\n\n" if airy else "\n").join("\n".join(block) for block in blocks)


def notes(record: Record, canvas: Canvas, left: int) -> list[str]:
    """Returns as many notes as fit into `left` lines, worst first, each with its remedy."""
    lines: list[str] = []
    shown = 0
    for note in record.notes[:NOTES]:
        block = canvas.lines(_note(note))
        if not lines and 1 + len(block) > left:
            block = canvas.lines(_note(note, 1, 1))
        if 1 + len(lines) + len(block) > left:
            break
        lines += block
        shown += 1
    more = f" ({len(record.notes) - shown} more with --json)" if shown < len(record.notes) else ""
    return [*canvas.lines(section(f"Notes{more}")), *lines] if record.notes else []


def _note(note: Note, text_lines: int = TEXT_LINES, remedy_lines: int = REMEDY_LINES) -> RenderableType:
    rows: list[tuple[RenderableType, RenderableType]] = [(MARKS[note.severity], Wrapped(note.text, text_lines))]
    if note.remedy:
        rows.append(("", grid("lw", [(">", Wrapped(note.remedy, remedy_lines))], gap=1)))
    return indented(grid("lw", rows, gap=1))
