"""Chooses the order that a preview shows (a list's, a trace's, a named sampler's, or the manifest's) and describes it.

This module owns the look-up of an earlier run's trace and of how well a program kept to an order. The orders
themselves are in `plan.order`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.datasets import Resolved
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.order import orders, trace
from hpcstage.plan.order.readings import Asked, Readings, readings
from hpcstage.plan.types import Kept, Order

if TYPE_CHECKING:
    from hpcstage.config import Config

NO_TRACE = "no earlier run on these datasets left a trace"
_ANNOUNCED = "what PyTorch's samplers announce while the command runs goes first"
_FROM_TRACE = (orders.AUTO, orders.TRACE)


@dataclass(frozen=True)
class Foreseen:
    """An order, what the preview says of it, and the readings behind it where a sampler was named."""

    order: Order
    unknown: int = 0
    """Number of the lists' paths that the manifest lacks."""
    missing: str = ""
    """Text about these paths."""
    about: str = ""
    readings: Readings | None = None
    kept: Kept | None = None
    """How well the run that left the trace kept to its order."""


def foresee(
    config: Config, manifest: Manifest, resolved: Resolved, env: Mapping[str, str], asked: Asked | None
) -> Foreseen:
    """Returns the order with which a run would start, or in which a named sampler would read. Raises UsageError."""
    setting = config.order_asked()
    if asked is not None:
        if setting not in (orders.AUTO, orders.SAMPLER):
            what = f"a sampler and the order {setting} ({config.origin['order']}) are both given"
            raise UsageError(what, "use --order sampler")
        found = readings(asked, manifest, resolved.lists)
        return Foreseen(found.order(), about=f"{asked.text()}; {found.about}", readings=found)
    known, why = _trace(resolved, manifest, env) if setting in _FROM_TRACE else (None, "")
    ids = None if known is None else orders.from_ids(known.order, len(manifest), orders.TRACE)
    listed = orders.build_counting(manifest, setting, lists=resolved.ordering, trace=ids)
    order, unknown, missing = listed.order, listed.unknown, orders.missing_text(listed, resolved.ordering)
    if known is not None and order.provenance == orders.TRACE:
        header = known.header
        kept = None if header.kept_share is None else Kept(header.provenance, header.kept_share, header.run_id)
        about = f"left by run {header.run_id}: {shlex.join(header.command)}"
        return Foreseen(order, unknown, missing, about, kept=kept)
    return Foreseen(order, unknown, missing, _why_by_path(setting, why) if order.provenance == orders.MANIFEST else "")


def _trace(resolved: Resolved, manifest: Manifest, env: Mapping[str, str]) -> tuple[trace.Trace | None, str]:
    """Returns the trace that was written last for these datasets by any command, or why there is none."""
    from hpcstage.record.index import state_dir

    path = trace.newest(state_dir(env) / trace.DIRECTORY, [os.fsdecode(d.root) for d in resolved.datasets])
    if path is None:
        return None, NO_TRACE
    try:
        return trace.load(path, manifest), ""
    except trace.Unusable as reason:
        return None, str(reason)


def _why_by_path(setting: str, why: str) -> str:
    if setting == orders.MANIFEST:
        return "as asked for"
    if setting == orders.SAMPLER:
        return f"{_ANNOUNCED}; name a --sampler to see it beforehand"
    return why if setting == orders.TRACE else f"no list, and {why}; {_ANNOUNCED}"
