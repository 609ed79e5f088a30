"""Finds the rank of a process behind a launcher, from variables of MPI libraries, torchrun and schedulers. Pure.

MPI goes before the scheduler: `mpirun` within one Slurm task passes SLURM_LOCALID=0 on to all its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple


class _Names(NamedTuple):
    """The variables of one launcher or library: of the rank, the rank on the node, the number of ranks."""

    rank: str
    local_ranks: tuple[str, ...]
    ranks: tuple[str, ...]


_LAUNCHERS = (
    _Names("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_SIZE",)),
    _Names("PMI_RANK", ("MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID"), ("PMI_SIZE",)),
    _Names("PMIX_RANK", ("PLE_RANK_ON_NODE", "JSM_NAMESPACE_LOCAL_RANK"), ("PMIX_SIZE",)),
    _Names("PALS_RANKID", ("PALS_LOCAL_RANKID",), ("PALS_SIZE",)),
    _Names("FLUX_TASK_RANK", ("FLUX_TASK_LOCAL_ID",), ("FLUX_JOB_SIZE",)),
)
"""A launcher inside another passes the outer one's variables on: what the first that names a rank leaves out is taken
from one that names the same rank."""
_LAUNCH = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "JSM_NAMESPACE_ID", "TORCHELASTIC_RUN_ID")

_OF_RANK = (
    "PMI_", "PMIX_", "HYDI_", "OMPI_", "PRTE_", "FLUX_TASK_", "MV2_COMM_WORLD_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS",
    "MPI_RANKID", "I_MPI_INFO_", "I_MPI_PIN_MAPPING", "I_MPI_PIN_INFO", "PALS_RANKID", "PALS_LOCAL_", "PALS_SIZE",
    "PALS_NODEID", "PALS_APID", "PALS_APINFO", "PALS_SPOOL_DIR", "PALS_FD", "PALS_NRANKS", "PALS_PPN", "PALS_DEPTH",
    "PALS_CPU_BIND", "PALS_HOST",
)  # fmt: skip
"""Variables whose names begin so say which rank a process is, or how many ranks the user's launcher starts."""
_SETTINGS = ("OMPI_MCA_", "OMPI_ALLOW_", "PRTE_MCA_", "PRTE_ALLOW_", "PMIX_MCA_")
"""Variables with these names are settings that say how to start: the remote shell, the interfaces, the transports."""
_MCA_OF_RANK = (
    "PREFIXES", "cpu_type", "ess", "initial_wdir", "num_procs", "shmem_RUNTIME_QUERY_hint",
    *(f"{runtime}_{name}" for runtime in ("orte", "prte") for name in (
        "app_num", "bound_at_launch", "ess_", "hnp_uri", "jobfam_session_dir", "jobid", "local_daemon_uri",
        "num_nodes", "parent_uri", "precondition_transports", "top_session_dir", "vpid",
    )),
)  # fmt: skip
_MCA_OF_RANK_WHOLE = ("orte_launch", "prte_launch")


@dataclass(frozen=True)
class Ranks:
    """The rank of a process behind a launcher."""

    rank: int
    local_rank: int | None
    ranks: int | None
    launch: str | None
    """The launcher's own name for this launch."""


def from_launcher(env: Mapping[str, str]) -> Ranks | None:
    """Returns what an MPI launcher or torchrun set; None in front of one.

    RANK and LOCAL_RANK are used only together with torchrun's own mark: users set RANK for their own purposes.
    """
    launch = next((f"{name.lower()}-{env[name]}" for name in _LAUNCH if env.get(name)), None)
    if "TORCHELASTIC_RUN_ID" in env and (rank := number(env.get("RANK"))) is not None:
        return Ranks(rank, number(env.get("LOCAL_RANK")), number(env.get("WORLD_SIZE")), launch)
    rank = first_number(env, tuple(names.rank for names in _LAUNCHERS))
    if rank is None:
        return None
    same = [names for names in _LAUNCHERS if number(env.get(names.rank)) == rank]
    local_ranks, ranks = chain.from_iterable(n.local_ranks for n in same), chain.from_iterable(n.ranks for n in same)
    return Ranks(rank, first_number(env, local_ranks), first_number(env, ranks), launch)


def first_number(env: Mapping[str, str], names: Iterable[str]) -> int | None:
    """Returns the first of the variables that holds a number of 0 or more."""
    return next((n for name in names if (n := number(env.get(name))) is not None), None)


def number(text: str | None) -> int | None:
    """Returns a decimal number of 0 or more, else None: schedulers also write `undefined` and `4(x2)`."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None


def without_rank(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a process that is no rank of the user's launch. It keeps the variables that say how
    MPI starts and connects processes on this machine: `HYDRA_*`, `I_MPI_*`, MCA parameters and the like."""
    return {name: value for name, value in env.items() if not _is_of_rank(name)}


def _is_of_rank(name: str) -> bool:
    setting = next((prefix for prefix in _SETTINGS if name.startswith(prefix)), None)
    if setting is None:
        return name.startswith(_OF_RANK)
    rest = name.removeprefix(setting)
    return rest in _MCA_OF_RANK_WHOLE or rest.startswith(_MCA_OF_RANK)
