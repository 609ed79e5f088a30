"""Makes a plan without running anything: scan, order, budget, probe, forecast.

This module owns where each input of the forecast comes from: an option, the record of an earlier run, the probe, or
nothing (then `plan.forecast` assumes a value and says so). The daemon makes its plan of the same parts.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.errors import LocalDiskProblem, UsageError
from hpcstage.plan.budget import decide
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.scan import scan
from hpcstage.plan.forecast import modes
from hpcstage.plan.forecast.nodes import Given, nodes_plan, sharing_of
from hpcstage.plan.order import orders
from hpcstage.plan.placement.fitting import fit
from hpcstage.plan.placement.placements import Kind
from hpcstage.plan.types import Budget, Order, Rates, Workload
from hpcstage.preview import probe
from hpcstage.preview.earlier import Earlier, find_earlier, known, said_of_program
from hpcstage.preview.orders import foresee
from hpcstage.preview.planfile import Plan, ScanSummary

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.types import Job
    from hpcstage.plan.order.readings import Asked

DAEMON_START_S = 0.25
"""Seconds from the start of the command to the start of the daemon's scan, on an idle node."""
NOTHING_KNOWN = Rates(None, None, None, None, None, None)


@dataclass(frozen=True)
class Disk:
    """The node-local directory as far as a plan needs it."""

    path: Path | None
    text: str
    budget: Budget | None
    device: int | None = None


def preview(
    config: Config,
    env: Mapping[str, str],
    cwd: Path,
    *,
    with_probe: bool,
    sampler: Asked | None = None,
    on_found: Callable[[int, int], None] = lambda _files, _bytes: None,
) -> Plan:
    """Makes the plan of a run with this configuration. Raises UsageError for datasets that cannot be used. Calls
    `on_found` as the scan does.

    `sampler` is that of the program to be run, as the user named it; the order then follows its readings.
    """
    disk = local_disk(config, env)
    resolved = resolve(config.data, cwd, disk.device, config.order_asked())
    found = scan(resolved, on_found=on_found)
    if not len(found.manifest):
        raise UsageError("the datasets hold no file", "check --data")
    foreseen = foresee(config, found.manifest, resolved, env, sampler)
    wanted = foreseen.order
    notes = [f"{notice.text}; {notice.remedy}" for notice in resolved.warnings]
    if foreseen.missing:
        notes.append(f"{foreseen.missing} ({orders.MISSING_REMEDY})")
    earlier = find_earlier(resolved.datasets, env)
    nodes = config.nodes or len(_job(env).nodes) or 1
    workload = workload_of(config, found.manifest, earlier, nodes)
    rates, probe_notes = _rates(config, found.manifest, wanted, disk, earlier, with_probe=with_probe)
    notes.extend(probe_notes)
    room = fit(found.manifest, orders.complete(wanted, len(found.manifest)), disk.budget) if disk.budget else None
    given = Given(
        found.manifest.sizes,
        disk.budget,
        directories=room.needed_inodes - len(found.manifest) if room else 0,
        asked=config.placement,
        order_known=wanted.provenance != orders.MANIFEST,
        begin_s=DAEMON_START_S + found.seconds,
        max_rate_bytes_per_s=config.max_rate_bytes_per_s,
    )
    many = nodes_plan(given, workload, rates, nodes) if nodes > 1 else None
    result = modes.forecast(
        workload.on(nodes),
        rates,
        fit=room.share if room else 1.0,
        order_known=given.order_known,
        begin_s=given.begin_s,
        max_rate_bytes_per_s=config.max_rate_bytes_per_s,
        nodes=nodes,
        sharing=sharing_of(given, nodes, Kind(many.kind)) if many is not None else None,
    )
    return Plan(
        manifest=found.manifest,
        order=wanted,
        scan=ScanSummary.of(found),
        unknown=foreseen.unknown,
        about=foreseen.about,
        kept=foreseen.kept or (earlier.kept if earlier is not None else None),
        readings=foreseen.readings,
        local=disk.text,
        budget=disk.budget,
        fit=room,
        workload=workload,
        rates=rates,
        forecast=result,
        mode=result.choice,
        notes=tuple(notes),
        nodes=many,
    )


# ---- the local disk


def local_disk(config: Config, env: Mapping[str, str]) -> Disk:
    """Returns the local directory that a run here would use. On a login node there may be none; the budget is then
    unknown."""
    from hpcstage.job import localdir, share

    job = _job(env)
    try:
        local = localdir.choose(config.local_dir, env, job)
    except LocalDiskProblem as error:
        return Disk(None, f"none here: {error.what}", None)
    if local is None:
        return Disk(None, "none, as asked for", None)
    budget = decide(share.budget_facts(config.budget_asked(), job, local))
    return Disk(local.path, f"{local.path} ({local.why})", budget, local.device)


def _job(env: Mapping[str, str]) -> Job:
    from hpcstage.job import detect

    return detect(env, hostname=socket.gethostname())


# ---- the program


def workload_of(config: Config, manifest: Manifest, earlier: Earlier | None, nodes: int = 1) -> Workload:
    """Returns the workload from options, which hold for `nodes` nodes, else from the earlier run with its own nodes."""
    values, sources = known(*said_of_program(config), earlier)
    compute_nodes = earlier.nodes if earlier is not None and config.epoch_compute_s is None else nodes
    return Workload(
        files=len(manifest),
        size_bytes=manifest.total_bytes,
        epochs=values["epochs"],
        epoch_compute_s=values["epoch_compute_s"],
        startup_s=values["startup_s"] or 0.0,
        readers=values["readers"],
        sources={"files": "scan", "size_bytes": "scan", **sources},
        compute_nodes=compute_nodes,
    )


# ---- the disks' rates


def _rates(
    config: Config,
    manifest: Manifest,
    wanted: Order,
    disk: Disk,
    earlier: Earlier | None,
    *,
    with_probe: bool,
) -> tuple[Rates, tuple[str, ...]]:
    if with_probe:
        ids = wanted.ids or orders.complete(wanted, len(manifest))
        measured = probe.probe(manifest, ids, disk.path, probe.Copying(transfers=config.transfers))
        rates, notes = measured.rates, measured.notes
    else:
        rates, notes = NOTHING_KNOWN, ("no probe: rates are from an earlier run or assumed",)
    if rates.source_bytes_per_s is None and earlier is not None and earlier.source_bytes_per_s is not None:
        source = {**rates.sources, "source_bytes_per_s": earlier.program.source}
        rates = replace(rates, source_bytes_per_s=earlier.source_bytes_per_s, sources=source)
    return rates, notes
