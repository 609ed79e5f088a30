"""Rules about the store, the local disk and the files at the source. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hpcstage.record.rule import Note, Severity, number, stages
from hpcstage.units import format_size

MEMORY_WORDS = ("tmpfs", "memory", "ramfs")


def store_full(record: dict[str, Any]) -> Iterator[Note]:
    """The datasets do not fit: how much is missing."""
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
            f"the datasets hold {format_size(sum(sizes))}, {what} {format_size(room)}: "
            f"{format_size(missing)} are read from the source in every epoch",
            f"raise --budget by {format_size(missing)}, or take a larger disk with --local-dir",
        )


def in_memory(record: dict[str, Any]) -> Iterator[Note]:
    """The local directory is memory, which counts as the job's."""
    why = record["environment"]["local_dir_why"].lower()
    if stages(record) and any(word in why for word in MEMORY_WORDS):
        yield Note(
            "local-is-memory",
            Severity.WARNING,
            f"the local directory {record['environment']['local_dir']} is memory: staged files count as the job's own",
            "ask for the memory, lower --budget, or name a disk with --local-dir",
        )


def copy_errors(record: dict[str, Any]) -> Iterator[Note]:
    """Files that could not be copied."""
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
    """Files of the datasets that the program wrote to."""
    dropped = record["coverage"]["dropped"] or 0
    if dropped:
        yield Note(
            "dropped",
            Severity.INFO,
            f"{number(dropped, 'staged copy', 'staged copies')} dropped, as the program wrote to the file",
            "keep outputs outside the datasets",
        )


STORAGE_RULES = [store_full, in_memory, copy_errors, written]
