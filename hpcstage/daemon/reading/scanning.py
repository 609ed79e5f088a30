"""Scans the datasets and looks up announced orders, as work for forked helpers: it never holds up the event loop.

Owns the files that this work leaves in the node directory. A helper returns its findings in JSON; the daemon reads the
arrays from the files.
"""

from __future__ import annotations

import json
import os
from array import array
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcstage.daemon.reading import traces
from hpcstage.daemon.reading.spelling import Spelling
from hpcstage.node import page
from hpcstage.plan.dataset.datasets import Resolved
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.scan import ScanResult, scan
from hpcstage.plan.order import orders
from hpcstage.plan.types import Budget, Order, Workload
from hpcstage.problem import Problem
from hpcstage.protocol import nodedir
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.leadspec import RESOLVED
from hpcstage.protocol.shim import Progress
from hpcstage.store.directory import budget

AUTO_MODE, DIRECT_MODE = "auto", "direct"
ASKED_FOR = "asked for"
PROBE_S = 0.5
"""The longest that a probe reads, in seconds; the program waits for the source meanwhile."""
_LISTED_SKIPS = 20


@dataclass(frozen=True)
class Scanned:
    """The findings of the scan, without the files themselves."""

    seconds: float
    stats: int
    listings: int
    skipped: dict[str, int]
    """Reason → how many files are left out."""
    examples: list[str] = field(default_factory=list)
    unknown_in_order: int = 0
    problems: list[Problem] = field(default_factory=list)
    """The problems of the datasets, for the record."""
    forecast: dict[str, Any] | None = None
    """The forecast, made after a probe; only in mode auto."""
    probe_s: float = 0.0
    trace: str = ""
    """The id of the run that left a trace of this command on these files; empty if there is none."""
    trace_why: str = ""
    """Why there is none that can be used."""

    @classmethod
    def from_bytes(cls, data: bytes) -> Scanned:
        """Parses what the helper returned."""
        values: dict[str, Any] = json.loads(data)
        return cls(**{**values, "problems": [Problem.from_json(problem) for problem in values["problems"]]})


@dataclass(frozen=True)
class Prepared:
    """Everything that staging begins with."""

    manifest: Manifest
    order: Order
    directories: int
    """The number of directories of the datasets."""
    scanned: Scanned | None
    """The findings of this node's scan; None if the manifest came from another node."""
    mode: str
    """The mode that is followed."""
    mode_why: str


def scan_into(spec: DaemonSpec) -> bytes:
    """Scans the datasets and writes manifest and order into the node directory. Returns a `Scanned` in JSON."""
    node_dir = Path(spec.node_dir)
    resolved = Resolved.load(node_dir / RESOLVED)
    exclude = [os.fsencode(os.path.realpath(path)) for path in (spec.node_dir, spec.run_dir)]
    said = node_dir / nodedir.PAGE
    result = scan(resolved, exclude=exclude, on_found=lambda *found: page.note_progress(said, Progress(*found)))
    result.manifest.save(node_dir / nodedir.MANIFEST)
    left, why = traces.find(spec, result.manifest)
    spelt = Spelling(result.manifest)
    listed = orders.build_counting(
        result.manifest,
        spec.order or None,
        lists=[replace(item, paths=list(map(spelt, item.paths))) for item in resolved.ordering],
        trace=None if left is None else orders.from_ids(left.order, len(result.manifest), orders.TRACE),
    )
    orders.save(listed.order, node_dir / nodedir.ORDER)
    if left is not None:
        traces.save_learnt(node_dir, left)
    scanned = replace(
        _scanned(result, listed.unknown),
        problems=_problems(len(result.manifest), orders.missing_text(listed, resolved.ordering)),
        trace=left.header.run_id if left else "",
        trace_why=why,
    )
    if spec.mode == AUTO_MODE:
        scanned = _with_forecast(scanned, result.manifest, listed.order, spec)
    told = json.dumps(asdict(scanned)).encode()
    (node_dir / nodedir.SCANNED).write_bytes(told)  # for a wrapper with --strict, which reads it once the page says so
    return told


def _problems(files: int, missing: str) -> list[Problem]:
    found = []
    if missing:
        found.append(Problem("list-missing", missing, orders.MISSING_REMEDY))
    if not files:
        found.append(Problem("no-file", "the datasets hold no file", "check --data"))
    return found


