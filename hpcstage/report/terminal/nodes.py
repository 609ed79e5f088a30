"""Prints the nodes of a job side by side, in a few lines however many there are. From record to lines.

Failed nodes come first, then slow ones, each with the reason; the others are in one line where they are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from hpcstage.report.terminal import text
from hpcstage.report.terminal.text import Style

LINES = 11
LEAST = 5
NAME = 20
COLUMN = 12
NARROW = 10
FIGURES = ("source_bytes", "peer_bytes", "local_bytes")
FAILED = {"missing": "never came up", "died": "died"}
SINGLY = 2
"""Up to this many failed nodes get a line each."""

Row = dict[str, Any]


def nodes(record: Row, style: Style, lines: int = LINES) -> list[str]:
    """Returns the section; empty where the job has one node."""
    group = record.get("group")
    if not group:
        return []
    rows = _without_domain(record)["nodes"]
    failed, slow, well = _sorted(rows)
    found = [_figures("all nodes", _all(record, rows), style), *_failed(failed, group, style)]
    room = lines - 2 - len(found) - 1
    shown = slow[: max(0, room // 2)]
    for row in shown:
        found += [_figures(row["host"], row, style), _line(f"    {'; '.join(row['slow'])}", style)]
    found += _rest([*slow[len(shown) :], *well], lines - 2 - len(found), style)
    heads = "".join(f"{name:>{COLUMN}}" for name in ("waited", "source", "from peers", "local"))
    return [style.bold(f"{'Nodes':<{NAME}}{heads}"), *found, _line(f"  {_together(record, slow)}", style)]


def every(record: Row, style: Style) -> list[str]:
    """Returns a line for each node without a limit: failed ones first, then slow ones, both with the reason."""
    if not record.get("group"):
        return ["this job had one node: see `hpcstage report`"]
    failed, slow, well = _sorted(_without_domain(record)["nodes"])
    columns = (*FIGURES[:2], "sent_bytes", FIGURES[2])
    heads = "".join(f"{name:>{NARROW}}" for name in ("waited", "source", "received", "sent", "local", "files"))
    lines = [style.bold(f"{'Nodes':<{NAME}}{heads}")]
    for row in (*failed, *slow, *well):
        cells = [text.seconds(_waited(row)), *(text.size(row[key]) for key in columns), text.count(row["staged_files"])]
        lines.append(_cells(row["host"], cells, NARROW, style))
        if row["state"] in FAILED:
            lines.append(_failure("", FAILED[row["state"]], row["why"], style))
        elif row["slow"]:
            lines.append(_line(f"    {'; '.join(row['slow'])}", style))
    return [*lines, _line(f"  {_together(record, slow)}", style)]


def _sorted(rows: Sequence[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Returns the failed nodes, the slow ones by what they cost, and the others."""
    failed = [row for row in rows if row["state"] in FAILED]
    alive = [row for row in rows if row["state"] not in FAILED]
    return failed, sorted((row for row in alive if row["slow"]), key=_cost), [row for row in alive if not row["slow"]]


def _cost(row: Row) -> tuple[float, int]:
    return -(row["behind_s"] or 0.0), row["index"] or 0


def _all(record: Row, rows: Sequence[Row]) -> Row:
    """Returns the sums of bytes and the longest wait, as the job waits for its slowest node."""
    waits = [wait for row in rows if (wait := _waited(row)) is not None]
    return {**{name: record["totals"][name] for name in FIGURES}, "waited_s": max(waits, default=None), "longest": True}


def _waited(row: Row) -> float | None:
    if "waited_s" in row:
        value: float | None = row["waited_s"]
        return value
    if row["wait_source_s"] is None or row["wait_local_s"] is None:
        return None
    return float(row["wait_source_s"] + row["wait_local_s"])


def _figures(name: str, row: Row, style: Style) -> str:
    cells = [text.seconds(_waited(row)), *(text.size(row[key]) for key in FIGURES)]
    cells[0] = f"max {cells[0]}" if row.get("longest") and cells[0] != text.UNKNOWN else cells[0]
    return _cells(name, cells, COLUMN, style)


def _cells(name: str, cells: Sequence[str], width: int, style: Style) -> str:
    head = text.pad(f"  {_clipped(name)}", NAME)
    return _line(head + "".join(f"{'-' if cell == text.UNKNOWN else cell:>{width}}" for cell in cells), style)


def _line(line: str, style: Style) -> str:
    return text.clip(line, style.width)


