"""Makes a plan in steps: scan, order, budget, probe, forecast. `hpcstage plan` and a run in mode auto make it here.

This module owns where each input of the forecast comes from: an option, the command, the record of an earlier run, the
probe, or nothing (then `plan.forecast` assumes a value and says so). `find` is all that a run in another mode needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.scan import ScanResult, scan
from hpcstage.plan.order import orders
from hpcstage.plan.types import Budget, Rates, Workload
from hpcstage.preview.inputs import Inputs
from hpcstage.preview.orders import FoundOrder, find_order
from hpcstage.preview.planfile import Plan, ScanSummary
from hpcstage.preview.program import OPTIONS, Earlier, find_earlier, known
from hpcstage.store import directory

DAEMON_START_S = 0.25
"""Seconds from the start of the command to the start of the daemon's scan, on an idle node."""
RUN_PROBE_S = 0.5
"""The time limit of the probe of a run in mode auto; copying begins after it."""
NOT_PROBED = "no probe: rates are from an earlier run or assumed"


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


@dataclass(frozen=True)
class PlanFacts:
    """The result of the steps that look at the machine and at earlier runs; the forecast follows from it."""

    earlier: Earlier | None
    budget: Budget | None
    rates: Rates
    """The rates that the probe measured."""
    notes: tuple[str, ...]
    """Notes of the probe."""
    probe_s: float
    """The seconds that the probe of a run takes, in a run those that it took."""


def find(inputs: Inputs, on_found: Callable[[int, int], None] = lambda _files, _bytes: None) -> FoundFiles:
    """Scans the datasets and finds the order. Calls `on_found` with the files and bytes found so far, a few times a
    second. Raises UsageError for an order that cannot be used."""
    result = scan(inputs.resolved, exclude=inputs.exclude, on_found=on_found)
    return FoundFiles(result, find_order(inputs, result.manifest))


def look(inputs: Inputs, found: FoundFiles, probe_s: float, opened: Callable[[], Iterable[bytes]] = tuple) -> PlanFacts:
    """Decides the budget, looks for an earlier run, and measures the rates for about `probe_s` seconds (0: not).
    `opened` returns the paths of files of the datasets that programs of the run have open."""
    disk, manifest = inputs.disk, found.scan.manifest
    budget = None if disk.path is None or disk.facts is None else directory.budget(disk.path, disk.facts)
    if not probe_s:
        return PlanFacts(_earlier(inputs, Rates()), budget, Rates(), (NOT_PROBED,), RUN_PROBE_S)
    from hpcstage.preview.probe import probe

    ids = found.order.order.ids or orders.complete(found.order.order, len(manifest))
    measured = probe(manifest, ids, disk.path, inputs.copying_on_a_node, limit_s=probe_s, opened=opened)
    run_probe_s = min(measured.seconds, RUN_PROBE_S + max(0.0, measured.seconds - probe_s))
    return PlanFacts(_earlier(inputs, measured.rates), budget, measured.rates, measured.notes, run_probe_s)


def _earlier(inputs: Inputs, rates: Rates) -> Earlier | None:
    """Looks for an earlier run; in a run, only where its record tells something that is not known yet."""
    if inputs.command is not None and rates.source_bytes_per_s is not None:
        program = known(inputs.program, None, inputs.command)
        if all(getattr(program, name) is not None for name in OPTIONS):
            return None
    return find_earlier(inputs.resolved.datasets, inputs.env)


def forecast(inputs: Inputs, found: FoundFiles, facts: PlanFacts) -> Plan:
    """Returns the whole plan. Pure."""
    from hpcstage.plan.forecast import modes
    from hpcstage.plan.forecast.nodes import Given, nodes_plan
    from hpcstage.plan.forecast.terms import Conditions
    from hpcstage.plan.placement.fitting import fit
    from hpcstage.plan.placement.placements import Placing

    plan, manifest, nodes, earlier = found.plan, found.scan.manifest, inputs.nodes, facts.earlier
    workload = _workload(inputs, manifest, earlier)
    rates = _with_earlier(facts.rates, earlier)
    fitting = fit(manifest, orders.complete(plan.order, len(manifest)), facts.budget) if facts.budget else None
    conditions = Conditions(
        fit=fitting.share if fitting else 1.0,
        order_known=plan.order.provenance != orders.MANIFEST,
        begin_s=DAEMON_START_S + found.scan.seconds + facts.probe_s,
        max_rate_bytes_per_s=inputs.copying.max_rate_bytes_per_s,
    )
    many = None
    if nodes > 1:
        directories = fitting.needed_inodes - len(manifest) if fitting else 0
        given = Given(manifest.sizes, facts.budget, directories, inputs.placement, conditions)
        many = nodes_plan(given, workload, rates, nodes)
        conditions = replace(conditions, nodes=nodes, sharing=given.sharing(nodes, Placing(many.kind)))
    result = modes.forecast(workload.on(nodes), rates, conditions)
    return replace(
        plan,
        probe_s=facts.probe_s,
        local=inputs.disk.text,
        budget=facts.budget,
        fit=fitting,
        workload=workload,
        rates=rates,
        forecast=result,
        mode=result.choice,
        notes=(*(f"{notice.text}; {notice.remedy}" for notice in inputs.resolved.warnings), *plan.notes, *facts.notes),
        nodes=many,
    )


def _workload(inputs: Inputs, manifest: Manifest, earlier: Earlier | None) -> Workload:
    """Returns the workload. The compute time of options holds for the job's nodes, that of an earlier run for its
    own."""
    program = known(inputs.program, earlier, inputs.command or ())
    is_earlier = earlier is not None and inputs.program.epoch_compute_s is None
    return Workload(
        files=len(manifest),
        size_bytes=manifest.total_bytes,
        epochs=program.epochs,
        epoch_compute_s=program.epoch_compute_s,
        startup_s=program.startup_s or 0.0,
        readers=program.readers,
        sources={"files": "scan", "size_bytes": "scan", **program.sources},
        compute_nodes=earlier.nodes if earlier is not None and is_earlier else inputs.nodes,
    )


def _with_earlier(rates: Rates, earlier: Earlier | None) -> Rates:
    """Returns the rates with that of the source from the earlier run where the probe did not measure it."""
    if rates.source_bytes_per_s is not None or earlier is None or earlier.source_bytes_per_s is None:
        return rates
    sources = {**rates.sources, "source_bytes_per_s": earlier.program.source}
    return replace(rates, source_bytes_per_s=earlier.source_bytes_per_s, sources=sources)
