"""The specification that the wrapper gives the daemon: one JSON file in the node directory. Paths may be any bytes
(surrogateescape)."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from hpcstage.jsonform import read, written
from hpcstage.plan.budget import BudgetFacts
from hpcstage.plan.types import Dataset
from hpcstage.protocol.membership import Membership

DIRECT_MODE, RUNTIME_MODE = "direct", "runtime"
NICE = 5
"""The niceness of what works beside the command: daemon, copiers, exchange."""


@dataclass(frozen=True)
class DaemonSpec:
    """Everything that a daemon is told at its start. The files that it works with have fixed names below `node_dir`."""

    run_id: str
    membership: Membership
    """All nodes of the job, as they were expected; with one node there is no group."""
    node_dir: str
    run_dir: str
    mode: str
    """runtime, upfront or direct."""
    datasets: list[Dataset]
    order: str
    """`auto`, `manifest`, `given` (the lists among the `--data` arguments, in their order), `trace`, `sampler`, or the
    path of a list of paths: see `plan.order.orders`."""
    budget: BudgetFacts = field(default_factory=BudgetFacts)
    """The daemon measures once more what is free."""
    copiers: int = 1
    transfers: int = 32
    """The most transfers in flight per copier."""
    max_rate_bytes_per_s: float | None = None
    lock_fd: int | None = None
    listen_fd: int | None = None
    """A bound, listening SOCK_SEQPACKET socket that the daemon inherits."""
    leftovers: list[str] = field(default_factory=list)
    """Node directories of dead jobs, renamed aside by the wrapper, to be deleted in the background."""
    drain_s: float = 8.0
    outputs: str = ""
    """The directory that `node.kept` made for the command's output files; empty: there is none."""
    checkpoints: str = ""
    """The directory that `node.kept` made for the command's checkpoints; empty: there is none."""
    drain_rate_bytes_per_s: float | None = None
    drain_hurry_unix_s: float | None = None
    """From then on, copying output files and checkpoints gives way to nothing; None: the end of the job's time is not
    known."""
    command: list[str] = field(default_factory=list)
    """The command; with the datasets' roots it names the trace."""
    state_dir: str = ""
    """The user's directory in which traces are kept; empty: none is read or written."""
    group_dir: str = ""
    """The directory in which the nodes of a group tell each other what they do."""
    node_index: int = 0
    placement: str = "replicate"
    """The placement that the user asked for: private, replicate or partition."""
    group_wait_s: float = 10.0
    """How long a node waits for the others before it stages alone."""

    @property
    def stages(self) -> bool:
        """Whether anything is staged in this mode."""
        return self.mode != DIRECT_MODE

    @property
    def host(self) -> str:
        """This node's host."""
        return self.membership.nodes[self.node_index].host

    @property
    def node_count(self) -> int:
        """The number of nodes of the job."""
        return len(self.membership)

    @property
    def own_rate_bytes_per_s(self) -> float | None:
        """This node's part of the job's cap: the sum over all nodes never exceeds it, whichever nodes are there."""
        return None if self.max_rate_bytes_per_s is None else self.max_rate_bytes_per_s / self.node_count

    @property
    def own_drain_rate_bytes_per_s(self) -> float | None:
        """This node's part of the job's cap on copying output files."""
        return None if self.drain_rate_bytes_per_s is None else self.drain_rate_bytes_per_s / self.node_count

    def save(self, path: Path) -> None:
        """Writes the spec; readable by its owner only."""
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(written(self), file)

    @classmethod
    def load(cls, path: Path) -> DaemonSpec:
        """Reads what `save` wrote."""
        return read(cls, json.loads(path.read_text(encoding="utf-8", errors="surrogateescape")))
