"""Lays out the report for a terminal: at most 40 lines of plain text and the worst note. From record to text.

New sections are added to `SECTIONS`; that of the nodes is in `nodes`.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timezone

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hpcstage.record.parts.checkpoints import CheckpointsPart
from hpcstage.record.schema import Contention, Note, Percentiles, Period, Record, Severity
from hpcstage.record.verdict import untold
from hpcstage.report import figures
from hpcstage.report.canvas import Canvas, Sparkline, Wrapped, cleaned, grid, indented, line, section
from hpcstage.report.figures import UNKNOWN, count, percent, rate, seconds, short_name, size
from hpcstage.report.terminal import nodes
from hpcstage.units import format_number

REASON_NAMES = {
    "unknown": "not in the scan", "later": "waiting would take longer", "full": "no room locally",
    "failed": "copy failed", "void": "written to", "scanning": "scan not done", "timeout": "no answer",
    "no_daemon": "no daemon", "settled": "staging was over", "local_error": "local error",
    "large": "large", "mode_direct": "mode direct", "unstated": "reason not known",
}  # fmt: skip
MODE_LINES = 3
"""The lines for why another mode was followed; with several nodes one, as the table of nodes needs the others."""
MOST_PERIODS = 2


def header(record: Record) -> RenderableType:
    """Names the run and its command, where it ran, and how it ended."""
    run = record.run
    title = Table.grid(expand=True, padding=(0, 2, 0, 0))
    title.add_column(ratio=1)
    title.add_column(no_wrap=True)
    title.add_row(line(f"hpcstage report: {run.id}"), f"mode {figures.mode(run)}, {figures.ending(run)}", style="bold")
    rows: list[tuple[str, RenderableType]] = [
        ("command", shlex.join(run.command) or UNKNOWN),
        ("where", _where(record)),
    ]
    is_named = record.names_dataset or not record.keeps_directories
    if run.mode and run.mode_why and run.mode_asked != run.mode and is_named:
        why = f"{run.mode}, asked for {run.mode_asked}: {run.mode_why}"
        rows.append(("mode", Wrapped(why, 1 if record.group else MODE_LINES)))
    if staged := _staged(record):
        rows.append(("staged", staged))
    rows += zip(("order",) if record.group else ("order", ""), order(record), strict=False)
    if not record.complete and run.state not in ("running", "unclear", "aside", "not started"):
        rows.append(("INCOMPLETE", "some figures are missing; see the notes"))
    return Group(title, grid("lw", rows))


VERDICT_LINES = 5


def verdict(record: Record) -> RenderableType:
    """Says what the run was worth, why, and what to do next."""
    sentences = [Wrapped(sentence, VERDICT_LINES) for sentence in figures.verdict(record)]
    return section("Verdict", *sentences) if sentences else Group()


def _where(record: Record) -> str:
    run = record.run
    parts = [run.host if record.node_count == 1 else f"{record.node_count} nodes"]
    if run.job_id:
        parts.append(f"{run.scheduler} job {run.job_id}")
    parts.append(f"started {datetime.fromtimestamp(run.started_unix_s, timezone.utc):%Y-%m-%d %H:%M:%S} UTC")
    if run.was_watched:
        parts.append(f"wall {seconds(record.time_split.wall_s)}")
    return ", ".join(parts)


def _staged(record: Record) -> str:
    datasets = record.datasets
    if record.run.mode == "direct" or not datasets or not record.run.was_watched:
        return ""
    files = record.files
    took = [node.staged_s for node in record.nodes if node.staged_s is not None]
    ended = f", done at {clock(max(took))}" if took and len(took) == len(record.nodes) else ""
    provenance = record.order.provenance
    told = f", order: {provenance}" if provenance and not record.order.announcements else ""
    if record.group:
        return f"{figures.held(record.nodes, files)}{ended}{told}"
    if files is None:
        return "nothing: the files of the datasets were not known"
    got_files = f"{count(sum(dataset.staged_files for dataset in datasets))} of {count(files)} files"
    got_bytes = size(sum(dataset.staged_bytes for dataset in datasets))
    return f"{got_files}, {got_bytes} of {size(record.size_bytes)}{ended}{told}"


def order(record: Record) -> list[str]:
    """Says what samplers announced, and how far ahead of the program the copies were."""
    part = record.order
    if not part.announcements:
        return []
    line, lead = f"{part.provenance}, announced while copying", part.lead
    if lead is None or record.run.mode == "direct":
        return [line]
    behind_s = "" if lead.median_s is None else f" ({seconds(lead.median_s)})"
    ahead = f"{count(lead.median_files)} files{behind_s} ahead of the program at the median"
    return [line, f"{ahead}, {count(lead.least_files)} at the least"]


def meters(record: Record) -> RenderableType:
    """Shows the share served from local copies, the share of waits for data, and the use of the local disk."""
    used = [(node.used_bytes or 0, room) for node in record.nodes if (room := node.budget_bytes)]
    fullest = max(used, key=lambda pair: pair[0] / pair[1], default=None)
    disk = fullest and fullest[0] / fullest[1]
    rows = (
        ("from the local copy", record.local_share, served_of(record)),
        ("waited for data", figures.wait_share(record.time_split), "of the wall time"),
        ("local disk used", disk, f"of {size(fullest[1])}" if fullest else ""),
    )
    return grid("lwrl", [(name, _bar(share), percent(share), after) for name, share, after in rows if share])


def _bar(share: float) -> RenderableType:
    return ProgressBar(1.0, share, complete_style="cyan", finished_style="cyan")


def served_of(record: Record) -> str:
    """Says what `local_share` is a share of."""
    if where := figures.reported(record):
        return where
    return f"of Python's {record.local_measure}"


def time(record: Record) -> RenderableType:
    """Shows where the time went."""
    split = record.time_split
    cells = [
        (name, seconds(value), percent(value / split.wall_s) if split.wall_s else "")
        for name, value in figures.times(split)
    ]
    cells += [(figures.HIDDEN, seconds(split.hidden_s), "")] if split.hidden_s else []
    cells += [("", "", "")] * (len(cells) % 2)
    slowest = ""
    if record.slowest is not None:
        slowest = f" (mean of the processes; longest waits on {short_name(record.slowest.host)})"
    rows = [(*left, *right) for left, right in zip(cells[::2], cells[1::2], strict=True)]
    return section(f"Time{slowest}", grid("lrrlrr", rows, gap=1), *(f"({one})" for one in split.unmeasured[:1]))


def origin(record: Record) -> RenderableType:
    """Shows opens and bytes by where they were served."""
    cells = [
        (f"  {name}", "" if opens is None else count(opens), "" if amount is None else size(amount))
        for name, opens, amount in figures.origins(record)
    ]
    return grid("lrr", cells, ("Origin", "opens", "bytes")) if cells else Group()


def coverage(record: Record) -> RenderableType:
    """Says how many opens below the datasets were served from local copies, and why the others were not."""
    part, lines = record.coverage, []
    if part.opens:
        share = f"{count(part.swapped)} served from the local copy ({percent(part.share)})" if part.swapped else ""
        lines.append(", ".join(filter(None, (f"{format_number(part.opens, 'open')} by Python", share))))
        if part.reasons and (part.swapped or 0) < part.opens:
            lines.append("from the source: " + _reasons(part.reasons))
    layers = ", ".join(f"{count(number)} {name}" for name, number in part.layers.items())
    attached, missed = part.processes_attached, part.processes_missed
    seen = [f"{format_number(attached, 'process', 'processes')} reached ({layers})"] if attached else []
    seen += [f"{format_number(missed, 'Python process', 'Python processes')} not reached"] if missed else []
    lines += [", ".join(seen)] if seen else []
    return section("Coverage", *lines) if lines else Group()


def _reasons(reasons: Mapping[str, int]) -> str:
    given = sorted(((number, name) for name, number in reasons.items() if number), reverse=True)
    return ", ".join(f"{number:,} {REASON_NAMES.get(name, name)}" for number, name in given[:4])


def source(record: Record) -> RenderableType:
    """Shows latency and bandwidth of the source, its bandwidth over time, and contention."""
    part, values = record.contention, record.series.source_bytes_per_s
    lines: list[RenderableType] = []
    if part.best_bytes_per_s is not None:
        lines.append(f"best {rate(part.best_bytes_per_s)}, typical {rate(part.typical_bytes_per_s)}")
    if told := ", ".join(filter(None, (latency(*found) for found in part.latency_ms.items()))):
        lines.append(f"p50/p95/p99: {told}")
    if any(values):
        lines.append(grid("lwl", [("over time", Sparkline(values), rate(max(values)))]))
    lines += _periods(part)
    return section("Source", *lines) if lines else Group()


def latency(name: str, values: Percentiles) -> str:
    """Says how long operations of a kind took at the source; empty where none was measured."""
    if values.p50 is None:
        return ""
    return f"{name} {'/'.join(seconds((value or 0) / 1000) for value in (values.p50, values.p95, values.p99))}"


def _periods(part: Contention) -> list[str]:
    """Names the periods that cost most, of the source and of single nodes, and says how many there are besides."""
    if part.best_bytes_per_s is None:
        return []
    lines = [_period(one) for one in sorted(part.periods, key=lambda one: -one.cost_s)[:MOST_PERIODS]]
    if rest := len(part.periods) - len(lines):
        lines[-1] += f" (and {rest} more)"
    if part.verdict == "unknown":
        return lines or ["contention: cannot tell (seen for too short a time, or it varies too much)"]
    return lines or ["no contention: never well below its own best"]


def _period(one: Period) -> str:
    when = f"{clock(one.start_s)} to {clock(one.end_s)}: {percent(one.loss)}"
    if one.host is not None:
        return f"{short_name(one.host)} alone {when} behind the others"
    at_once = f", on {one.nodes} of {one.nodes_observed} nodes at once" if one.nodes_observed > 1 else ""
    return f"contention {when} below its best{at_once}"


def clock(value_s: float) -> str:
    """Formats a time of the run."""
    if value_s < 600:
        return f"{value_s:.1f} s"
    return f"{int(value_s) // 3600}:{int(value_s) % 3600 // 60:02d}:{int(value_s) % 60:02d}"


_MOST_NODES_SHOWN = 5


def outputs(record: Record) -> RenderableType:
    """Says what became of the command's output files."""
    part = record.drains.get("out")
    if part is None:
        return Group()
    if part.local_dir is None:
        return section(f"Outputs: the command wrote to {part.directory} itself ({part.why})")
    took = "" if part.took_s is None else f", done {seconds(part.took_s)} after the command"
    left = f", {format_number(part.undrained_count, 'name')} NOT COPIED" if part.undrained_count else ""
    said = f"Outputs: {format_number(part.files, 'file')}, {size(part.size_bytes)}{took}{left}"
    if record.group is None:
        return section(said, Wrapped(f"to {part.directory}", 2))
    missing = list(part.undrained.items())[:_MOST_NODES_SHOWN]
    where = ", ".join(f"{host} ({format_number(many, 'name')})" for host, many in missing)
    where = where and f"; not copied: {where}"
    return section(said, Wrapped(f"by {len(record.nodes)} nodes{where}; to {part.directory}", 3))


