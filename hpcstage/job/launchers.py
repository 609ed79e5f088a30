"""Builds the command lines and environments that start processes on the other nodes of a job. Pure; starts nothing.

The module owns what is known of srun, pbsdsh, qrsh, pjrsh (the last from its description, never tried) and of MPI's own
launchers. Every command line is given a program whose words hold no spaces and no shell characters (a script), since
some launchers pass their words to a shell again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hpcstage.job.environment import Job
from hpcstage.job.ranks import without_rank

BY_SCHEDULER = {"slurm": "srun", "pbs": "pbsdsh", "gridengine": "qrsh", "pjm": "pjrsh"}
"""Other schedulers (LSF, Flux) are left to their MPI's launcher, which knows them."""
NONE = "none"
VIRTUAL = "virtual"
"""All nodes are this machine."""

_SRUN = ("--overlap", "--mem=0", "--export=ALL", "--cpu-bind=none", "--quiet")
_SRUN_INPUT = (
    "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TASKS_PER_NODE", "SLURM_MEM_PER_", "SLURM_CPUS_PER_", "SLURM_GPUS",
    "SLURM_TRES_PER_", "SLURM_THREADS_PER_CORE", "SLURM_DISTRIBUTION", "SLURM_CPU_BIND", "SLURM_MEM_BIND",
    "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_HINT", "SLURM_OPEN_MODE", "SLURM_EXPORT_ENV", "SLURM_KILL_BAD_EXIT",
    "SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_MPI_TYPE", "SRUN_",
    "SLURM_ARBITRARY", "SLURM_HOSTFILE", "SLURM_LABELIO", "SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE",
    "SLURM_NO_KILL",
)  # fmt: skip
"""Variables that srun takes as options, or that tell an MPI library that it runs within a step."""


class Mpi(Enum):
    """Tells kinds of `mpiexec` apart by the options that they take."""

    HYDRA = "hydra"
    """MPICH, Intel MPI, MVAPICH."""
    OPENMPI = "openmpi"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class PerNode:
    """Holds command lines that start one process on each of some nodes."""

    commands: tuple[tuple[str, ...], ...]
    takes_stdin: bool
    """Whether the end of the launcher's standard input reaches the processes; otherwise they must find out in another
    way."""
    passes_output: bool = True
    """Whether the launcher prints what the processes print; otherwise their lines would land in the job's output."""
    exact: bool = True
    """Whether one process starts on each named node; otherwise they start on all nodes of the job, possibly several on
    one."""


def choose(job: Job, asked: str = "auto") -> str:
    """Returns the launcher for this job: what the user asked for, else the scheduler's own."""
    if asked != "auto":
        return asked
    return BY_SCHEDULER.get(job.scheduler, "mpiexec" if len(job.nodes) > 1 else NONE)


def per_node(
    launcher: str,
    argv: Sequence[str],
    hosts: Sequence[str],
    mpi: Mpi = Mpi.UNKNOWN,
    parts: Sequence[Sequence[str]] = (),
) -> PerNode:
    """Returns how to start `argv` once on each of `hosts`, with no commands if nothing can start it. `parts` are the
    job's nodes by part. Virtual nodes, all but the first, are told their numbers."""
    if not hosts or launcher == NONE:
        return PerNode((), takes_stdin=False)
    if launcher == VIRTUAL:
        return PerNode(tuple((*argv, str(index)) for index in range(1, len(hosts) + 1)), takes_stdin=True)
    if launcher == "srun":
        # The processes on the other nodes outlive a node that is lost, where the job does.
        last = ("--mpi=none", "--no-kill", "--kill-on-bad-exit=0", "--wait=0", *argv)
        return PerNode(tuple(("srun", *words, *last) for words in _steps(hosts, parts)), takes_stdin=True)
    if launcher == "pbsdsh":
        # Its node numbers count lines of the node file at some sites and processors at others; starting on all nodes is
        # safe.
        return PerNode((("pbsdsh", "--", *argv),), takes_stdin=False, passes_output=False, exact=False)
    if launcher == "qrsh":
        return PerNode(tuple(("qrsh", "-inherit", host, *argv) for host in hosts), takes_stdin=True)
    if launcher == "pjrsh":
        return PerNode(tuple(("pjrsh", host, *argv) for host in hosts), takes_stdin=False)
    return PerNode(((*_mpiexec("mpiexec", hosts, mpi), *argv),), takes_stdin=False)


