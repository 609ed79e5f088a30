"""The specification that the lead gives the exchanges: one JSON file, the same for all exchanges of a generation.

An exchange finds its own entry by its rank in the MPI world. Paths may be any bytes (surrogateescape).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcstage.writing import replace_text

OURS = "hpcstage exchange on "
"""The beginning of the lines that an exchange prints of itself."""
CONNECTED = "hpcstage-group connected"
"""A line that the exchange of rank 0 prints, for the lead, once all have come together."""


@dataclass(frozen=True)
class Member:
    """Where an exchange finds its daemon, which tells it which node of the job it is."""

    host: str
    """The host's name, to find the entry by and for messages to people."""
    node_dir: str
    sock: str
    """The node's socket, by a name that is short enough to connect to."""


@dataclass(frozen=True)
class GroupSpec:
    """One generation of the node group."""

    generation: int
    members: list[Member]
    """By rank."""
    connect_s: float = 10.0
    """How long an exchange tries to reach its daemon."""
    goodbye_s: float = 30.0
    """How long an exchange whose run has ended waits for the others before it goes all the same."""
    nice: int = 5
    silence_s: float = 60.0
    """An exchange that gets nothing from its neighbour for this long ends the group."""

    def own(self, rank: int, host: str = "") -> Member:
        """Returns the entry of a rank; if it names another host than `host`, that of `host`, since launchers order
        nodes as they like."""
        found = self.members[rank]
        if not host or _short(found.host) == _short(host):
            return found
        return next((member for member in self.members if _short(member.host) == _short(host)), found)

    def save(self, path: Path) -> None:
        """Writes the spec in one step; readable by its owner only."""
        replace_text(path, json.dumps(asdict(self)), 0o600)

    @classmethod
    def load(cls, path: Path) -> GroupSpec:
        """Reads what `save` wrote."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8", errors="surrogateescape"))
        data["members"] = [Member(**member) for member in data["members"]]
        return cls(**data)


def _short(host: str) -> str:
    return host.partition(".")[0]