def checkpoints(record: Record) -> RenderableType:
    """Says what was saved of the command's checkpoints, how, what is protected against what, and what was drained."""
    part, drain = record.checkpoints, record.drains.get("checkpoint")
    if part is None or drain is None:
        return Group()
    if drain.local_dir is None:
        held_up = "" if part.standstill is None else f"; training stood still {_stood_still(part)}"
        return section(f"Checkpoints: the command wrote to {drain.directory} itself ({drain.why}){held_up}")
    rows: list[tuple[str, RenderableType]] = []
    if part.restored:
        rows.append(("at the start", Wrapped(f"{part.restored}; the command waited {seconds(part.restored_s)}", 2)))
    if part.saved:
        last = part.saved[-1]
        kinds = ", ".join(f"{many:,} {kind}" for kind, many in Counter(row.kind for row in part.saved).items())
        written, state = sum(row.written_bytes for row in part.saved), sum(row.state_bytes for row in part.saved)
        text = f"{part.saved_count:,} ({kinds}): {size(written)} of {size(state)}"
        rows.append(("saved", Wrapped(f"{text} in {seconds(part.saving_s)}, beside the command", 2)))
        coded = f"; parities {last.protected}, in {seconds(last.encode_s)}" if last.encode_s else ""
        rows.append((f"the last, {last.number}", Wrapped(f"{last.kind}: {last.why}{coded}", 2)))
    rows.append(("stood still", Wrapped(_stood_still(part), 2)))
    left = f", {format_number(drain.undrained_count, 'name')} NOT COPIED" if drain.undrained_count else ""
    took = "" if drain.took_s is None else f", done {seconds(drain.took_s)} after the command"
    rows.append(("copied", Wrapped(f"{size(drain.size_bytes)}{took}{left}, to {drain.directory}", 2)))
    rows.append(("protected", Wrapped(part.protection, 3)))
    if part.lost:
        rows.append(("lost", Wrapped(f"{', '.join(part.lost)}, while the command ran", 2)))
    rows += [("not used", Wrapped(line, 2)) for line in part.refused[-3:]]
    return section("Checkpoints", grid("lw", rows))


