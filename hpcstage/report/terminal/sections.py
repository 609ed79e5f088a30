"""Prints the sections of the terminal report except for notes and nodes. New sections are added to `SECTIONS`."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from hpcstage.report.terminal import text
from hpcstage.report.terminal.nodes import held
from hpcstage.report.terminal.savings import savings
from hpcstage.report.terminal.text import Style

LABEL = 18
METER = 44
REASON_NAMES = {
    "unknown": "not in the scan", "later": "waiting would take longer", "full": "no room locally",
    "failed": "copy failed", "void": "written to", "scanning": "scan not done", "timeout": "no answer",
    "no_daemon": "no daemon", "settled": "staging had stopped", "local_error": "local error",
    "large": "large", "mode_direct": "mode direct", "unstated": "reason not known",
}  # fmt: skip
PERIODS = 3
MODE_LINES = 3
"""The lines for why another mode was followed; with several nodes one, as the table of nodes needs the others."""
UNSEEN = 0.02
"""Unseen bytes below this share of those seen are ignored: they do not change the local share."""
ENDINGS = {"running": "still running", "aside": "ran without hpcstage"}


def header(record: dict[str, Any], style: Style) -> list[str]:
    """Names the run and its command, where it ran, and how it ended."""
    run = record["run"]
    left = f"hpcstage report: {text.clip(run['id'], 38)}"
    right = f"mode {run['mode'] or run['mode_asked']}, {ending(run)}"
    gap = max(1, style.width - text.display_width(left) - len(right))
    lines = [text.clip(f"{left}{' ' * gap}{right}", style.width)]
    lines.append(_row("command", shlex.join(run["command"]) or text.UNKNOWN, style))
    lines.append(_row("where", _where(record), style))
    if run["mode_asked"] != run["mode"] and run["mode"]:
        why = f"{run['mode']}, asked for {run['mode_asked']}: {run['mode_why']}"
        folded = text.wrap(why, style.width - LABEL + 7, lines=1 if record.get("group") else MODE_LINES)
        lines += [_row("" if at else "mode", line, style) for at, line in enumerate(folded)]
    lines += [_row("staged", line, style) for line in _staged(record)]
    names = ("order",) if record.get("group") else ("order", "")
    lines += [_row(name, line, style) for name, line in zip(names, order(record), strict=False)]
    if not record["complete"] and run.get("state") not in ("running", "unclear", "aside", "not started"):
        lines.append(_row("INCOMPLETE", "some figures are missing; see the notes", style))
    return [style.bold(lines[0]), *lines[1:]]


def ending(run: dict[str, Any]) -> str:
    """Says how the command ended."""
    if (told := ENDINGS.get(run.get("state", ""))) is not None:
        return told
    if run["signal"] is not None:
        return f"killed by signal {run['signal']}"
    return "end not seen" if run["exit_code"] is None else f"exit code {run['exit_code']}"


def _staged(record: dict[str, Any]) -> list[str]:
    datasets = record["datasets"]
    if record["run"]["mode"] == "direct" or not datasets:
        return []
    files, size = _sum(datasets, "files"), _sum(datasets, "size_bytes")
    took = [node["staged_s"] for node in record["nodes"] if node["staged_s"] is not None]
    ended = f", done at {clock(max(took))}" if took and len(took) == len(record["nodes"]) else ""
    provenance = record["order"]["provenance"]
    told = f", order: {provenance}" if provenance and not record["order"].get("announcements") else ""
    if record.get("group"):
        return [f"{held(record['nodes'], files)}{ended}{told}"]
    got = f"{text.count(_sum(datasets, 'staged_files'))} of {text.count(files)} files"
    return [f"{got}, {text.size(_sum(datasets, 'staged_bytes'))} of {text.size(size)}{ended}{told}"]


def order(record: dict[str, Any]) -> list[str]:
    """Says what samplers announced, how well the program kept to it, and how far ahead of it the copies were."""
    part = record["order"]
    count = part.get("announcements")
    if not count:
        return []
    words = [str(part["provenance"]), f"{count:,} epoch{'s' * (count != 1)} announced"]
    if not part["followed"]:
        words[-1] += ", not followed"
    if part["kept_share"] is not None:
        words.append(f"{text.percent(part['kept_share'])} of opens as announced{_nearly(part)}")
    lead = part["lead"]
    if lead is None or record["run"]["mode"] == "direct":
        return [", ".join(words)]
    seconds = "" if lead["median_s"] is None else f" ({text.seconds(lead['median_s'])})"
    ahead = f"{text.count(lead['median_files'])} files{seconds} ahead of the program at the median"
    return [", ".join(words), f"{ahead}, {text.count(lead['least_files'])} at the least"]


def _nearly(part: dict[str, Any]) -> str:
    """Returns the share of opens near their announced place, where it differs, as threads read neighbours in any
    order."""
    near = part.get("near_share")
    told = None if near is None else text.percent(near)
    return "" if told in (None, text.percent(part["kept_share"])) else f" ({told} nearly so)"


def _sum(datasets: list[dict[str, Any]], key: str) -> float | None:
    values = [dataset[key] for dataset in datasets]
    return None if None in values else float(sum(values))


def _where(record: dict[str, Any]) -> str:
    run, environment = record["run"], record["environment"]
    nodes = environment["nodes"]
    parts = [run["host"] if len(nodes) <= 1 else f"{len(nodes)} nodes"]
    if environment["job_id"]:
        parts.append(f"{environment['scheduler']} job {environment['job_id']}")
    parts.append(f"started {run['started_utc'].replace('T', ' ').replace('+00:00', ' UTC')}")
    parts.append(f"wall {text.seconds(record['time_split']['wall_s'])}")
    return ", ".join(parts)


def _row(label: str, value: str, style: Style) -> str:
    return f"{label:<{LABEL - 7}}{text.clip(value, style.width - LABEL + 7)}"


def meters(record: dict[str, Any], style: Style) -> list[str]:
    """Shows the share served locally, the share of waits for data, and the use of the local disk."""
    split, budget = record["time_split"], _budget(record)
    waited = wait_share(split)
    disk = None if budget is None else budget[0] / budget[1]
    rows = [
        ("served locally", local_share(record), served_of(record)),
        ("waiting for data", waited, "of the wall time"),
        ("local disk used", disk, "" if budget is None else f"of {text.size(budget[1])}"),
    ]
    room = style.width - LABEL - METER - 2
    return [
        f"{name:<{LABEL}}{text.meter(share, METER)} {text.clip(after, room)}".rstrip() for name, share, after in rows
    ]


def local_measure(record: dict[str, Any]) -> str:
    """Returns `bytes` where reads were measured, else `opens`."""
    totals = record["totals"]
    known = totals["local_bytes"] is not None and totals["direct_bytes"] is not None
    return "bytes" if known and totals["local_bytes"] + totals["direct_bytes"] > 0 else "opens"


def local_share(record: dict[str, Any]) -> float | None:
    """Returns the share of what the program read that came from the local disk."""
    if local_measure(record) == "opens":
        share: float | None = record["coverage"]["share"]
        return share
    totals = record["totals"]
    return float(totals["local_bytes"] / (totals["local_bytes"] + totals["direct_bytes"] + unseen(record)))


def unseen(record: dict[str, Any]) -> int:
    """Returns how many bytes processes that hpcstage did not see read at most; 0 where that does not matter."""
    coverage, totals = record["coverage"], record["totals"]
    found = coverage.get("unseen_bytes") or 0
    seen = (totals["local_bytes"] or 0) + (totals["direct_bytes"] or 0)
    return found if found > UNSEEN * seen else 0


def served_of(record: dict[str, Any]) -> str:
    """Says what `local_share` is a share of."""
    measure = local_measure(record)
    group = record.get("group")
    if group and group["reported"] < group["nodes"]:
        return f"on {group['reported']} of {group['nodes']} nodes"
    if not unseen(record):
        return f"of {measure}"
    return "of bytes or more" if measure == "bytes" else "of opens seen"


def wait_share(split: dict[str, Any]) -> float | None:
    """Returns the share of the wall time in which the program waited for files."""
    if not split["wall_s"] or split["wait_source_s"] is None or split["wait_local_s"] is None:
        return None
    return float((split["wait_source_s"] + split["wait_local_s"]) / split["wall_s"])


def _budget(record: dict[str, Any]) -> tuple[float, float] | None:
    """Returns the used and the allowed bytes of the fullest node."""
    pairs = [(n["budget"].get("used_bytes"), n["budget"].get("size_bytes")) for n in record["nodes"]]
    known = [(float(used), float(allowed)) for used, allowed in pairs if used is not None and allowed]
    return max(known, key=lambda pair: pair[0] / pair[1]) if known else None


def time(record: dict[str, Any], style: Style) -> list[str]:
    """Shows the time split."""
    split = record["time_split"]
    left = [("compute", "compute_s"), ("preprocessing", "preprocess_s"), ("other", "other_s")]
    right = [("waiting for source", "wait_source_s"), ("waiting for local", "wait_local_s")]
    cells = [_time_cell(f"{name:<15}", split[key], split["wall_s"]) for name, key in left]
    others = [_time_cell(f"{name:<19}", split[key], split["wall_s"]) for name, key in right]
    others.append(f"{'staging hidden':<19}{text.seconds(split['hidden_s']):>12}  overlaps")
    lines = [f"  {one:<37}{other}".rstrip() for one, other in zip(cells, others, strict=True)]
    slowest = split.get("slowest")
    title = f"Time (mean of the processes; longest waits on {text.clip(slowest['host'], 30)})" if slowest else "Time"
    return [style.bold(title), *lines, *_unmeasured(split, style)]


def _time_cell(name: str, value: float | None, wall: float | None) -> str:
    share = "" if value is None or not wall else text.percent(value / wall)
    return f"{name}{text.seconds(value):>12}  {share:>6}".rstrip()


def _unmeasured(split: dict[str, Any], style: Style) -> list[str]:
    return [f"  ({text.clip(sentence, style.width - 4)})" for sentence in split["unmeasured"][:1]]


def origin(record: dict[str, Any], style: Style) -> list[str]:
    """Shows opens and bytes by where they were served."""
    totals, coverage = record["totals"], record["coverage"]
    ops = f"copied; {text.count(totals['source_ops'])} source ops in all"
    rows = [
        ("local disk", text.count(coverage["swapped"]), totals["local_bytes"], "read by the program"),
        ("source", text.count(totals["direct_opens"]), totals["direct_bytes"], "read by the program"),
        ("source", text.count(totals["copied_opens"]), totals["copied_bytes"], ops),
    ]
    if totals["peer_bytes"] is not None:
        files = f"{text.count(totals['peer_files'])} files from node to node"
        rows.append(("other nodes", "", totals["peer_bytes"], files))
    if unseen(record):
        rows.append(("not seen", "", unseen(record), "at most, by other processes"))
    lines = [_origin_row(*row, style) for row in rows]
    return [style.bold(f"{'Origin':<18}{'opens':>12}{'bytes':>14}"), *lines]


def _origin_row(name: str, opens: str, size: int | None, what: str, style: Style) -> str:
    line = f"  {name:<16}{opens:>12}{text.size(size):>14}   {what}"
    return text.clip(line, style.width)


def coverage(record: dict[str, Any], style: Style) -> list[str]:
    """Says how many opens below the datasets were swapped, and why the others were not."""
    part = record["coverage"]
    swapped = f"{text.count(part['opens'])} opens below the datasets, {text.count(part['swapped'])} swapped"
    share = f" ({text.percent(part['share'])})" if part["share"] is not None else ""
    layers = ", ".join(f"{layer['processes']} {name}" for name, layer in part["by_layer"].items())
    known = text.count(part["processes_attached"])
    attached = f"{known} {'process' if known == '1' else 'processes'} attached" + (f" ({layers})" if layers else "")
    lost = text.count(part["processes_missed"])
    missed = f"{lost} Python {'process' if lost == '1' else 'processes'} missed"
    lines = [swapped + share, f"{attached}, {missed}"]
    if part["opens"] and part["swapped"] < part["opens"]:
        lines.insert(1, "not swapped: " + _reasons(part["reasons"]))
    return [style.bold("Coverage"), *(f"  {text.clip(line, style.width - 2)}" for line in lines)]


def _reasons(reasons: dict[str, int]) -> str:
    given = sorted(((n, name) for name, n in reasons.items() if n), reverse=True)
    return ", ".join(f"{n:,} {REASON_NAMES.get(name, name)}" for n, name in given[:4])


def source(record: dict[str, Any], style: Style) -> list[str]:
    """Shows latency and bandwidth of the source, its bandwidth over time, and contention."""
    part = record["contention"]
    levels = f"  best {text.rate(part['best_bytes_per_s'])}, typical {text.rate(part['typical_bytes_per_s'])}"
    if part["best_bytes_per_s"] is None:
        levels = f"  bandwidth {text.UNKNOWN}: {part['method']}"
    lines = [levels, "  p50/p95/p99: " + ", ".join(_latency(name, part["latency_ms"]) for name in ("open", "read"))]
    lines += _over_time(record["series"], style) + _periods(part)
    return [style.bold("Source"), *(text.clip(line, style.width) for line in lines)]


def _latency(name: str, latency: dict[str, Any]) -> str:
    values = latency[name]
    if values["p50"] is None:
        return f"{name} {text.UNKNOWN}"
    unit, factor = ("ms", 1) if (values["p99"] or 0) >= 1 else ("us", 1000)
    return f"{name} " + "/".join(f"{(values[p] or 0) * factor:.3g}" for p in ("p50", "p95", "p99")) + f" {unit}"


def _over_time(series: dict[str, Any], style: Style) -> list[str]:
    values = series["source_bytes_per_s"]
    if not any(values):
        return []
    line = text.sparkline(values, style.width - 24, unicode=style.unicode)
    return [f"  over time {line} {text.rate(max(values))}"]


def _periods(part: dict[str, Any]) -> list[str]:
    own = part.get("own_periods")
    if own is not None:
        return [*_worst(part["periods"], 2, _of_all), *_worst(own, 1, _of_one)] or _none(part)
    return _worst(part["periods"], PERIODS, _contention) or _none(part)


def _none(part: dict[str, Any]) -> list[str]:
    if part["best_bytes_per_s"] is None:
        return []
    if part.get("verdict") == "unknown":
        return ["  contention: cannot tell (seen for too short a time, or it varies too much)"]
    return ["  no contention: never well below its own best"]


def _worst(periods: list[dict[str, Any]], most: int, line: Callable[[dict[str, Any]], str]) -> list[str]:
    """Returns a line for each of the periods that cost most, and says how many there are besides."""
    found = sorted(periods, key=lambda p: (p["start_s"] - p["end_s"]) * p["loss"])[:most]
    lines = [line(period) for period in found]
    rest = len(periods) - len(lines)
    return [*lines[:-1], f"{lines[-1]} (and {rest} more)"] if rest else lines


def _contention(p: dict[str, Any]) -> str:
    return f"  contention {clock(p['start_s'])} to {clock(p['end_s'])}: {text.percent(p['loss'])} below its best"


def _of_all(p: dict[str, Any]) -> str:
    return f"{_contention(p)}, on {p['nodes']} of {p['nodes_observed']} nodes at once"


def _of_one(p: dict[str, Any]) -> str:
    when = f"{clock(p['start_s'])} to {clock(p['end_s'])}"
    return f"  {text.clip(p['host'], 24)} alone {when}: {text.percent(p['loss'])} behind the others"


def clock(value_s: float) -> str:
    """Formats a time of the run."""
    if value_s < 600:
        return f"{value_s:.1f} s"
    return f"{int(value_s) // 3600}:{int(value_s) % 3600 // 60:02d}:{int(value_s) % 60:02d}"


SECTIONS = (header, meters, time, origin, coverage, source, savings)
"""The sections in their order; `page` puts those of the nodes after the meters, and the notes at the end."""
