"""Owns the form and the names of the files in which the wrapper tells those who start `torchrun` on the nodes of an
elastic training what to do: JSON that its owner alone can read, on the shared file system."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hpcstage.jsonform import read, written
from hpcstage.protocol.leadspec import read_json, write_json

PROGRAM, NODE_PROGRAM = "hpcstage.lead.training", "hpcstage.lead.trainer"
"""The modules that stand in the place of the user's command, on its node and on every node; they read no data."""
SPEC = "training.json"
SCRIPT = "training.sh"
NODE = "HPCSTAGE_VIRTUAL_NODE"
"""The variable by which a process knows its virtual node: ranks of an elastic training move between nodes."""


@dataclass(frozen=True)
class TrainingSpec:
    """An elastic training."""

    run_id: str
    run_dir: str
    """Its directory `elastic-RUN_ID` has what the agents agree on."""
    hosts: list[str]
    """The nodes; the first is the one of the wrapper."""
    launcher: str
    """The name of a launcher that `job.launchers` knows; what starts the agents of the other nodes."""
    torchrun: list[str]
    """The words that start `torchrun`, before its options."""
    arguments: list[str]
    """The user's options of `torchrun`, the program and its arguments."""
    least: int
    most: int
    policy: str
    survivors: str
    """`keep` where processes outlive a change of the membership, else `restart`."""
    env: dict[str, str]
    """The environment of the user's command on the first node."""
    cwd: str
    ends_unix_s: float | None = None
    """When the job's time is over, where that is known."""
    drained: str | None = None
    """The directory on the shared file system to which the checkpoints of all nodes are copied."""
    parts: list[list[str]] = field(default_factory=list)
    address: str = ""
    """The address at which the others reach each of these nodes, where it is not the node's name."""
    joins: str = ""
    """The name of the training that another job has begun and these nodes join; empty where they begin one."""

    @property
    def virtual(self) -> bool:
        """Whether all nodes are this machine."""
        return self.launcher == "virtual" or len(self.hosts) == 1

    @property
    def agreed(self) -> Path:
        """The directory of what the agents agree on."""
        return Path(self.run_dir) / f"elastic-{self.run_id}"

    def save(self, path: Path) -> None:
        """Writes the specification."""
        write_json(path, written(self))

    @classmethod
    def load(cls, path: Path) -> TrainingSpec:
        """Reads what `save` wrote."""
        return read(cls, read_json(path))
