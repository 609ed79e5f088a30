"""Measures source and local disk for a short time, as far as the forecast needs rates that are not known.

The probe reads a sample of the dataset's own files, spread over the order, so that sizes and places are the job's. One
reader alone reads some of them; others are copied with as many transfers in flight as the copiers keep, and read back.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Rates
from hpcstage.preview.transfers import Measured, measure, read_back

SAMPLE_FILES = 2000
ALONE_SHARE = 0.3
"""The share of the time limit for one reader alone; copying takes up to COPY_SHARE, reading back the rest."""
COPY_SHARE = 0.5
THREAD_COST_S = 50e-6
"""Seconds that a Python thread needs for a transfer besides waiting."""
FEW = 16


@dataclass(frozen=True)
class ProbeResult:
    """The measured rates; those that could not be measured are None."""

    rates: Rates
    seconds: float
    notes: tuple[str, ...]


def probe(
    manifest: Manifest,
    ids: Sequence[int],
    local_dir: Path | None,
    *,
    transfers: int = 32,
    limit_s: float = 2.0,
) -> ProbeResult:
    """Measures the rates with files of the order `ids`; without `local_dir`, only those of the source."""
    started = time.monotonic()
    sample = _sample(manifest, ids)
    if not sample:
        return ProbeResult(_rates(None, None, None), 0.0, ("no files to probe with",))
    with _workplace(local_dir) as place:
        alone = measure(sample[0::2], None, 1, limit_s * ALONE_SHARE)
        many = measure(sample[1::2] or sample, place, _useful(alone, transfers), limit_s * COPY_SHARE)
        left_s = max(0.1, started + limit_s - time.monotonic())
        local = read_back(many.copies, min(left_s, limit_s * (1 - ALONE_SHARE - COPY_SHARE)))
    notes = tuple(_notes(alone, many, local, place))
    return ProbeResult(_rates(alone, many, local), time.monotonic() - started, notes)


def _useful(alone: Measured, transfers: int) -> int:
    """Returns how many threads hide one reader's waits; where these are short, more threads would only slow each other
    down."""
    if not alone.files:
        return transfers
    return max(2, min(transfers, int((alone.open_s + alone.read_s) / alone.files / THREAD_COST_S)))


# ---- the sample and where it goes


def _sample(manifest: Manifest, ids: Sequence[int]) -> list[bytes]:
    """Returns paths at even distances over the order, in a sequence whose every beginning is spread over it."""
    count = min(SAMPLE_FILES, len(ids))
    places = [i * len(ids) // count for i in range(count)]
    # The time limit may cut the sample anywhere: in bit-reversed sequence, each beginning is spread over the order.
    turns = sorted(range(count), key=lambda i: int(f"{i:016b}"[::-1], 2))
    return [manifest.source_path(ids[places[i]]) for i in turns]


@contextlib.contextmanager
def _workplace(local_dir: Path | None) -> Iterator[str | None]:
    place = None
    if local_dir is not None:
        with contextlib.suppress(OSError):
            place = tempfile.mkdtemp(prefix=".hpcstage-probe-", dir=local_dir)
    try:
        yield place
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


# ---- from sums to rates


def _rates(alone: Measured | None, many: Measured | None, local: Measured | None) -> Rates:
    sources: dict[str, str] = {}
    values: dict[str, float | None] = dict.fromkeys(
        (
            "source_bytes_per_s", "source_files_per_s", "reader_file_s", "reader_bytes_per_s",
            "local_bytes_per_s", "local_file_s", "copy_bytes_per_s", "copy_files_per_s",
        )
    )  # fmt: skip

    def note(measured: Measured, how: str, found: dict[str, float | None]) -> None:
        values.update(found)
        text = f"probe: {how}, {measured.files} files"
        sources.update(dict.fromkeys(found, text))

    if alone is not None and alone.files:
        note(alone, "one reader", _alone_rates(alone, "reader"))
    if many is not None and many.files and many.wall_s > 0:
        note(many, f"{many.in_flight} in flight", _parallel_rates(many))
    if local is not None and local.files:
        note(local, "copies read back", _alone_rates(local, "local"))
    if many is not None and many.in_flight < FEW:
        _not_slower_than_one(values)
    return Rates(**values, sources=sources)


def _not_slower_than_one(values: dict[str, float | None]) -> None:
    """Raises the source's rate to that of one reader. Where the source is so fast that few threads pay, the threads
    make several transfers slower than one."""
    many, one = values["source_bytes_per_s"], values["reader_bytes_per_s"]
    if many is not None and one is not None and many < one:
        values["source_bytes_per_s"] = one


def _alone_rates(found: Measured, name: str) -> dict[str, float | None]:
    rate = found.size_bytes / found.read_s if found.size_bytes and found.read_s > 0 else None
    # Files without content have only a time per file, which includes reading to their end.
    per_file = found.open_s / found.files if rate else (found.open_s + found.read_s) / found.files
    return {f"{name}_file_s": per_file, f"{name}_bytes_per_s": rate}


def _parallel_rates(found: Measured) -> dict[str, float | None]:
    files_per_s, bytes_per_s = found.files / found.wall_s, found.size_bytes / found.wall_s or None
    rates: dict[str, float | None] = {"copy_files_per_s": files_per_s, "copy_bytes_per_s": bytes_per_s}
    # If the threads had not written, they would have read for the whole time.
    reading = (found.open_s + found.read_s) / max(1e-9, found.open_s + found.read_s + found.write_s)
    rates["source_files_per_s"] = files_per_s / max(reading, 0.05)
    rates["source_bytes_per_s"] = bytes_per_s / max(reading, 0.05) if bytes_per_s else None
    return rates


def _notes(alone: Measured, many: Measured, local: Measured | None, place: str | None) -> Iterator[str]:
    hung = alone.hung + many.hung
    if hung:
        yield f"{hung} transfers did not end within the probe's time: the source is slow or hangs"
    if not alone.files or not many.files:
        yield "the sample could not be read"
    if place is None:
        yield "no local directory to write to: the local disk was not measured"
    elif local is not None:
        yield f"local: {local.files} copies, written through to the disk first, then read by one reader"
