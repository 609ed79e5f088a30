"""Holds the plan as a whole, and makes its table and its plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.roots import printable
from hpcstage.plan.dataset.scan import ScanResult
from hpcstage.plan.order import orders
from hpcstage.plan.types import Budget, Forecast, Order, Rates, Workload
from hpcstage.preview.findorder import FoundOrder

if TYPE_CHECKING:
    from hpcstage.plan.placement.fitting import Fit
    from hpcstage.plan.placement.nodesplan import NodesPlan

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ScanSummary:
    """The cost of the scan, and the names that it left out."""

    seconds: float
    stats: int
    listings: int
    skipped: list[tuple[bytes, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, result: ScanResult) -> ScanSummary:
        """Returns the summary of a scan's result, without the manifest."""
        return cls(result.seconds, result.stats, result.listings, result.skipped, result.skipped_counts)


@dataclass(frozen=True)
class Plan:
    """Manifest, order, budget and forecast. None is unknown."""

    manifest: Manifest
    found: FoundOrder
    """The order and what is known of it."""
    scan: ScanSummary | None = None
    local: str | None = None
    """The local directory and why it was chosen."""
    budget: Budget | None = None
    fit: Fit | None = None
    workload: Workload | None = None
    rates: Rates | None = None
    forecast: Forecast | None = None
    """None where a figure is missing."""
    missing: tuple[str, ...] = ()
    """The options that would tell the figures that the forecast lacks."""
    notes: tuple[str, ...] = ()
    nodes: NodesPlan | None = None
    """The plan for the nodes of a job on several nodes."""

    @property
    def order(self) -> Order:
        """Returns the order."""
        return self.found.order


# ---- the table: which file is copied at which position, and when it should be staged


@dataclass(frozen=True)
class PlanRow:
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


def rows(plan: Plan) -> Iterator[PlanRow]:
    """Yields the rows of all files."""
    staged = plan.fit.files if plan.fit is not None else len(plan.manifest)
    cumulative = 0
    for position, file_id in enumerate(orders.complete(plan.order, len(plan.manifest)), 1):
        size = plan.manifest.size(file_id)
        cumulative += size
        fits = position <= staged
        yield PlanRow(position, file_id, size, cumulative, expected_s(plan, cumulative) if fits else None, fits)


def expected_s(plan: Plan, size_bytes: int) -> float | None:
    """Returns when this many bytes should have been copied, in seconds from the start of the scan."""
    if plan.rates is None or not plan.rates.source_bytes_per_s:
        return None
    begin_s = plan.scan.seconds if plan.scan is not None else 0.0
    return begin_s + size_bytes / plan.rates.source_bytes_per_s


# ---- as plain data


def summary(plan: Plan) -> dict[str, Any]:
    """Returns the plan as plain data, without the arrays."""
    return {
        "schema_version": SCHEMA_VERSION,
        "datasets": [d.to_json() for d in plan.manifest.datasets],
        "files": len(plan.manifest),
        "size_bytes": plan.manifest.total_bytes,
        "scan": _scan_out(plan.scan),
        "order": _order_out(plan),
        "local": plan.local,
        "budget": plan.budget and asdict(plan.budget),
        "fit": plan.fit and asdict(plan.fit),
        "workload": plan.workload and asdict(plan.workload),
        "rates": plan.rates and asdict(plan.rates),
        "forecast": plan.forecast and asdict(plan.forecast),
        "missing": list(plan.missing),
        "notes": list(plan.notes),
        "nodes": plan.nodes and asdict(plan.nodes),
    }


def _order_out(plan: Plan) -> dict[str, Any]:
    found = plan.found
    numbers = {"provenance": plan.order.provenance, "ids": len(plan.order.ids), "unknown": found.unknown}
    return {**numbers, "about": found.about}


def _scan_out(scan: ScanSummary | None) -> dict[str, Any] | None:
    if scan is None:
        return None
    skipped = [{**path_json(path), "why": why} for path, why in scan.skipped]
    numbers = {"seconds": scan.seconds, "stats": scan.stats, "listings": scan.listings}
    return {**numbers, "skipped": skipped, "counts": scan.counts}


# ---- paths


def path_json(path: bytes) -> dict[str, str]:
    """Returns the path under the key `path`, and as base64 under `path_b64` where it is not UTF-8."""
    import base64

    try:
        return {"path": path.decode("utf-8")}
    except UnicodeDecodeError:
        return {"path": printable(path), "path_b64": base64.b64encode(path).decode("ascii")}
