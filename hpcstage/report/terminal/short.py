"""Summarises a run in a few lines for stderr at its end. From record to lines."""

from __future__ import annotations

from typing import Any

from hpcstage.report.terminal import text
from hpcstage.report.terminal.nodes import brief
from hpcstage.report.terminal.savings import saved
from hpcstage.report.terminal.sections import local_measure, local_share, unseen

WIDTH = 110
NOTE_WIDTH = 400
"""Notes may be this wide, as they end with what to do."""
LINES = 5
NOTES = 2
WORTH_SAYING = ("error", "warning")


def short(record: dict[str, Any]) -> list[str]:
    """Returns at most five lines: what was served locally, the nodes, the time, the source, the savings, and notes."""
    notes = [_note(note) for note in record["notes"] if note["severity"] in WORTH_SAYING][:NOTES]
    facts = [_served(record), brief(record), _time(record["time_split"]), _source(record), _saved(record)]
    told = [fact for fact in facts if fact][: LINES - len(notes)]
    return [*(text.clip(line, WIDTH) for line in told), *(text.clip(line, NOTE_WIDTH) for line in notes)]


def _served(record: dict[str, Any]) -> str:
    coverage, run = record["coverage"], record["run"]
    if not coverage["opens"]:
        return f"{run['mode'] or run['mode_asked']}: the command opened no file under --data, as far as hpcstage saw"
    share, measure = text.percent(local_share(record)), local_measure(record)
    swapped = f"{text.count(coverage['swapped'])} of {text.count(coverage['opens'])} opens swapped"
    group = record.get("group")
    where = f" on {group['reported']} of {group['nodes']} nodes" if group and group["reported"] < group["nodes"] else ""
    if not (lost := unseen(record)):
        return f"{run['mode']}: {share} of {measure} served locally{where}, {swapped}"
    least = "at least " if measure == "bytes" else ""
    return f"{run['mode']}: {least}{share} of {measure} served locally{where}; not seen: up to {text.size(lost)}"


def _time(split: dict[str, Any]) -> str:
    if split["wall_s"] is None:
        return ""
    if split["wait_source_s"] is None:
        return f"wall {text.seconds(split['wall_s'])}, time spent waiting unknown"
    return (
        f"wall {text.seconds(split['wall_s'])}: compute {text.seconds(split['compute_s'])}, waiting for the source "
        f"{text.seconds(split['wait_source_s'])}, for local {text.seconds(split['wait_local_s'])}, "
        f"staging hidden {text.seconds(split['hidden_s'])}"
    )


def _source(record: dict[str, Any]) -> str:
    part, totals = record["contention"], record["totals"]
    read = f"source: {_size(totals['source_bytes'])} read"
    if part["best_bytes_per_s"] is None:
        return read
    levels = f", best {text.rate(part['best_bytes_per_s'])}, typical {text.rate(part['typical_bytes_per_s'])}"
    slow_s = sum(p["end_s"] - p["start_s"] for p in part["periods"])
    return read + levels + (f", contention for {text.seconds(slow_s)}" if slow_s else "")


def _size(value: float | None) -> str:
    return "unknown amount" if value is None else text.size(value)


def _saved(record: dict[str, Any]) -> str:
    known = saved(record["savings"])
    return f"saved (estimate): {known}" if known else ""


def _note(note: dict[str, Any]) -> str:
    return (
        f"{note['severity']}: {note['text']} ({note['remedy']})"
        if note["remedy"]
        else f"{note['severity']}: {note['text']}"
    )