def _with_forecast(scanned: Scanned, manifest: Manifest, order: Order, spec: DaemonSpec) -> Scanned:
    from hpcstage.plan.forecast.modes import forecast
    from hpcstage.plan.forecast.nodes import Given, outlook
    from hpcstage.plan.placement.fitting import fit
    from hpcstage.preview.probe import Copying, probe

    node_dir = Path(spec.node_dir)
    copying = Copying(spec.copiers, spec.transfers, spec.own_rate_bytes_per_s, spec.nice)
    measured = probe(manifest, order.ids, node_dir, copying, limit_s=PROBE_S)
    limit = budget(node_dir, spec.budget)
    room = fit(manifest, orders.complete(order, len(manifest)), limit)
    found = forecast(
        _workload(spec, manifest),
        measured.rates,
        fit=room.share,
        order_known=order.provenance != orders.MANIFEST,
        begin_s=scanned.seconds + measured.seconds,
        max_rate_bytes_per_s=spec.max_rate_bytes_per_s,
        nodes=spec.node_count,
        sharing=outlook(
            Given(manifest.sizes, limit, room.needed_inodes - len(manifest), spec.placement), spec.node_count
        ),
    )
    return replace(scanned, forecast=asdict(found), probe_s=measured.seconds)


def _workload(spec: DaemonSpec, manifest: Manifest) -> Workload:
    from hpcstage.preview.earlier import KEYS, find_earlier, known

    said = {name: getattr(spec, name) for name in KEYS}
    earlier = find_earlier(spec.datasets, os.environ) if None in said.values() else None
    values, sources = known(said, spec.workload_sources, earlier, spec.command)
    values["startup_s"] = values["startup_s"] or 0.0
    nodes = earlier.nodes if earlier is not None and spec.epoch_compute_s is None else spec.node_count
    size_bytes = manifest.total_bytes
    found = Workload(files=len(manifest), size_bytes=size_bytes, sources=sources, compute_nodes=nodes, **values)
    return found.on(spec.node_count)


def save_plan(spec: DaemonSpec, manifest: Manifest, order: Order, scanned: Scanned, limit: Budget, mode: str) -> bytes:
    """Writes the plan to the run directory, where `hpcstage plan` finds it."""
    from hpcstage.preview import planfile

    summary = planfile.ScanSummary(scanned.seconds, scanned.stats, scanned.listings, [], scanned.skipped)
    known = None if scanned.forecast is None else planfile.forecast_from_json(scanned.forecast)
    plan = planfile.Plan(
        manifest,
        order,
        scan=summary,
        unknown=scanned.unknown_in_order,
        local=spec.node_dir,
        budget=limit,
        forecast=known,
        mode=mode,
    )
    planfile.save(Path(spec.run_dir), plan)
    return b""


def decided(run_dir: Path) -> bytes:
    """Returns the forecast of the first node, in JSON, from the plan; the other nodes use it in mode auto."""
    from hpcstage.preview import planfile

    data = json.loads((run_dir / planfile.PLAN).read_text(encoding="utf-8"))
    return json.dumps(data["forecast"]).encode()


def _scanned(result: ScanResult, unknown: int) -> Scanned:
    return Scanned(
        seconds=result.seconds,
        stats=result.stats,
        listings=result.listings,
        skipped=result.skipped_counts,
        examples=[f"{path.decode(errors='replace')}: {why}" for path, why in result.skipped[:_LISTED_SKIPS]],
        unknown_in_order=unknown,
    )


def load_scan(node_dir: Path) -> tuple[Manifest, Order]:
    """Loads the manifest and the order that `scan_into` left."""
    manifest = Manifest.open(node_dir / nodedir.MANIFEST, verify=False)
    return manifest, orders.load(node_dir / nodedir.ORDER, len(manifest))


def map_order(node_dir: Path, name: str) -> bytes:
    """Writes the ids of an announced list of paths beside it. Returns the numbers of ids and of unknown paths, in
    JSON."""
    manifest = Manifest.open(node_dir / nodedir.MANIFEST, verify=False)
    announced = node_dir / nodedir.ORDERS / name
    paths = [path for path in announced.read_bytes().split(b"\0") if path]
    listed = orders.from_paths(manifest, map(Spelling(manifest), paths), orders.GIVEN)
    orders.save(listed.order, announced.with_name(announced.name + ".ids"))
    return json.dumps({"ids": len(listed.order.ids), "unknown": listed.unknown}).encode()


def load_order(node_dir: Path, name: str, files: int) -> array[int]:
    """Loads the ids that `map_order` left."""
    return orders.load(node_dir / nodedir.ORDERS / (name + ".ids"), files).ids
