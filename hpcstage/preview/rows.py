"""The plan's table: what is copied in which place, and when it should be there. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpcstage.plan.order.orders import complete
from hpcstage.preview.planfile import Plan


@dataclass(frozen=True)
class Row:
    """One file in its place of the order."""

    position: int
    """From 1."""
    file_id: int
    size_bytes: int
    cumulative_bytes: int
    expected_s: float | None
    """From the start of the run; None: the copying rate is not known."""
    staged: bool
    """False: the budget ends before it."""


def rows(plan: Plan) -> Iterator[Row]:
    """All files, lazily."""
    staged = plan.fit.files if plan.fit is not None else len(plan.manifest)
    cumulative = 0
    for position, file_id in enumerate(complete(plan.order, len(plan.manifest)), 1):
        size = plan.manifest.size(file_id)
        cumulative += size
        fits = position <= staged
        yield Row(position, file_id, size, cumulative, expected_s(plan, position, cumulative) if fits else None, fits)


def expected_s(plan: Plan, files: int, size_bytes: int) -> float | None:
    """When so many files and bytes have been copied, the scan included."""
    if plan.rates is None:
        return None
    per_s = (plan.rates.copy_files_per_s or plan.rates.source_files_per_s, files)
    bytes_per_s = (plan.rates.copy_bytes_per_s or plan.rates.source_bytes_per_s, size_bytes)
    known = [amount / rate for rate, amount in (per_s, bytes_per_s) if rate]
    begin_s = plan.scan.seconds if plan.scan is not None else 0.0
    return begin_s + max(known) if known else None