def _clipped(name: str) -> str:
    """Returns the end of a long name, as names of nodes differ there."""
    name = text.clean(name)
    if text.display_width(name) <= NAME - 3:
        return name
    room = NAME - 6 if name.isascii() else (NAME - 6) // 2
    return "..." + name[-room:]


def _without_domain(record: Row) -> Row:
    """Removes the domain from the nodes' names where all have the same, such as `.cluster.example.org`."""
    domains = {row["host"].partition(".")[2] for row in record["nodes"]}
    if len(domains) != 1 or not (domain := domains.pop()):
        return record
    return {**record, "nodes": [{**row, "host": row["host"].removesuffix(f".{domain}")} for row in record["nodes"]]}


def _failed(rows: Sequence[Row], group: Row, style: Style) -> list[str]:
    if len(rows) <= SINGLY:
        return [_failure(_clipped(row["host"]), FAILED[row["state"]], row["why"], style) for row in rows]
    lines = []
    for state, what in FAILED.items():
        same = [row for row in rows if row["state"] == state]
        if same:
            names = ", ".join(_clipped(row["host"]) for row in same[:3]) + (", ..." if len(same) > 3 else "")
            lines.append(_failure(f"{len(same)} of {group['nodes']} nodes", f"{what} ({names})", same[0]["why"], style))
    return lines


def _failure(who: str, what: str, why: str | None, style: Style) -> str:
    """Returns the line of a failure. It is neither bold nor red, which would make columns hard to count."""
    return _line(f"  !! {who} {what}".replace("  !!  ", "  !! ") + (f": {why}" if why else ""), style)


def _rest(rows: Sequence[Row], room: int, style: Style) -> list[str]:
    """Returns a line for each node where that fits into `room` lines, else one line for all."""
    if not rows or room < 1:
        return []
    if len(rows) <= room:
        return [_figures(row["host"], row, style) for row in rows]
    middle = {name: _median([row[name] for row in rows]) for name in FIGURES}
    waited = _median([_waited(row) for row in rows])
    return [_figures(f"{len(rows)} others each", {**middle, "waited_s": waited}, style)]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _together(record: Row, slow: Sequence[Row]) -> str:
    """Says the placement and why, how often the source was read, and how many nodes were outside of the group."""
    group = record["group"]
    said = ["each node reads the source"]
    if record["run"]["mode"] != "direct":
        why = f" ({group['placement_why']})" if group["placement_why"] else ""
        said = [f"{group['placement'] or 'no placement'}{why}"]
    if slow:
        said.append(f"{len(slow)} slow")
    if group["source_times"] is not None:
        said.append(f"source read {_times(group)}")
    if group["generations"] > 1:
        said.append(f"group started {group['generations']} times")
    if group["alone_count"] and group["placement"] != "private" and record["run"]["mode"] != "direct":
        said.append(f"{group['alone_count']} outside of the group: {group['why'] or 'no reason known'}")
    return "; ".join(said)


def _times(group: Row) -> str:
    """Says how often the source was read by the nodes that reported; others may have read it, too."""
    value = group["source_times"]
    often = "once" if f"{value:.3g}" == "1" else f"{value:.3g} times"
    whole = group["reported"] >= group["nodes"] and not group["died_count"]
    return often if whole else f"at least {often}"


def held(nodes: Sequence[Row], files: float | None) -> str:
    """Says how many files each node holds. As several nodes may hold the same files, a sum would say less."""
    found = [row["staged_files"] for row in nodes if row["staged_files"] is not None]
    if not found:
        return text.UNKNOWN
    least, most = text.count(min(found)), text.count(max(found))
    number = least if least == most else f"{least} to {most}"
    return f"{len(found)} nodes with {number} of {text.count(files)} files{' each' if len(found) > 1 else ''}"


def brief(record: Row) -> str:
    """Describes the nodes in one line for the end of a run; empty with one node."""
    group = record.get("group")
    if not group:
        return ""
    times = group["source_times"]
    direct = record["run"]["mode"] == "direct"
    said = [f"{group['nodes']} nodes" if direct else f"{group['nodes']} nodes, {group['placement'] or 'no placement'}"]
    said += [] if times is None else [f"source read {_times(group)}"]
    peers = record["totals"]["peer_bytes"]
    said += [] if peers is None else [f"{text.size(peers)} between nodes"]
    slow = sum(bool(row["slow"]) for row in record["nodes"])
    for count, what in ((group["missing_count"], "never came up"), (group["died_count"], "died"), (slow, "slow")):
        said += [f"{count} {what}"] if count else []
    return ", ".join(said)
