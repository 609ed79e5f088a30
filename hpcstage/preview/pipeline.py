"""Makes the first steps of a plan, for runs and for `hpcstage plan`: scans, and finds the order with which a run starts
(a list's, a trace's, or the manifest's).

This module owns the look-up of an earlier run's trace. The orders themselves are in `plan.order`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.plan.dataset.datasets import Datasets, resolve, to_stage
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.scan import ScanResult, scan
from hpcstage.plan.dataset.spelling import Spelling
from hpcstage.plan.order import orders, trace
from hpcstage.plan.types import Order, follows_samplers
from hpcstage.problem import Problem

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.protocol.daemonspec import DaemonSpec

NOT_ASKED = "not looked for: --order names another order"
NO_STATE = "there is no state directory"
_ANNOUNCED = "what PyTorch's samplers announce while the command runs goes first"


@dataclass(frozen=True)
class PlanInputs:
    """The input of the scan and of the search for an order."""

    datasets: Datasets
    order: str
    """`auto`, `manifest`, `given`, `trace`, `sampler` or the path of a list: see `plan.order.orders`."""
    state_dir: Path | None
    """The user's directory in which traces are kept; None: none is read."""
    command: tuple[str, ...] | None = None
    """The command of the run; None: it is not known, and the last trace of any command is used."""
    exclude: tuple[bytes, ...] = ()
    """Absolute directories that are not scanned."""
    local: tuple[Problem, ...] = ()
    """What to tell of datasets that are on the local disk already; they are staged only if all are."""

    @classmethod
    def of_config(cls, config: Config, env: Mapping[str, str], cwd: Path, local_device: int | None) -> PlanInputs:
        """Returns the inputs of a run with this configuration. Raises UsageError for datasets that cannot be used."""
        from hpcstage.record.index import state_dir

        order = config.order_asked()
        datasets, local = to_stage(resolve(config.data, cwd, order), local_device)
        return cls(datasets, order, state_dir(env), local=tuple(local.values()))

    @classmethod
    def of_spec(cls, spec: DaemonSpec, datasets: Datasets) -> PlanInputs:
        """Returns the inputs of a run that has begun."""
        return cls(
            datasets=datasets,
            order=spec.order,
            state_dir=Path(spec.state_dir) if spec.state_dir else None,
            command=tuple(spec.command),
            exclude=tuple(os.fsencode(os.path.realpath(path)) for path in (spec.node_dir, spec.run_dir)),
        )


@dataclass(frozen=True)
class FoundOrder:
    """An order, what a plan says of it, and what it was made of."""

    order: Order
    unknown: int = 0
    """Number of the lists' paths that the manifest lacks."""
    missing: str = ""
    """Text about these paths."""
    about: str = ""
    """Text about the order, for people."""


@dataclass(frozen=True)
class FoundFiles:
    """The files and their order."""

    scan: ScanResult
    order: FoundOrder


def find(inputs: PlanInputs, on_found: Callable[[int, int], None] = lambda _files, _bytes: None) -> FoundFiles:
    """Scans the datasets and finds the order. Calls `on_found` with the files and bytes found so far, a few times a
    second. Raises UsageError for an order that cannot be used."""
    result = scan(inputs.datasets, exclude=inputs.exclude, on_found=on_found)
    return FoundFiles(result, _find_order(inputs, result.manifest))


def _find_order(inputs: PlanInputs, manifest: Manifest) -> FoundOrder:
    """Returns the order with which a run would start."""
    datasets, setting = inputs.datasets, inputs.order
    known, why = _trace(inputs, manifest)
    spelt = Spelling(manifest)
    listed = orders.build(
        manifest,
        setting or None,
        lists=[replace(item, paths=list(map(spelt, item.paths))) for item in datasets.ordering],
        trace=None if known is None else orders.from_ids(known.order, len(manifest), orders.TRACE),
    )
    about = ""
    if known is not None and listed.order.provenance == orders.TRACE:
        header = known.header
        about = f"left by run {header.run_id}: {shlex.join(header.command)}"
    elif listed.order.provenance == orders.MANIFEST:
        about = _why_by_path(setting, why)
    missing = orders.missing_text(listed, datasets.ordering)
    return FoundOrder(listed.order, listed.unknown, missing, about)


def _trace(inputs: PlanInputs, manifest: Manifest) -> tuple[trace.Trace | None, str]:
    """Returns the trace of the command on these files, or the one that any command wrote last where the command is not
    known; or None and why there is none."""
    if not (follows_samplers(inputs.order or None) or inputs.order == orders.TRACE):
        return None, NOT_ASKED
    if inputs.state_dir is None:
        return None, NO_STATE
    directory = inputs.state_dir / trace.DIRECTORY
    roots = [os.fsdecode(dataset.root) for dataset in inputs.datasets.all]
    if inputs.command is not None:
        return trace.find(directory, roots, inputs.command, manifest)
    return trace.newest(directory, roots, manifest)


def _why_by_path(setting: str, why: str) -> str:
    if setting == orders.MANIFEST:
        return "as asked for"
    if setting == orders.SAMPLER:
        return _ANNOUNCED
    return why if setting == orders.TRACE else f"no list, and {why}; {_ANNOUNCED}"