def mpi_world(
    launcher: str,
    argv: Sequence[str],
    hosts: Sequence[str],
    mpi: Mpi,
    mpiexec: str | None,
    parts: Sequence[Sequence[str]] = (),
) -> list[tuple[str, ...]]:
    """Returns command lines for one MPI program with one process per node, the best first; the next one is for where it
    fails."""
    found = []
    if launcher == "srun":
        # MPICH speaks PMI-2 to srun, Open MPI speaks PMIx; the wrong one starts programs of one process each.
        kind = "pmix" if mpi is Mpi.OPENMPI else "pmi2"
        last = (f"--mpi={kind}", "--kill-on-bad-exit=1", *argv)
        first, *others = _steps(hosts, parts)
        found.append(("srun", *first, *last, *(word for words in others for word in (":", *words, *last))))
    if mpiexec is not None and launcher != NONE:
        start = _virtual(mpiexec, len(hosts), mpi) if launcher == VIRTUAL else _mpiexec(mpiexec, hosts, mpi)
        found.append((*start, *argv))
    return found


def kind_of_mpi(version_text: str) -> Mpi:
    """Returns the kind of MPI that the output of `mpiexec --version` names."""
    if "HYDRA" in version_text or "Intel(R) MPI" in version_text or "MPICH" in version_text:
        return Mpi.HYDRA
    if any(name in version_text for name in ("Open MPI", "OpenRTE", "Open RTE", "OpenMPI", "PRTE", "prterun")):
        return Mpi.OPENMPI
    return Mpi.UNKNOWN


def scrubbed(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment for a launcher that hpcstage starts: without that of a rank and without options for the
    user's srun."""
    kept = {name: value for name, value in without_rank(env).items() if not name.startswith(_SRUN_INPUT)}
    # Without these Open MPI refuses root; other MPIs do not know the names.
    return {**kept, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _steps(hosts: Sequence[str], parts: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Returns srun's options that start one task on each host, for each part of the job that has any of the hosts."""
    if len(parts) < 2:
        return [_step(hosts)]
    here = [[host for host in hosts if host in part] for part in parts]
    return [(*_step(some), f"--het-group={index}") for index, some in enumerate(here) if some]


def _step(hosts: Sequence[str]) -> tuple[str, ...]:
    count = len(hosts)
    return (*_SRUN, f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(hosts)}")


def _mpiexec(mpiexec: str, hosts: Sequence[str], mpi: Mpi) -> tuple[str, ...]:
    count = str(len(hosts))
    if mpi is Mpi.OPENMPI:
        named = ",".join(f"{host}:1" for host in hosts)
        return (mpiexec, "-n", count, "--map-by", "ppr:1:node", "--bind-to", "none", "--host", named)
    if mpi is Mpi.HYDRA:
        return (mpiexec, "-n", count, "-ppn", "1", "-hosts", ",".join(hosts))
    return (mpiexec, "-n", count, "-host", ",".join(hosts))


def _virtual(mpiexec: str, count: int, mpi: Mpi) -> tuple[str, ...]:
    if mpi is Mpi.OPENMPI:
        return (mpiexec, "-n", str(count), "--oversubscribe", "--bind-to", "none")
    if mpi is Mpi.HYDRA:
        return (mpiexec, "-launcher", "fork", "-n", str(count))
    return (mpiexec, "-n", str(count))