def _stood_still(part: CheckpointsPart) -> str:
    """Says how long saves held training up."""
    if part.standstill is None:
        return "not measured: no save came through hpcstage.torch"
    return f"{seconds(part.standstill.seconds)} in {format_number(part.standstill.saves, 'save')}"


_MOST_CHANGES_SHOWN = 12


def elastic(record: Record) -> RenderableType:
    """Says who trained when, why that changed, and what each change cost."""
    part = record.elastic
    if part is None:
        return Group()
    rows: list[tuple[str, RenderableType]] = []
    for row in part.memberships[-_MOST_CHANGES_SHOWN:]:
        changes = [
            f"{word} {', '.join(names)}" for word, names in (("lost", row.lost), ("joined", row.joined)) if names
        ]
        why = "; ".join(changes) or "processes ended"
        cost = f", noticed after {seconds(row.silent_s)} of silence" if row.lost else ""
        cost += f", agreed {seconds(row.waited_s)} later" if row.kind != "start" else ""
        cost += "" if row.state_s is None else f", state back after {seconds(row.state_s)}"
        cost += "" if row.first_step_s is None else f", first step after {seconds(row.first_step_s)}"
        rows.append((clock(max(0.0, row.at_s)), Wrapped(f"{len(row.hosts)} hosts: {why}{cost}", 2)))
    if part.end:
        rows.append(("end", Wrapped(part.end, 2)))
    return section(f"Elastic: {format_number(part.generations, 'membership')}", grid("lw", rows))


SECTIONS = (verdict, header, meters, time, origin, coverage, source, outputs, checkpoints, elastic)
"""The sections in their order; those of the nodes come after the meters, and the notes at the end."""
WITHOUT_DATASET = (verdict, header, outputs, checkpoints, elastic)
"""Those of a run that has no dataset: the others would have nothing to say."""


# ---- the whole ----

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
    """Returns as many notes as fit into `left` lines, worst first, each with its remedy; the worst one in any case."""
    lines: list[str] = []
    shown = 0
    left_to_tell = untold(record)
    for note in left_to_tell[:NOTES]:
        block = canvas.lines(_note(note))
        if not lines and 1 + len(block) > left:
            block = canvas.lines(_note(note, 1, 1))
        if lines and 1 + len(lines) + len(block) > left:
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
