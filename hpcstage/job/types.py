"""Describes the job that this process is part of. Holds values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """The known facts about the job. A field that is None is unknown, unless its own text says otherwise."""

    scheduler: str
    """The scheduler's name in `job.schedulers`; none without a scheduler."""
    hostname: str
    """This node's name, as the scheduler writes it if it does."""
    nodes: tuple[str, ...]
    """The nodes of the job (of the step, behind srun), in the scheduler's order. This host is among them, unless
    `node_index` is None."""
    node_index: int | None = 0
    """Position of this node in `nodes`; None if this host is no node of the job (salloc runs its command there)."""
    parts: tuple[tuple[str, ...], ...] = ()
    """The same as `nodes`, by part, in front of the launcher of a heterogeneous Slurm job (`sbatch a : b`)."""
    job_id: str | None = None
    array_task: str | None = None
    rank: int | None = None
    """The number of this process among all, behind a launcher."""
    local_rank: int | None = None
    is_rank: bool = False
    """Whether this process is behind a launcher (`srun hpcstage run ...`): one wrapper per rank, several on a node."""
    end_time_unix_s: float | None = None
    """When the scheduler will end the job, in seconds of Unix time."""
    cpus: int | None = None
    """The number of processors of the job on this node."""
    slots: tuple[int, ...] = ()
    """The slots of each node, where the scheduler starts about as many processes on one at a time (Grid Engine)."""
    run_key: str | None = None
    """A name that all wrappers of one launch on one node share, and no other launch has; None if this wrapper is
    alone."""
    notes: tuple[str, ...] = ()
    """Notes on what the scheduler said that could not be understood."""
