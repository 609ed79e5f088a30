"""Decides which nodes of a job stage together, for the wrapper, which brings them up, and for a plan of the same run.

Without a scheduler `--nodes N` makes virtual nodes on this machine, which divide its processors and its disk. A node
that stages alone, whatever the reason, is no group.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpcstage.job import launchers
from hpcstage.protocol import leadspec

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.environment import Job
    from hpcstage.job.localdir import LocalDir

_LOCAL_KEYS = ("parent-", "torchelastic")
"""Names of launches with one of these are made of a process's number, so other nodes do not know them."""


@dataclass(frozen=True)
class Grouping:
    """The nodes of a run as this wrapper knows them."""

    hosts: list[str]
    index: int
    """The index of this node."""
    launcher: str
    starts_daemons: bool
    parts: tuple[tuple[str, ...], ...] = ()
    """The nodes by part of the job, where it has several parts; see `Job.parts`."""
    directory: str = ""
    """The directory in which the nodes find each other; see `wrapper.grouping`."""

    @property
    def virtual(self) -> bool:
        """Whether all nodes are this machine."""
        return self.launcher == launchers.VIRTUAL

    @property
    def shares(self) -> int:
        """The number of nodes that divide the processors and the local disk of this machine."""
        return len(self.hosts) if self.virtual else 1

    def node_name(self, run_id: str) -> str:
        """Returns the name of this node's directory."""
        return leadspec.virtual_name(run_id, self.index) if self.virtual else run_id


def find(config: Config, job: Job, local: LocalDir | None, host: str) -> Grouping | None:
    """Returns the nodes of a run here; None if this node stages alone."""
    if config.nodes == 1 or config.launcher == launchers.NONE:
        return None
    if job.scheduler == "none" and len(job.nodes) == 1:
        count = config.nodes or (config.elastic[1] if config.elastic and config.join is None else 1)
        if count == 1 or job.is_rank:
            return None
        hosts = [f"{host}.v{index}" for index in range(count)]
        return Grouping(hosts, 0, launchers.VIRTUAL, starts_daemons=True)
    if len(job.nodes) < 2 or job.node_index is None or (local is not None and local.is_network):
        return None
    launcher = launchers.choose(job, config.launcher)
    if lacks_slots(config, job):
        return None
    if not job.is_rank:
        return Grouping(_first(job), 0, launcher, starts_daemons=True, parts=job.parts)
    if not is_known_elsewhere(job):
        return None
    return Grouping(list(job.nodes), job.node_index, launcher, starts_daemons=False)


def planned(config: Config, job: Job, local: LocalDir | None, host: str) -> Grouping | None:
    """Returns the nodes that a plan is for: those of a run here, also where the plan is made on a login node. The user
    may plan for another number of nodes than the scheduler gave."""
    if job.scheduler == "none":
        return find(config, job, local, host)
    names = job.nodes if config.nodes is None else tuple(f"node{index}" for index in range(config.nodes))
    return find(config, replace(job, nodes=names, node_index=0, hostname=names[0]), local, host)


def warnings(config: Config, job: Job, local: LocalDir) -> list[str]:
    """Returns what the user should know of the job's nodes. Behind a launcher only the first node says it."""
    alone = config.nodes == 1 or config.launcher == launchers.NONE or (job.scheduler == "none" and len(job.nodes) == 1)
    if alone or (job.is_rank and job.node_index != 0):
        return []
    found = []
    if config.nodes not in (None, len(job.nodes)):
        found.append(f"nodes is {config.nodes}, the scheduler gave {len(job.nodes)}: all of these are used")
    if lacks_slots(config, job):
        found.append(
            "Grid Engine gave a node one slot, which the command's launcher needs there: the other nodes are left "
            "alone (ask for two slots on each node, or say --launcher qrsh)"
        )
    if len(job.nodes) > 1 and local.is_network:
        found.append(f"{local.path} is seen by all nodes: each node stages alone")
    return found


def lacks_slots(config: Config, job: Job) -> bool:
    """Returns whether what hpcstage starts on the other nodes would leave the command's launcher none of the slots that
    the scheduler gave there, with which it would fail. An elastic training has no launcher of its own."""
    others = [count for node, count in zip(job.nodes, job.slots, strict=False) if node != job.hostname]
    return config.launcher == "auto" and not config.elastic and not job.is_rank and 1 in others


def is_known_elsewhere(job: Job) -> bool:
    """Returns whether the wrappers of other nodes can know that they belong to the same launch."""
    return job.run_key is not None and not any(mark in job.run_key for mark in _LOCAL_KEYS)


def _first(job: Job) -> list[str]:
    return [job.hostname, *(node for node in job.nodes if node != job.hostname)]
