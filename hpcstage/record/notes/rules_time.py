"""Rules about time: waits, contention, order, and whether staging was worth it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcstage.record.notes.rule import Note, Severity, number, percent, stages
from hpcstage.units import format_duration, format_rate

GAINED = 0.02
MUCH = 0.15
OUT_OF_ORDER = 0.2
LEAST_WALL_S = 5.0
WAITS = {
    "runtime": "copies came too late: try more --copiers if the source has bandwidth to spare; otherwise the gain "
    "comes in later epochs",
    "upfront": "the files that it waited for were not staged: the report lists the reasons under Coverage",
    "direct": "run it with --mode runtime: from the second epoch on, reads are local",
    "local": "the dataset is on the local disk already: that disk, or the number of readers, is what limits",
    "auto": "the forecast preferred this (see the mode above); --mode runtime copies all the same",
    None: "the notes say why no node reported",
}


def contention(record: dict[str, Any]) -> Iterator[Note]:
    """Notes periods in which the source was slower than its own best."""
    periods = record["contention"]["periods"]
    if not periods:
        return
    length_s = sum(p["end_s"] - p["start_s"] for p in periods)
    loss = sum((p["end_s"] - p["start_s"]) * p["loss"] for p in periods) / max(length_s, 1e-9)
    best = record["contention"]["best_bytes_per_s"]
    together = ", on most nodes at once: the shared file system" if record["group"] else ""
    yield Note(
        "contention",
        Severity.INFO,
        f"the source fell below its own best ({format_rate(best)}) for {format_duration(length_s)}, "
        f"by {percent(loss)} on average{together}",
        "other jobs or the servers caused it, as far as can be seen from here; the times are above",
    )


def waits_for_source(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that the program waited for the source for much of its time."""
    split = record["time_split"]
    if not split["wall_s"] or split["wait_source_s"] is None or split["wait_source_s"] < MUCH * split["wall_s"]:
        return
    share = percent(split["wait_source_s"] / split["wall_s"])
    if record["group"] and not record["totals"]["direct_opens"]:
        text = f"the program waited {share} of its time for files that other nodes keep or were still reading"
        remedy = "with more room (--budget) each node keeps all of them; where it has that, the link is what limits"
    else:
        text, remedy = f"the program waited for the source {share} of its time", _why_waited(record)
    yield Note("waits-for-source", Severity.INFO, text, remedy)


def _why_waited(record: dict[str, Any]) -> str:
    """Returns the advice for the reason that most of the opens at the source have."""
    counts = {"copy": record["totals"]["want_ready"] or 0, **record["coverage"]["reasons"]}
    most = max(counts, key=lambda name: counts[name])
    if record["run"]["mode"] == "runtime" and counts[most] and most in WAITED_FOR:
        return WAITED_FOR[most]
    return WAITS[_mode(record)]


WAITED_FOR = {
    "scanning": "most of these files were opened before the scan of the datasets had ended; later epochs are local",
    "unknown": "most of these files are not among the datasets' files as they were scanned: see Coverage",
    "full": "most of these files found no room on the local disk: see the note on its size",
    "failed": "most of these files could not be copied: see the note on the errors",
    "void": "most of these files had been written to during the run",
}
"""Advice by the reason of the opens, for reasons that more copiers would not change."""


def _mode(record: dict[str, Any]) -> str | None:
    """Returns the key of the advice: the mode, and for mode direct `auto` or `local` if the user did not ask for it."""
    run = record["run"]
    if run["mode"] != "direct" or run["mode_asked"] == "direct":
        mode: str | None = run["mode"]
        return mode
    return "auto" if run["mode_asked"] == "auto" else "local"


def preprocessing(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that the loader is short of CPU, not of data."""
    split = record["time_split"]
    if split["wall_s"] and (split["preprocess_s"] or 0) > MUCH * split["wall_s"]:
        yield Note(
            "preprocessing",
            Severity.INFO,
            f"the program waited {percent(split['preprocess_s'] / split['wall_s'])} of its time for its loader's "
            "decoding and collating, not for files",
            "more loader workers (num_workers) or cores; faster storage will not help",
        )


def order(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that the program opened many files before they were staged."""
    opens, wanted = record["coverage"]["opens"], record["totals"]["wanted"]
    if opens and wanted and stages(record) and wanted > OUT_OF_ORDER * opens:
        provenance = record["order"]["provenance"] or "manifest"
        known = (
            "the order is known, so the source limits: try more --copiers or --transfers if it has bandwidth to spare"
        )
        unknown = (
            "pass on the order in which the program reads: --data @list.txt, --order FILE, or hpcstage.order(paths)"
        )
        yield Note(
            "order",
            Severity.INFO,
            f"{number(wanted, 'open')} ({percent(wanted / opens)}) came before the file was staged; "
            f"order: {provenance}",
            known if provenance in ("given", "sampler") else unknown,
        )


def gained_nothing(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that staging gained nothing, or cost time, by estimate."""
    saved, wall = record["savings"]["vs_direct_s"], record["time_split"]["wall_s"]
    if not stages(record) or saved is None or not wall or wall < LEAST_WALL_S or saved > GAINED * wall:
        return
    lost = f"cost {format_duration(-saved)}" if saved < -GAINED * wall else "gained nothing"
    yield Note(
        "gained-nothing",
        Severity.INFO,
        f"by estimate, staging {lost} compared with reading directly",
        "it pays with more epochs or a busier source; --mode auto decides by a forecast",
    )


def not_kept(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that copies followed an announced order, but the program read in another."""
    part = record["order"]
    share = part["kept_share"]
    near = part.get("near_share") or 0.0
    if not part["followed"] or share is None or max(share, near) >= KEPT or part["announced_opens"] < LEAST_OPENS:
        return
    if any(table["source"] == "wrong" for table in part["tables"]):
        text = "a dataset opens other files than its attributes list, so the announced order was wrong"
        remedy = "the next run knows them from this one's trace" if part["trace_written"] else GIVE_ORDER
    else:
        text = f"only {percent(share)} of the opens came in the order that the samplers announced"
        remedy = f"{GIVE_ORDER}; --order manifest ignores what samplers announce"
    yield Note("order-not-kept", Severity.WARNING, text, remedy)


GIVE_ORDER = "pass the order on with hpcstage.order(paths) or --order FILE"
KEPT = 0.9
LEAST_OPENS = 100
"""With fewer announced opens the order hardly matters."""
TIME_RULES = [waits_for_source, gained_nothing, contention, order, not_kept, preprocessing]
