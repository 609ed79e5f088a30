"""Makes the plan that `hpcstage plan` shows: what fits, each node's part, and the forecast from figures of the user's
options, else of the record of an earlier run.

This module owns where each figure is from.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcstage.errors import HpcstageError, LocalDiskProblem
from hpcstage.job import detect, localdir, share, together
from hpcstage.jsonform import written
from hpcstage.plan.budget import BudgetFacts, for_files
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.roots import printable
from hpcstage.plan.dataset.scan import ScanResult
from hpcstage.plan.forecast import OF_RATES, OF_WORKLOAD, Conditions, forecast, missing_figures
from hpcstage.plan.order import orders
from hpcstage.plan.placement.fitting import Fit, NodesPlan, fit, nodes_plan
from hpcstage.plan.types import Budget, Dataset, Forecast, Order, Rates, Workload
from hpcstage.preview.pipeline import FoundFiles, FoundOrder, PlanInputs
from hpcstage.record import files, index
from hpcstage.record.figures.counts import ratio
from hpcstage.record.schema import Record
from hpcstage.store import storedir

if TYPE_CHECKING:
    from hpcstage.config import Config

SCHEMA_VERSION = 1
DAEMON_START_S = 0.25
"""Seconds from the start of the command to the start of the daemon's scan, on an idle node."""
OPTIONS = {
    "epochs": "--epochs",
    "epoch_compute_s": "--epoch-compute",
    "readers": "--readers",
    "startup_s": "--startup",
    "source_bytes_per_s": "--source-rate",
    "reader_bytes_per_s": "--reader-rate",
    "local_bytes_per_s": "--local-rate",
}
"""Maps the name of a figure to the option that tells it."""


@dataclass(frozen=True)
class Disk:
    """The node-local directory as far as a plan needs it."""

    path: Path | None
    """None: there is none here, such as on a login node."""
    text: str
    """The directory and why it was chosen, for people."""
    facts: BudgetFacts | None = None
    device: int | None = None


@dataclass(frozen=True)
class ForecastInputs:
    """What a plan with a forecast follows from, besides `PlanInputs`."""

    disk: Disk
    nodes: int
    placement: str
    max_rate_bytes_per_s: float | None
    """The cap of the whole job."""
    told: Mapping[str, float]
    """The figures that options told, by their names in `Workload` and `Rates`."""
    env: Mapping[str, str]
    """The environment that says where earlier runs of the user are found."""

    @classmethod
    def of_config(cls, config: Config, env: Mapping[str, str], told: Mapping[str, float]) -> ForecastInputs:
        """Returns the inputs of a run with this configuration."""
        host = socket.gethostname()
        job = detect(env, hostname=host)
        local, why_none = None, "none, as asked for"
        try:
            local = localdir.choose(config.local_dir, env, job)
        except LocalDiskProblem as error:
            why_none = f"none here: {error.what}"
        group = together.planned(config, job, local, host)
        nodes, shares = (1, 1) if group is None else (len(group.hosts), group.shares)
        disk = Disk(None, why_none)
        if local is not None:
            facts = share.budget_facts(config.budget_asked(), job, local, shares)
            disk = Disk(local.path, f"{local.path} ({local.why})", facts, local.device)
        return cls(disk, nodes, config.placement, config.max_rate_bytes_per_s, told, env)


@dataclass(frozen=True)
class Plan:
    """Manifest, order, budget and forecast. None is unknown."""

    scan: ScanResult
    found: FoundOrder
    """The order and what is known of it."""
    local: str = ""
    """The local directory and why it was chosen."""
    budget: Budget | None = None
    fit: Fit | None = None
    workload: Workload | None = None
    rates: Rates = field(default_factory=Rates)
    forecast: Forecast | None = None
    """None where a figure is missing, and for several nodes."""
    missing: tuple[str, ...] = ()
    """The options that would tell the figures that the forecast lacks."""
    notes: tuple[str, ...] = ()
    nodes: NodesPlan | None = None
    """The plan for the nodes of a job on several nodes."""

    @property
    def manifest(self) -> Manifest:
        """Returns the files."""
        return self.scan.manifest

    @property
    def order(self) -> Order:
        """Returns the order."""
        return self.found.order


def foresee(inputs: PlanInputs, given: ForecastInputs, found: FoundFiles) -> Plan:
    """Returns the whole plan: what fits, each node's part, and the forecast, or the figures that it lacks."""
    manifest, disk, nodes = found.scan.manifest, given.disk, given.nodes
    budget = None if disk.path is None or disk.facts is None else storedir.budget(disk.path, disk.facts)
    fitting = fit(manifest, orders.complete(found.order.order, len(manifest)), budget) if budget else None
    many = None
    if nodes > 1:
        room = for_files(budget, fitting.needed_inodes - len(manifest)) if budget and fitting else None
        many = nodes_plan(manifest.sizes, room, given.placement, nodes)
    workload, rates = known(given.told, find_earlier(inputs.datasets.all, given.env), manifest)
    missing = missing_figures(workload, rates) if many is None else ()
    conditions = Conditions(
        fit=fitting.share if fitting else 1.0,
        order_known=found.order.order.provenance != orders.MANIFEST,
        begin_s=DAEMON_START_S + found.scan.seconds,
        max_rate_bytes_per_s=given.max_rate_bytes_per_s,
    )
    notes = [f"{notice.text}; {notice.remedy}" for notice in inputs.local]
    notes += [f"{found.order.missing} ({orders.MISSING_REMEDY})"] if found.order.missing else []
    return Plan(
        found.scan,
        found.order,
        local=disk.text,
        budget=budget,
        fit=fitting,
        workload=workload,
        rates=rates,
        forecast=None if missing or many else forecast(workload, rates, conditions),
        missing=tuple(OPTIONS[name] for name in missing),
        notes=tuple(notes),
        nodes=many,
    )


