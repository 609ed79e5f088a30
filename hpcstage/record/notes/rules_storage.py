"""Rules about the store, the local disk and the files at the source. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcstage.record.notes.rule import Note, Severity, more_room, number, percent, stages
from hpcstage.units import format_rate, format_size

WRITES = 0.5
"""Transfers that spend more than this share of their time in writes wait for the local disk, not for the source."""
LEAST_WRITE_S = 2.0
WAITS_LOCAL = 0.15
MEMORY_WORDS = ("tmpfs", "memory", "ramfs")


def store_full(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that the datasets do not fit into the store, and how many bytes are missing."""
    sizes = [dataset["size_bytes"] for dataset in record["datasets"]]
    budgets = [node["budget"].get("size_bytes") for node in record["nodes"] if node.get("state") != "missing"]
    if not sizes or not budgets or None in sizes or None in budgets or not stages(record):
        return
    partition = (record["group"] or {}).get("placement") == "partition"
    room, what = (sum(budgets), "the stores of all nodes") if partition else (min(budgets), "the store")
    missing = sum(sizes) - room
    if missing > 0:
        yield Note(
            "store-full",
            Severity.WARNING,
            f"the datasets hold {format_size(sum(sizes))}, {what} at most {format_size(room)}: "
            f"{format_size(missing)} are read from the source in every epoch",
            more_room(_budget_why(record)),
        )


def _budget_why(record: dict[str, Any]) -> str:
    return next((str(node["budget"]["why"]) for node in record["nodes"] if node["budget"].get("why")), "")


def slow_disk(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that the local disk limits copying or the reading of copies; names the slowest of several nodes."""
    found = [node for node in record["nodes"] if node.get("disk")]
    writing = [
        node for node in found if node["disk"]["write_share"] > WRITES and node["disk"]["write_s"] > LEAST_WRITE_S
    ]
    if writing and stages(record):
        worst = max(writing, key=lambda node: float(node["disk"]["write_share"]))
        yield Note(
            "slow-local-disk",
            Severity.WARNING if _waited_for_copies(record) else Severity.INFO,
            f"the local disk {record['environment']['local_dir']} on {worst['host']} is slower than the source: "
            f"transfers spent {percent(worst['disk']['write_share'])} of their time writing to it",
            "name a faster disk with --local-dir; with none, --mode direct may be as fast",
        )
    wall_s, waited = record["time_split"]["wall_s"], record["time_split"]["wait_local_s"]
    if wall_s and waited and waited > WAITS_LOCAL * wall_s and stages(record):
        speeds = [node["disk"]["read_bytes_per_s"] for node in found if node["disk"]["read_bytes_per_s"]]
        speed = f" (read at {format_rate(min(speeds))} by each reader)" if speeds else ""
        yield Note(
            "waits-for-local-disk",
            Severity.WARNING,
            f"the program waited for the local disk {percent(waited / wall_s)} of its time{speed}",
            "name a faster disk with --local-dir, or read with more loader workers (num_workers)",
        )


def _waited_for_copies(record: dict[str, Any]) -> bool:
    split = record["time_split"]
    return bool(split["wall_s"] and (split["wait_source_s"] or 0.0) > WAITS_LOCAL * split["wall_s"])


def in_memory(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that the local directory is memory, so that staged files count as the job's memory."""
    why = record["environment"]["local_dir_why"].lower()
    if stages(record) and any(word in why for word in MEMORY_WORDS):
        yield Note(
            "local-is-memory",
            Severity.WARNING,
            f"the local directory {record['environment']['local_dir']} is memory: staged files count as the job's own",
            "ask for the memory, lower --budget, or name a disk with --local-dir",
        )


def copy_errors(record: dict[str, Any]) -> Iterator[Note]:
    """Notes files that could not be copied."""
    errors = [error for node in record["nodes"] for error in node["errors"]]
    count = sum(int(error.get("count", 1)) for error in errors)
    if count:
        first = errors[0]
        yield Note(
            "copy-failed",
            Severity.WARNING,
            f"{number(count, 'file')} could not be copied: {first.get('error', '?')}: {first.get('path', '?')}",
            "they were read from the source; the first errors are in `hpcstage report --json` under nodes",
        )


def written(record: dict[str, Any]) -> Iterator[Note]:
    """Notes that the program wrote to files of the datasets whose copies were dropped then."""
    dropped = record["coverage"]["dropped"] or 0
    if dropped:
        yield Note(
            "dropped",
            Severity.INFO,
            f"{number(dropped, 'staged copy was', 'staged copies were')} dropped because the program wrote to the file",
            "keep outputs outside the datasets",
        )


STORAGE_RULES = [store_full, slow_disk, in_memory, copy_errors, written]
