"""The specification that the lead gives the exchanges: one JSON file, the same for all exchanges of an MPI program.

An exchange finds its own entry by its rank in the MPI world. Paths may be any bytes (surrogateescape).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from hpcstage.jsonform import read, written
from hpcstage.protocol.membership import GroupNode, Membership
from hpcstage.writing import replace_text

OURS = "hpcstage exchange on "
"""The beginning of the lines that an exchange prints of itself."""
STANDS = "hpcstage-group "
"""The beginning of a line that the exchange of rank 0 prints for the lead, with the generation of the membership: once
all have come together, and when a node has left."""
TRIED = "hpcstage-tried "
"""The beginning of the line that a trial prints, with the MPI library that connected its processes."""


@dataclass(frozen=True)
class GroupSpec:
    """One MPI program of exchanges."""

    membership: Membership
    """The nodes on which the program is started are there; the exchange of rank r runs on the r-th of these."""
    connect_s: float = 15.0
    """How long an exchange waits for its daemon, which may not get a processor at once; without it the node is left out
    as long as the MPI program runs."""
    goodbye_s: float = 30.0
    """How long an exchange whose run has ended waits for the others before it goes all the same."""
    silence_s: float = 60.0
    """An exchange that gets nothing from its neighbour for this long ends the group."""

    @property
    def started(self) -> list[GroupNode]:
        """Returns the nodes by rank."""
        return [self.membership.nodes[index] for index in self.membership.present]

    def own(self, rank: int, host: str = "") -> GroupNode:
        """Returns the entry of a rank; if it names another host than `host`, that of `host`, since launchers order
        nodes as they like."""
        found = self.started[rank]
        if not host or _short(found.host) == _short(host):
            return found
        return next((node for node in self.started if _short(node.host) == _short(host)), found)

    def save(self, path: Path) -> None:
        """Writes the spec in one step; readable by its owner only."""
        replace_text(path, json.dumps(written(self)), 0o600)

    @classmethod
    def load(cls, path: Path) -> GroupSpec:
        """Reads what `save` wrote."""
        return read(cls, json.loads(path.read_text(encoding="utf-8", errors="surrogateescape")))


def _short(host: str) -> str:
    return host.partition(".")[0]
