"""Makes a plan in steps: scan and order, for runs and for `hpcstage plan`, then budget and forecast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hpcstage.plan.dataset.scan import ScanResult, scan
from hpcstage.plan.order import orders
from hpcstage.preview.findorder import FoundOrder, find_order
from hpcstage.preview.inputs import ForecastInputs, PlanInputs
from hpcstage.preview.plan import Plan, ScanSummary

DAEMON_START_S = 0.25
"""Seconds from the start of the command to the start of the daemon's scan, on an idle node."""


@dataclass(frozen=True)
class FoundFiles:
    """The result of the first steps: the files and their order."""

    scan: ScanResult
    order: FoundOrder

    @property
    def plan(self) -> Plan:
        """Returns the plan as far as it is known without a forecast."""
        found = self.order
        return Plan(
            manifest=self.scan.manifest,
            found=found,
            scan=ScanSummary.of(self.scan),
            notes=(f"{found.missing} ({orders.MISSING_REMEDY})",) if found.missing else (),
        )


def find(inputs: PlanInputs, on_found: Callable[[int, int], None] = lambda _files, _bytes: None) -> FoundFiles:
    """Scans the datasets and finds the order. Calls `on_found` with the files and bytes found so far, a few times a
    second. Raises UsageError for an order that cannot be used."""
    result = scan(inputs.datasets, exclude=inputs.exclude, on_found=on_found)
    return FoundFiles(result, find_order(inputs, result.manifest))


def foresee(inputs: PlanInputs, given: ForecastInputs, found: FoundFiles) -> Plan:
    """Returns the whole plan: what fits, each node's part, and the forecast, or the figures that it lacks."""
    from hpcstage.plan.forecast import Conditions, forecast, missing_figures
    from hpcstage.plan.placement.fitting import fit
    from hpcstage.plan.placement.nodesplan import NodesInput, nodes_plan
    from hpcstage.plan.placement.placements import Placing
    from hpcstage.preview.earlierrun import OPTIONS, find_earlier, known
    from hpcstage.store import storedir

    plan, manifest, disk, nodes = found.plan, found.scan.manifest, given.disk, given.nodes
    earlier = find_earlier(inputs.datasets.all, given.env)
    workload, rates = known(given.told, earlier, manifest, nodes)
    budget = None if disk.path is None or disk.facts is None else storedir.budget(disk.path, disk.facts)
    fitting = fit(manifest, orders.complete(plan.order, len(manifest)), budget) if budget else None
    conditions = Conditions(
        fit=fitting.share if fitting else 1.0,
        order_known=plan.order.provenance != orders.MANIFEST,
        begin_s=DAEMON_START_S + found.scan.seconds,
        max_rate_bytes_per_s=given.max_rate_bytes_per_s,
    )
    many = None
    if nodes > 1:
        directories = fitting.needed_inodes - len(manifest) if fitting else 0
        several = NodesInput(manifest.sizes, budget, directories, given.placement)
        many = nodes_plan(several, nodes)
        conditions = replace(conditions, nodes=nodes, sharing=several.sharing(nodes, Placing(many.kind)))
    missing = missing_figures(workload, rates, nodes)
    return replace(
        plan,
        local=disk.text,
        budget=budget,
        fit=fitting,
        workload=workload,
        rates=rates,
        missing=tuple(OPTIONS[name] for name in missing),
        forecast=None if missing else forecast(workload.on(nodes), rates, conditions),
        notes=(
            *(f"{notice.text}; {notice.remedy}" for notice in inputs.local),
            *plan.notes,
        ),
        nodes=many,
    )
