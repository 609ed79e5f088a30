"""Makes the plan's table: which file is copied at which position, and when it should be staged. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcstage.plan.order.orders import complete
from hpcstage.preview.planfile import Plan


@dataclass(frozen=True)
class Row:
    """One file at its position of the order."""

    position: int
    """The position, from 1."""
    file_id: int
    size_bytes: int
    cumulative_bytes: int
    expected_s: float | None
    """Seconds from the start of the run; None: the file is not staged, or the copying rate is not known."""
    staged: bool
    """Whether the budget holds the file."""


def rows(plan: Plan) -> Iterator[Row]:
    """Yields the rows of all files."""
    staged = plan.fit.files if plan.fit is not None else len(plan.manifest)
    cumulative = 0
    for position, file_id in enumerate(complete(plan.order, len(plan.manifest)), 1):
        size = plan.manifest.size(file_id)
        cumulative += size
        fits = position <= staged
        yield Row(position, file_id, size, cumulative, expected_s(plan, position, cumulative) if fits else None, fits)


def expected_s(plan: Plan, files: int, size_bytes: int) -> float | None:
    """Returns when this many files and bytes should have been copied, in seconds from the start of the scan."""
    if plan.rates is None:
        return None
    per_s = (plan.rates.copy_files_per_s or plan.rates.source_files_per_s, files)
    bytes_per_s = (plan.rates.copy_bytes_per_s or plan.rates.source_bytes_per_s, size_bytes)
    known = [amount / rate for rate, amount in (per_s, bytes_per_s) if rate]
    begin_s = plan.scan.seconds if plan.scan is not None else 0.0
    return begin_s + max(known) if known else None
