"""Collects everything that a plan follows from: from the configuration for `hpcstage plan`, from the daemon's
specification for a run.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.errors import LocalDiskProblem
from hpcstage.plan.budget import BudgetFacts
from hpcstage.plan.dataset.datasets import Datasets, resolve, to_stage
from hpcstage.problem import Problem

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.job.types import Job
    from hpcstage.protocol.daemonspec import DaemonSpec


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
        from hpcstage.job import detect, together

        host = socket.gethostname()
        job = detect(env, hostname=host)
        local, why = _local(config, env, job)
        group = together.planned(config, job, local, host)
        nodes, shares = (1, 1) if group is None else (len(group.hosts), group.shares)
        disk = _disk(config, job, local, why, shares)
        return cls(disk, nodes, config.placement, config.max_rate_bytes_per_s, told, env)


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
    def of_config(cls, config: Config, env: Mapping[str, str], cwd: Path, disk: Disk) -> PlanInputs:
        """Returns the inputs of a run with this configuration. Raises UsageError for datasets that cannot be used."""
        from hpcstage.record.index import state_dir

        order = config.order_asked()
        datasets, local = to_stage(resolve(config.data, cwd, order), disk.device)
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


def _local(config: Config, env: Mapping[str, str], job: Job) -> tuple[LocalDir | None, str]:
    """Returns the local directory that a run here would use, and why there is none."""
    from hpcstage.job import localdir

    try:
        return localdir.choose(config.local_dir, env, job), "none, as asked for"
    except LocalDiskProblem as error:
        return None, f"none here: {error.what}"


def _disk(config: Config, job: Job, local: LocalDir | None, why_none: str, shares: int) -> Disk:
    from hpcstage.job import share

    if local is None:
        return Disk(None, why_none)
    facts = share.budget_facts(config.budget_asked(), job, local, shares)
    return Disk(local.path, f"{local.path} ({local.why})", facts, local.device)
