"""Collects the figures that a forecast needs: from the user's options, else from the record of an earlier run.

This module owns where each figure is from.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcstage.errors import HpcstageError
from hpcstage.plan.forecast import OF_RATES, OF_WORKLOAD
from hpcstage.plan.types import Dataset, Rates, Workload

if TYPE_CHECKING:
    from hpcstage.plan.dataset.manifest import Manifest
    from hpcstage.record.workload import Measured

OPTIONS = {
    "epochs": "--epochs",
    "epoch_compute_s": "--epoch-compute",
    "readers": "--readers",
    "startup_s": "--startup",
    "source_bytes_per_s": "--source-rate",
    "reader_bytes_per_s": "--reader-rate",
    "local_bytes_per_s": "--local-rate",
    "peer_bytes_per_s": "--peer-rate",
}
"""Maps the name of a figure to the option that tells it."""


@dataclass(frozen=True)
class EarlierRun:
    """The program, the source and the disk as the record of an earlier run with the same datasets describes them."""

    measured: Measured
    nodes: int = 1


def known(
    told: Mapping[str, float], earlier: EarlierRun | None, manifest: Manifest, nodes: int
) -> tuple[Workload, Rates]:
    """Returns what is known. The compute time of an option holds for the job's nodes, that of an earlier run for its
    own."""
    is_earlier = earlier is not None and "epoch_compute_s" not in told
    return Workload(
        files=len(manifest),
        size_bytes=manifest.total_bytes,
        compute_nodes=earlier.nodes if earlier is not None and is_earlier else nodes,
        **_figures(OF_WORKLOAD, told, earlier),
    ), Rates(**_figures(OF_RATES, told, earlier))


def _figures(names: Sequence[str], told: Mapping[str, float], earlier: EarlierRun | None) -> dict[str, Any]:
    values, sources = dict[str, float](), dict[str, str]()
    for name in names:
        found = None if earlier is None else getattr(earlier.measured, name, None)
        if name in told:
            values[name], sources[name] = told[name], f"option {OPTIONS[name]}"
        elif earlier is not None and found is not None:
            values[name], sources[name] = found, earlier.measured.source
    return {**values, "sources": sources}


def find_earlier(datasets: Sequence[Dataset], env: Mapping[str, str]) -> EarlierRun | None:
    """Returns the last successful run on these datasets; None if there is none or its record cannot be read."""
    from hpcstage.record import files, index, workload

    try:
        run_dir = index.find([os.fsdecode(d.root) for d in datasets], env)
        if run_dir is None:
            return None
        record = files.load_run(run_dir)
        return EarlierRun(workload.workload_of(record), max(1, len(record.nodes)))
    except (HpcstageError, OSError, TypeError, ValueError, LookupError, AttributeError):
        return None
