"""Who am I behind a launcher? Ranks from the variables of MPI libraries, torchrun and schedulers. Pure.

MPI before the scheduler: `mpirun` within one Slurm task passes SLURM_LOCALID=0 on to all its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "PALS_RANKID", "FLUX_TASK_RANK")
_LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID",
    "PLE_RANK_ON_NODE", "JSM_NAMESPACE_LOCAL_RANK", "FLUX_TASK_LOCAL_ID",
)  # fmt: skip
_RANKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "PALS_SIZE", "FLUX_JOB_SIZE")
_LAUNCH = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "JSM_NAMESPACE_ID", "TORCHELASTIC_RUN_ID")


@dataclass(frozen=True)
class Ranks:
    """A process behind a launcher."""

    rank: int
    local_rank: int | None
    ranks: int | None
    launch: str | None
    """The launcher's own name for this launch."""


def from_launcher(env: Mapping[str, str]) -> Ranks | None:
    """What an MPI launcher or torchrun set; None in front of one.

    RANK and LOCAL_RANK count only together with torchrun's own mark: users set RANK for their own purposes.
    """
    launch = next((f"{name.lower()}-{env[name]}" for name in _LAUNCH if env.get(name)), None)
    if "TORCHELASTIC_RUN_ID" in env and (rank := number(env.get("RANK"))) is not None:
        return Ranks(rank, number(env.get("LOCAL_RANK")), number(env.get("WORLD_SIZE")), launch)
    rank = first_number(env, _RANK)
    if rank is None:
        return None
    return Ranks(rank, first_number(env, _LOCAL_RANK), first_number(env, _RANKS), launch)


def first_number(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """The first variable that holds a number of 0 or more."""
    return next((n for name in names if (n := number(env.get(name))) is not None), None)


def number(text: str | None) -> int | None:
    """A decimal number of 0 or more, else None: schedulers also write `undefined` and `4(x2)`."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else None
