"""Summarises a run in a few lines for stderr at its end. From record to lines; it does not import rich."""

from __future__ import annotations

from hpcstage.record.parts.roster import Presence
from hpcstage.record.schema import Note, Record, Severity
from hpcstage.report import figures
from hpcstage.units import format_number

WIDTH = 110
NOTE_WIDTH = 400
"""Notes may be this wide, as they end with what to do."""
LINES = 5
NOTES = 2


def short(record: Record) -> list[str]:
    """Returns at most five lines: what was served locally, the output files, the checkpoints, the nodes, the time, the
    source, the headroom, and notes."""
    notes = [_note(note) for note in record.notes if note.severity is not Severity.INFO][:NOTES]
    facts = [_served(record), _outputs(record), _checkpoints(record), brief(record), _time(record)]
    if record.names_dataset:
        split = record.time_split
        facts += [_source(record), "" if split.headroom_s is None else figures.headroom(split)]
    told = [fact for fact in facts if fact][: LINES - len(notes)]
    return [*(figures.clip(line, WIDTH) for line in told), *(figures.clip(line, NOTE_WIDTH) for line in notes)]


def _served(record: Record) -> str:
    mode = figures.mode(record.run)
    if all(node.state is Presence.MISSING for node in record.nodes):
        return f"{mode}: no node reported, so what was served locally is not known"
    if not record.names_dataset:
        return "" if record.keeps_directories else f"{mode}: no dataset is named"
    if not record.coverage.opens and any(node.state is Presence.DIED for node in record.nodes):
        return f"{mode}: no file under --data was opened before a daemon died; what came later is not known"
    if not record.coverage.opens:
        return f"{mode}: the command opened no file under --data, as far as hpcstage saw"
    where = figures.reported(record.group)
    share = figures.percent(figures.local_share(record))
    served = f"{share} of {figures.local_measure(record)} served locally{where and f' {where}'}"
    opens = f"{figures.count(record.coverage.swapped)} of {figures.count(record.coverage.opens)} opens swapped"
    return f"{mode}: {served}, {opens}"


def _outputs(record: Record) -> str:
    """Says what was copied to the directory of `--out`; empty where nothing had to be."""
    part = record.outputs
    if part is None or part.local_dir is None:
        return ""
    return (
        f"outputs: {format_number(part.files, 'copy', 'copies')}, {figures.size(part.size_bytes)}, in {part.directory}"
    )


def _checkpoints(record: Record) -> str:
    """Says what was saved of the checkpoints, and what of it was copied; empty where they were not kept."""
    part = record.checkpoints
    if part is None or part.drain.local_dir is None:
        return ""
    saved = format_number(part.saved_count, "state")
    return f"checkpoints: {saved} saved, {figures.size(part.drain.size_bytes)} copied, in {part.drain.directory}"


def brief(record: Record) -> str:
    """Describes the nodes in one line; empty with one node."""
    group = record.group
    if group is None:
        return ""
    placement = "" if record.run.mode == "direct" else f", {group.placement or 'no placement'}"
    peers = record.totals.peer_bytes
    said = [f"{group.nodes} nodes{placement}", figures.source_times(record, group)]
    said.append("" if peers is None else f"{figures.size(peers)} between nodes")
    slow = sum(bool(row.slow) for row in record.nodes)
    for count, what in (
        (record.number(Presence.MISSING), "never came up"),
        (record.number(Presence.DIED), "died"),
        (record.number(Presence.SILENT), "silent"),
        (slow, "slow"),
    ):
        said.append(f"{count} {what}" if count else "")
    return ", ".join(filter(None, said))


def _time(record: Record) -> str:
    split = record.time_split
    if split.wall_s is None:
        return ""
    if not record.names_dataset:
        return f"wall {figures.seconds(split.wall_s)}"
    if split.wait_source_s is None:
        return f"wall {figures.seconds(split.wall_s)}, time spent waiting unknown"
    return (
        f"wall {figures.seconds(split.wall_s)}: compute {figures.seconds(split.compute_s)}, waiting for the source "
        f"{figures.seconds(split.wait_source_s)}, for local {figures.seconds(split.wait_local_s)}, "
        f"staging hidden {figures.seconds(split.hidden_s)}"
    )


def _source(record: Record) -> str:
    part, totals = record.contention, record.totals
    read = f"source: {'unknown amount' if totals.source_bytes is None else figures.size(totals.source_bytes)} read"
    if totals.source_bytes is None and totals.copied_bytes:
        read = f"source: {figures.size(totals.copied_bytes)} copied, what the program read there is unknown"
    if part.best_bytes_per_s is None:
        return read
    levels = f", best {figures.rate(part.best_bytes_per_s)}, typical {figures.rate(part.typical_bytes_per_s)}"
    slow_s = sum(period.end_s - period.start_s for period in part.periods)
    return read + levels + (f", contention for {figures.seconds(slow_s)}" if slow_s else "")


def _note(note: Note) -> str:
    return f"{note.severity.value}: {note.text}" + (f" ({note.remedy})" if note.remedy else "")
