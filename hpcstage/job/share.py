"""Computes which part of a node is this job's, where jobs share it: by processors, whose number schedulers give each
job.

The module also owns the decision whether jobs share the local disk. `processors` reads the processors of the node;
everything else is pure.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.job.environment import Job
from hpcstage.plan.budget import BudgetAsked, BudgetFacts

if TYPE_CHECKING:
    from hpcstage.job.localdir import LocalDir

_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Processors:
    """The processors of the whole node, whoever may use them."""

    online: int
    cores: int
    """Fewer than `online` where a core runs several threads."""
    usable: int
    """The processors that this process may use."""
    usable_cores: int
    """The cores that these are on."""


@dataclass(frozen=True)
class JobShare:
    """This job's part of the node, in processors."""

    cpus: int
    of: int

    @property
    def part(self) -> float:
        """Returns the part as a number between 0 and 1."""
        return self.cpus / self.of

    @property
    def why(self) -> str:
        """Returns the reason, for people."""
        return f"{self.cpus} of the node's {self.of} processors"


def processors() -> Processors:
    """Reads the processors of this machine. Where the kernel does not say which threads share a core, each counts as
    one."""
    online, usable = os.cpu_count() or 1, os.sched_getaffinity(0)
    core_of: dict[int, str] = {}
    for path in _CPUS.glob("cpu[0-9]*/topology/thread_siblings_list"):
        with suppress(OSError, UnicodeDecodeError):
            core_of[int(path.parts[-3].removeprefix("cpu"))] = path.read_text(encoding="ascii").strip()
    usable_cores = {core_of.get(number, str(number)) for number in usable}
    return Processors(online, len(set(core_of.values())) or online, len(usable), len(usable_cores))


def usable_cpus(job: Job, nodes: int = 1) -> int:
    """Returns the number of processors that the job may use on this node; `nodes` virtual nodes divide them."""
    return max(1, (job.cpus or len(os.sched_getaffinity(0))) // nodes)


def copier_count(job: Job, nodes: int = 1) -> int:
    """Returns the number of copy processes of this node, or of each of `nodes` virtual nodes."""
    cpus = usable_cpus(job, nodes)
    return 1 if cpus < 8 else 2 if cpus < 32 else 4


def of_disk(job: Job, local: LocalDir, found: Processors | None = None) -> JobShare | None:
    """Returns the job's share of what is free in its local directory; None if all of it is the job's, or nothing is
    known of other jobs.

    A directory with a quota or a file system of its own is the job's alone. Where it is memory, the job's memory limit
    says more.
    """
    if job.scheduler == "none" or job.cpus is None or local.is_own or local.is_memory:
        return None
    return of_node(job.cpus, found or processors())


def budget_facts(asked: BudgetAsked, job: Job, local: LocalDir, nodes: int = 1) -> BudgetFacts:
    """Collects what the budget of a store in this directory follows from; `nodes` virtual nodes divide the disk."""
    mine = of_disk(job, local)
    part, why = (mine.part, mine.why) if mine else (1.0, "")
    return local.measured(BudgetFacts(asked, part=part, part_why=why, nodes=nodes))


def of_node(cpus: int, found: Processors) -> JobShare | None:
    """Returns the share of a job with so many processors; None if it has the whole node, as far as can be told."""
    in_threads = found.usable >= cpus and found.usable_cores < found.cores
    if cpus == found.cores and not in_threads:  # sites that give out whole cores count those, and not their threads
        return None
    confined = found.usable if found.usable < found.online else 0
    mine = max(cpus, confined)
    return JobShare(mine, found.online) if mine < found.online else None
