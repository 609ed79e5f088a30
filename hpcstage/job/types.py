"""What is known about the job that this process is part of. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """Where am I? None is unknown."""

    scheduler: str
    """slurm, pbs, gridengine, pjm, lsf, flux or none."""
    hostname: str
    """This node, as the scheduler names it if it does."""
    nodes: tuple[str, ...]
    """The nodes of the job (of the step, behind srun), in the scheduler's order. This host is among them, unless
    `node_index` is None."""
    node_index: int | None = 0
    """Position of this node in `nodes`; None: this host is no node of the job (salloc runs its command there)."""
    parts: tuple[tuple[str, ...], ...] = ()
    """In front of the launcher of a heterogeneous Slurm job (`sbatch a : b`): `nodes` by part."""
    job_id: str | None = None
    array_task: str | None = None
    step_id: str | None = None
    rank: int | None = None
    """Behind a launcher: number of this process among all."""
    local_rank: int | None = None
    ranks: int | None = None
    is_rank: bool = False
    """Behind a launcher (`srun hpcstage run ...`): one wrapper per rank, several on a node."""
    submit_dir: str | None = None
    end_time_unix_s: float | None = None
    """When the scheduler will end the job."""
    cpus: int | None = None
    """Processors of the job on this node."""
    run_key: str | None = None
    """The same for all wrappers of one launch on one node, and for no other launch; None: this wrapper is alone."""
    notes: tuple[str, ...] = ()
    """What the scheduler said and could not be understood."""
