"""Collects everything that a plan follows from, besides what is measured: from the configuration for `hpcstage plan`,
from the daemon's specification for a run.

Equal inputs and equal measurements give equal plans, whoever makes them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.errors import LocalDiskProblem
from hpcstage.plan.budget import BudgetFacts
from hpcstage.plan.dataset.datasets import Resolved, resolve
from hpcstage.preview import program
from hpcstage.preview.program import KnownProgram

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.job.types import Job
    from hpcstage.plan.order.readings import SamplerAsked
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
class Copying:
    """The run's settings for copying on one node."""

    copiers: int = 1
    transfers: int = 32
    """The most transfers in flight per copier."""
    max_rate_bytes_per_s: float | None = None
    """The cap of the whole job."""
    nice: int = 0


@dataclass(frozen=True)
class Inputs:
    """The input of the pipeline."""

    resolved: Resolved
    order: str
    """`auto`, `manifest`, `given`, `trace`, `sampler` or the path of a list: see `plan.order.orders`."""
    disk: Disk
    copying: Copying
    nodes: int
    placement: str
    program: KnownProgram
    """The values that options set."""
    env: Mapping[str, str]
    """The environment that says where earlier runs of the user are found."""
    state_dir: Path | None
    """The user's directory in which traces are kept; None: none is read."""
    command: tuple[str, ...] | None = None
    """The command of the run; None: it is not known, and the last trace of any command is used."""
    sampler: SamplerAsked | None = None
    """The sampler of the program to be run, as the user named it."""
    exclude: tuple[bytes, ...] = ()
    """Absolute directories that are not scanned."""

    @classmethod
    def of_config(
        cls, config: Config, env: Mapping[str, str], cwd: Path, sampler: SamplerAsked | None = None
    ) -> Inputs:
        """Returns the inputs of a run with this configuration. Raises UsageError for datasets that cannot be used."""
        from hpcstage.job import detect, share, together
        from hpcstage.record.index import state_dir

        host = socket.gethostname()
        job = detect(env, hostname=host)
        local, why = _local(config, env, job)
        group = together.planned(config, job, local, host)
        nodes, shares = (1, 1) if group is None else (len(group.hosts), group.shares)
        disk = _disk(config, job, local, why, shares)
        return cls(
            resolved=resolve(config.data, cwd, disk.device, config.order_asked()),
            order=config.order_asked(),
            disk=disk,
            copying=Copying(
                config.copier_count(share.usable_cpus(job, shares)),
                config.transfers,
                config.max_rate_bytes_per_s,
                config.nice,
            ),
            nodes=nodes,
            placement=config.placement,
            program=program.asked(config),
            env=env,
            state_dir=state_dir(env),
            sampler=sampler,
        )

    @classmethod
    def of_spec(cls, spec: DaemonSpec, resolved: Resolved) -> Inputs:
        """Returns the inputs of a run that has begun."""
        values = {name: getattr(spec, name) for name in program.OPTIONS}
        return cls(
            resolved=resolved,
            order=spec.order,
            disk=Disk(Path(spec.node_dir), spec.node_dir, spec.budget),
            copying=Copying(spec.copiers, spec.transfers, spec.max_rate_bytes_per_s, spec.nice),
            nodes=spec.node_count,
            placement=spec.placement,
            program=KnownProgram(**values, sources=spec.workload_sources),
            env=os.environ,
            state_dir=Path(spec.state_dir) if spec.state_dir else None,
            command=tuple(spec.command),
            exclude=tuple(os.fsencode(os.path.realpath(path)) for path in (spec.node_dir, spec.run_dir)),
        )

    @property
    def copying_on_a_node(self) -> Copying:
        """Returns the settings for copying with the node's part of the cap."""
        rate = self.copying.max_rate_bytes_per_s
        return replace(self.copying, max_rate_bytes_per_s=None if rate is None else rate / self.nodes)


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
