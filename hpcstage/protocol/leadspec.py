"""The specification that the wrapper gives the lead and the agents of other nodes: JSON in the run directory.

Owns the form, and the names of files below the group's directory (`protocol.rundir.GROUP` as a rule). All nodes see
that directory: it is on the shared file system.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcstage.jsonform import read, written
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.writing import replace_text

SPEC = "spec.json"
DATASETS = "datasets"
SCRIPT = "agent.sh"
END = "end"
"""The name of a file that exists once the run is over, for agents whose standard input is not connected."""
DRAIN = "drain"
"""The name of a file that exists once the nodes are to drain their output files, for the same agents."""
NODE = "node-"
STANDING = "standing.json"
"""The name of a file of the lead, for checkpoint agents that no exchange connects: which nodes live."""
PULSE = "pulse"
"""The name of a file that the lead writes anew every PULSE_S, as long as it lives."""
PULSE_S = 10.0
JOIN_S = 2.0
"""The longest that the command is held back until all nodes have the manifest."""


@dataclass(frozen=True)
class LeadSpec:
    """The node group of a run, as its wrapper set it up."""

    group_dir: str
    """The directory of this file and of the other files by which the nodes tell each other how they do."""
    launcher: str
    """The name of a launcher that `job.launchers` knows."""
    starts_daemons: bool
    """Whether the lead and the agents start daemons; False behind a launcher, where each node's wrappers start their
    own."""
    exchanges: bool
    """Whether exchanges run; False where nothing is copied (mode direct) or nothing shared (placement private)."""
    local_dir: str
    """The first node's local directory; the node directories of all nodes have the same name."""
    daemon: DaemonSpec
    """The specification of this node's daemon, and the model of the others'. Its membership has all nodes, with
    directory and socket of the node whose wrapper wrote this; hosts of virtual nodes end in `.v<index>`."""
    intercept: str = "auto"
    wait_s: float = 10.0
    """How long the lead waits for the nodes; those that are not up by then are left out."""
    input_ends: bool = False
    """Whether the launcher passes the end of its standard input on to the agents."""
    passes_output: bool = True
    """Whether the launcher passes on to the lead what the agents print; otherwise they print nothing."""
    directories: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What each node fills its directories with that are drained, by the kind of files: the run, the directory on the
    shared file system and its inode; for checkpoints their charter, but for the node itself, and `earlier`, by index
    the places of earlier runs that belong to the same directory, where the nodes are virtual. The local directories
    are those of the daemon's specification, on every node."""
    parts: list[list[str]] = field(default_factory=list)
    """The nodes by part of the job, where it has several: a step of srun is told which parts it runs in."""

    @property
    def virtual(self) -> bool:
        """Whether all nodes are this machine."""
        return self.launcher == "virtual"

    @property
    def hosts(self) -> list[str]:
        """The hosts by node index."""
        return self.daemon.membership.hosts

    def node_name(self, index: int) -> str:
        """Returns the name of a node's directory below the base directory."""
        return virtual_name(self.daemon.run_id, index) if self.virtual else self.daemon.run_id

    def save(self, path: Path) -> None:
        """Writes the spec; readable by its owner only."""
        write_json(path, written(self))

    @classmethod
    def load(cls, path: Path) -> LeadSpec:
        """Reads what `save` wrote."""
        return read(cls, read_json(path))


def virtual_name(run_id: str, index: int) -> str:
    """Returns the name of a virtual node's directory."""
    return f"{run_id}.v{index}"


def state_file(group_dir: Path, index: int, state: str) -> Path:
    """Returns the file by which a node reports a state, one for each state: a listing shows what is new."""
    return group_dir / f"{NODE}{index}-{state}.json"


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Writes JSON atomically: readers on other nodes see all of it or nothing."""
    replace_text(path, json.dumps(data), 0o600)


def read_json(path: Path) -> dict[str, Any]:
    """Reads what `write_json` wrote."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    return data
