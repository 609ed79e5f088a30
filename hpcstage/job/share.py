"""Which part of a node is this job's, where jobs share it: by processors, of which schedulers give each job its number.

Owns the decision whether the local disk is shared by them, too. The processors of the node are read by `processors`;
everything else is pure.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.job.types import Job

if TYPE_CHECKING:
    from hpcstage.job.localdir import LocalDir

_CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Processors:
    """Of the whole node, whoever may use them."""

    online: int
    cores: int
    """Fewer than `online` where a core runs several threads."""
    usable: int
    """By this process."""


@dataclass(frozen=True)
class Share:
    """This job's part of the node."""

    cpus: int
    of: int

    @property
    def part(self) -> float:
        """Between 0 and 1."""
        return self.cpus / self.of

    @property
    def why(self) -> str:
        """For people."""
        return f"{self.cpus} of the node's {self.of} processors"


def processors() -> Processors:
    """Of this machine. Where the kernel does not say which threads share a core, each counts as one."""
    online = os.cpu_count() or 1
    siblings = set()
    for path in _CPUS.glob("cpu[0-9]*/topology/thread_siblings_list"):
        try:
            siblings.add(path.read_text(encoding="ascii").strip())
        except (OSError, UnicodeDecodeError):
            continue
    return Processors(online, len(siblings) or online, len(os.sched_getaffinity(0)))


def of_disk(job: Job, local: LocalDir, found: Processors | None = None) -> Share | None:
    """The job's share of what is free in its local directory; None: all of it, or nothing is known of other jobs.

    A directory with a quota or a file system of its own is the job's alone. Of memory the job's limit says more.
    """
    if job.scheduler == "none" or job.cpus is None or local.is_own or local.is_memory:
        return None
    return of_node(job.cpus, found or processors())


def of_node(cpus: int, found: Processors) -> Share | None:
    """The share of a job with so many processors; None: the whole node, as far as can be told."""
    if cpus == found.cores:  # sites that give out whole cores count those, and not their threads
        return None
    confined = found.usable if found.usable < found.online else 0
    mine = max(cpus, confined)
    return Share(mine, found.online) if mine < found.online else None
