"""Describes the job that this process is part of: makes one `Job` from the environment; never runs a command and never
fails.

The module owns how facts of scheduler, launcher and host name are put together. `schedulers` owns what each scheduler
says.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpcstage.job import ranks as launcher
from hpcstage.job.ranks import Ranks
from hpcstage.job.schedulers import SCHEDULERS, ReadText, SchedulerFacts


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


def read_file(path: str) -> str:
    """Returns the text of a file that lists hosts."""
    return Path(path).read_text(encoding="utf-8")


def detect(
    env: Mapping[str, str], *, hostname: str, read_text: ReadText = read_file, parent_pid: int | None = None
) -> Job:
    """Returns the job that `env` belongs to.

    `parent_pid` tells apart launches that have no name of their own: the ranks of a node share their parent.
    """
    facts = next((f for scheduler in SCHEDULERS if (f := scheduler(env, read_text))), SchedulerFacts("none", ""))
    ranks = launcher.from_launcher(env)
    if ranks and facts.ranks and not ranks.launch:
        # Under srun with PMI both describe the same launch. srun may know what the MPI library's variables do not say.
        ranks = replace(ranks, launch=facts.ranks.launch, local_rank=_first(ranks.local_rank, facts.ranks.local_rank))
    ranks = ranks or facts.ranks
    name, nodes, index = _locate(facts, hostname, is_passed_on=ranks is not None and ranks.launch is None)
    return Job(
        scheduler=facts.scheduler,
        hostname=name,
        nodes=nodes,
        parts=facts.parts,
        node_index=index,
        job_id=facts.job_id or None,
        array_task=facts.array_task,
        rank=ranks.rank if ranks else None,
        local_rank=ranks.local_rank if ranks else None,
        is_rank=ranks is not None,
        end_time_unix_s=facts.end_time_unix_s,
        cpus=facts.cpus,
        slots=facts.slots,
        run_key=_run_key(facts, ranks, parent_pid) if ranks else None,
        notes=facts.notes,
    )


def here() -> Job:
    """Returns the job that this process belongs to."""
    return detect(os.environ, hostname=socket.gethostname(), parent_pid=os.getppid())


def jobs_in(env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of all jobs that `env` tells of, each with its scheduler's; a job inside another comes
    first."""
    found = (scheduler(env, _read_nothing) for scheduler in SCHEDULERS)
    return tuple(f"{facts.scheduler} {facts.job_id}" for facts in found if facts)


def _read_nothing(path: str) -> str:
    raise FileNotFoundError(path)


def _first(one: int | None, other: int | None) -> int | None:
    return other if one is None else one


def _locate(facts: SchedulerFacts, hostname: str, *, is_passed_on: bool) -> tuple[str, tuple[str, ...], int | None]:
    """Returns this host's name, the nodes, and its position among them, which is None on a login node (in salloc's
    shell).

    `is_passed_on` means that an MPI launcher may have brought the variables here from another node, whose name they
    hold.
    """
    names = (hostname, facts.node_name) if is_passed_on else (facts.node_name, hostname)
    for name in names:
        for index, node in enumerate(facts.nodes):
            if name and _same_host(node, name):
                return node, facts.nodes, index
    index_said = facts.node_index
    if facts.nodes and facts.may_be_elsewhere and (facts.node_name or index_said is None):
        # On a node Slurm says which node it is; a name that is not in the list comes from a job around this one.
        return hostname, facts.nodes, None
    if index_said is not None and index_said < len(facts.nodes):
        return facts.nodes[index_said], facts.nodes, index_said
    own = facts.node_name or hostname
    return own, (*facts.nodes, own), len(facts.nodes)


def _same_host(one: str, other: str) -> bool:
    return one == other or (one.partition(".")[0] == other.partition(".")[0] and ("." not in one or "." not in other))


def _run_key(facts: SchedulerFacts, ranks: Ranks, parent_pid: int | None) -> str | None:
    if ranks.ranks == 1:
        return None
    launch = facts.step_id if ranks.launch == f"step-{facts.step_id}" else ranks.launch
    if launch is None:
        if parent_pid is None:
            return None
        launch = f"parent-{parent_pid}"
    elif "torchelastic" in launch and parent_pid is not None:
        # The default of --rdzv-id is "none", which is not unique.
        launch = f"{launch}-{parent_pid}"
    job = facts.job_id or "local"
    again = f".r{facts.restarts}" if facts.restarts else ""
    return file_name(f"{facts.scheduler}-{job}.{launch}{again}")


def file_name(key: str) -> str:
    """Returns a key that is safe as a part of a path; a hash keeps long or strange keys apart."""
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_.[]") else "_" for c in key)
    if plain == key and len(key) <= 64:
        return key
    import hashlib

    return f"{plain[:48]}-{hashlib.sha256(key.encode('utf-8', 'surrogateescape')).hexdigest()[:12]}"
