"""Summarises a run in a few lines for stderr at its end. From record to lines; it does not import rich."""

from __future__ import annotations

from hpcstage.record.parts.roster import Presence
from hpcstage.record.schema import Record, Severity
from hpcstage.record.verdict import untold
from hpcstage.report import figures
from hpcstage.units import format_number

WIDTH = 110
SENTENCE_WIDTH = 400
"""The verdict and notes may be this wide, as they end with what to do."""
LINES = 3
"""The caller adds a line that names the whole report."""


def short(record: Record) -> list[str]:
    """Returns at most three lines: the verdict, and what matters most beside it."""
    verdict = record.verdict
    notes = [figures.note(note) for note in untold(record) if note.severity is not Severity.INFO]
    sentences = [verdict.text, verdict.compared] if verdict else []
    facts = [_kept(record), brief(record)]
    told = [
        *(figures.clip(sentence, SENTENCE_WIDTH) for sentence in sentences),
        *(figures.clip(note, SENTENCE_WIDTH) for note in notes),
        *(figures.clip(fact, WIDTH) for fact in facts),
    ]
    return [line for line in told if line][:LINES]


def _kept(record: Record) -> str:
    """Says what was copied of outputs and checkpoints; empty where nothing had to be."""
    said, outputs, drain = [], record.drains.get("out"), record.drains.get("checkpoint")
    if outputs is not None and outputs.local_dir is not None:
        files, size = format_number(outputs.files, "file"), figures.size(outputs.size_bytes)
        said.append(f"outputs: {files}, {size}, in {outputs.directory}")
    if record.checkpoints is not None and drain is not None and drain.local_dir is not None:
        saved = format_number(record.checkpoints.saved_count, "state")
        said.append(f"checkpoints: {saved} saved, {figures.size(drain.size_bytes)} copied, in {drain.directory}")
    return "; ".join(said)


def brief(record: Record) -> str:
    """Describes the nodes in one line; empty with one node."""
    group = record.group
    if group is None:
        return ""
    placement = "" if record.run.mode == "direct" else f", {group.placement or 'no placement'}"
    peers = record.totals.peer_bytes
    said = [f"{len(record.nodes)} nodes{placement}", figures.source_times(record)]
    said.append(f"{figures.size(peers)} between nodes" if peers else "")
    slow = sum(bool(row.slow) for row in record.nodes)
    for count, what in (
        (record.number(Presence.MISSING), "never came up"),
        (record.number(Presence.DIED), "died"),
        (record.number(Presence.SILENT), "silent"),
        (slow, "slow"),
    ):
        said.append(f"{count} {what}" if count else "")
    return ", ".join(filter(None, said))
