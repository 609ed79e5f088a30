"""What the wrapper tells the lead and the agents of other nodes: JSON in the run directory.

Owns the form, and the names of files below the group's directory, `<run directory>/group/` as a rule. All nodes see
that directory: it is on the shared file system.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

DIRECTORY = "group"
SPEC = "spec.json"
RESOLVED = "resolved"
SCRIPT = "agent.sh"
END = "end"
"""Exists once the run is over, for agents whose standard input is not connected."""
NODE = "node-"
PULSE = "pulse"
"""Written anew every PULSE_S by the lead, as long as it lives."""
PULSE_S = 10.0


@dataclass(frozen=True)
class LeadSpec:
    """The node group of a run, as its wrapper decided it."""

    run_id: str
    run_dir: str
    group_dir: str
    """Where this is written, and what else the nodes tell each other."""
    hosts: list[str]
    """By node index; names of virtual nodes end in `.v<index>`."""
    launcher: str
    """Of `job.launchers`: srun, pbsdsh, qrsh, pjrsh, mpiexec, virtual, none."""
    starts_daemons: bool
    """False behind a launcher: each node's wrappers start their own."""
    exchanges: bool
    """False where nothing is copied (mode direct) or nothing shared (placement private)."""
    local_dir: str
    """The first node's; the node directories of all nodes have the same name."""
    daemon: dict[str, Any]
    """A `DaemonSpec` with the first node's values."""
    budget: str | None = None
    copiers: int | None = None
    intercept: str = "auto"
    wait_s: float = 10.0
    """Nodes that are not up by then are left out."""
    drain_s: float = 8.0
    join_s: float = 2.0
    """The command is held back for so long at most until all nodes know the files."""
    input_ends: bool = False
    """The launcher passes the end of its standard input on to the agents."""
    passes_output: bool = True
    """The launcher passes on to the lead what the agents print; otherwise they print nothing."""
    parts: list[list[str]] = field(default_factory=list)
    """The nodes by part of the job, where it has several: a step of srun is told which parts it runs in."""
    own: dict[str, str] = field(default_factory=dict)
    """node_dir and sock of the first node."""

    @property
    def virtual(self) -> bool:
        """All nodes are this machine."""
        return self.launcher == "virtual"

    def node_name(self, index: int) -> str:
        """The name of a node's directory below the base directory."""
        return virtual_name(self.run_id, index) if self.virtual else self.run_id

    def save(self, path: Path) -> None:
        """Writes it; readable by its owner only."""
        write_json(path, asdict(self))

    @classmethod
    def load(cls, path: Path) -> LeadSpec:
        """Reads what `save` wrote."""
        return cls(**read_json(path))


def virtual_name(run_id: str, index: int) -> str:
    """The directory of a virtual node."""
    return f"{run_id}.v{index}"


def state_file(group_dir: Path, index: int, state: str) -> Path:
    """Where a node says how it does, once for each state: one listing of the directory shows what is new."""
    return group_dir / f"{NODE}{index}-{state}.json"


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Atomically: readers on other nodes see all of it or nothing."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(data, file)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Reads what `write_json` wrote."""
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
    return data