# ---- the figures of the forecast


@dataclass(frozen=True)
class EarlierRun:
    """The program, the source and the disk as the record of an earlier run with the same datasets describes them."""

    source: str
    figures: Mapping[str, float | None]
    """By their names in `Workload` and `Rates`."""


def known(told: Mapping[str, float], earlier: EarlierRun | None, manifest: Manifest) -> tuple[Workload, Rates]:
    """Returns what is known."""
    workload = Workload(len(manifest), manifest.total_bytes, **_figures(OF_WORKLOAD, told, earlier))
    return workload, Rates(**_figures(OF_RATES, told, earlier))


def _figures(names: Sequence[str], told: Mapping[str, float], earlier: EarlierRun | None) -> dict[str, Any]:
    values, sources = dict[str, float](), dict[str, str]()
    for name in names:
        found = None if earlier is None else earlier.figures.get(name)
        if name in told:
            values[name], sources[name] = told[name], f"option {OPTIONS[name]}"
        elif earlier is not None and found is not None:
            values[name], sources[name] = found, earlier.source
    return {**values, "sources": sources}


def find_earlier(datasets: Sequence[Dataset], env: Mapping[str, str]) -> EarlierRun | None:
    """Returns the last successful run on these datasets; None if there is none, its record cannot be read, or it was on
    several nodes."""
    run_dir = index.find([os.fsdecode(d.root) for d in datasets], env)
    try:
        record = files.load_run(run_dir) if run_dir else None
    except (HpcstageError, OSError, TypeError, ValueError, LookupError, AttributeError):
        return None
    if record is None or record.group is not None:
        return None
    return EarlierRun(f"record of {record.run.id}", figures_of(record))


def figures_of(record: Record) -> dict[str, float | None]:
    """Returns the epochs, the compute time of one if reading took no time, the time before the first read, the readers
    of a run, and how fast it read."""
    split = record.time_split
    epochs = _epochs_by_opens(record) or split.loader_epochs or None
    compute_s = None if split.compute_s is None else split.compute_s + (split.preprocess_s or 0.0)
    return {
        "epochs": epochs,
        "epoch_compute_s": ratio(compute_s, epochs),
        "startup_s": split.other_s if split.loader_workers is not None and split.compute_s is not None else None,
        "readers": split.loader_workers,
        "source_bytes_per_s": record.contention.typical_bytes_per_s or None,
        "reader_bytes_per_s": _median(node.reader_bytes_per_s for node in record.nodes),
        "local_bytes_per_s": _median(node.disk_read_bytes_per_s for node in record.nodes),
    }


def _median(rates: Iterable[float | None]) -> float | None:
    return median(found) if (found := [rate for rate in rates if rate]) else None


def _epochs_by_opens(record: Record) -> int | None:
    """Returns how often the datasets' files were opened, if that is about a whole number; None if not.

    Opens are asked first, as a loader counts its epochs over validation data, too.
    """
    times = ratio(record.coverage.opens, record.files) or 0.0
    return round(times) if times >= 0.9 and abs(times - round(times)) < 0.1 * times else None


# ---- the table: which file is copied at which position


class PlanRow(NamedTuple):
    """One file at its position of the order."""

    position: int
    """The position, from 1."""
    file_id: int
    size_bytes: int
    cumulative_bytes: int
    staged: bool
    """Whether the budget holds the file."""


def rows(plan: Plan) -> Iterator[PlanRow]:
    """Yields the rows of all files."""
    staged = plan.fit.files if plan.fit is not None else len(plan.manifest)
    cumulative = 0
    for position, file_id in enumerate(orders.complete(plan.order, len(plan.manifest)), 1):
        size = plan.manifest.size(file_id)
        cumulative += size
        yield PlanRow(position, file_id, size, cumulative, position <= staged)


# ---- as plain data


def summary(plan: Plan) -> dict[str, Any]:
    """Returns the plan as plain data, without the arrays."""
    scan, found = plan.scan, plan.found
    skipped = [{**path_json(path), "why": why} for path, why in scan.skipped]
    order = {"provenance": plan.order.provenance, "ids": len(plan.order.ids), "unknown": found.unknown}
    parts = ("budget", "fit", "workload", "rates", "forecast", "nodes")
    return {
        "schema_version": SCHEMA_VERSION,
        "datasets": [written(d) for d in plan.manifest.datasets],
        "files": len(plan.manifest),
        "size_bytes": plan.manifest.total_bytes,
        "scan": {
            "seconds": scan.seconds,
            "stats": scan.stats,
            "listings": scan.listings,
            "skipped": skipped,
            "counts": scan.skipped_counts,
        },
        "order": {**order, "about": found.about},
        "local": plan.local,
        **{name: part and asdict(part) for name in parts for part in [getattr(plan, name)]},
        "missing": list(plan.missing),
        "notes": list(plan.notes),
    }


def path_json(path: bytes) -> dict[str, str]:
    """Returns the path under the key `path`, and as base64 under `path_b64` where it is not UTF-8."""
    import base64

    try:
        return {"path": path.decode("utf-8")}
    except UnicodeDecodeError:
        return {"path": printable(path), "path_b64": base64.b64encode(path).decode("ascii")}
