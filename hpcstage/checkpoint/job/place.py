"""The places and terms of a kept checkpoint directory, and the report of what became of it. Pure but for its file.

Below a base directory on the local disk lie `tree`, to which the program writes, `store`, the generations, and
`charter`, which says of which directory on the shared file system they are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcstage.errors import HpcstageError
from hpcstage.jsonform import read
from hpcstage.record.parts.checkpoints import GenerationRow
from hpcstage.upload.facts import Run

HIDDEN = "."
"""Names that begin so are of entries that are being made, until the command has ended well."""
LOCAL_KEPT = 2
"""The newest generations that stay on the local disk."""
ROOM_SHARE = 0.5
"""The share of what is free on the local disk that one generation, or the state at the start, may take."""
RETRY_S = 60.0
"""A state that could not be saved is tried again so much later."""
MOST_ROWS = 100
"""The last generations, and the last lines, that a report has."""


ALONE = "alone"
"""The name of the node of a run that has one."""


class CannotKeep(Exception):
    """The checkpoints cannot be kept on the local disk; the message says why. The program uses the target itself."""


@dataclass(frozen=True)
class CheckpointPlace:
    """The directories of one kept checkpoint directory."""

    base: Path

    @property
    def tree(self) -> Path:
        """The directory to which the program writes."""
        return self.base / "tree"

    @property
    def store(self) -> Path:
        """The generations."""
        return self.base / "store"

    @property
    def charter(self) -> Path:
        """The file of the charter."""
        return self.base / "charter"

    @property
    def shares(self) -> Path:
        """The directory with a file for each generation that all nodes of a job have."""
        return self.base / "shares"

    @property
    def pending(self) -> Path:
        """The file of the last generation that this node committed in a job, which not all of its nodes may have."""
        return self.base / "pending"

    @property
    def completed(self) -> Path:
        """The file that tells which entries of the directory are complete; see `completed`."""
        return self.base / "completed"

    def note_origins(self, runs: Mapping[str, int]) -> None:
        """Notes the runs from which one went on, each with the time up to which it has what they made. Raises
        OSError."""
        self._origins.write_text(json.dumps(runs))

    def origins(self) -> dict[str, int]:
        """Returns what `note_origins` noted; nothing where that cannot be read."""
        try:
            return {str(run_id): int(time_ns) for run_id, time_ns in json.loads(self._origins.read_text()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def note_seen(self, names: Iterable[str]) -> None:
        """Notes the entries that the program of this run, and those of the runs before it, had before this run. Raises
        OSError."""
        self._seen.write_text(json.dumps(sorted(names)))

    def seen(self) -> tuple[str, ...] | None:
        """Returns what `note_seen` noted; None where that cannot be read."""
        try:
            return tuple(map(str, json.loads(self._seen.read_text())))
        except (OSError, ValueError, TypeError):
            return None

    @property
    def _origins(self) -> Path:
        return self.base / "origins"

    @property
    def _seen(self) -> Path:
        return self.base / "seen"

    def room_bytes(self) -> int:
        """Returns the bytes of the local disk that may be taken now."""
        found = os.statvfs(self.base)
        return int(found.f_bavail * found.f_frsize * ROOM_SHARE)


@dataclass(frozen=True)
class CheckpointCharter:
    """Says where checkpoints belong, and what their agent goes by."""

    run_id: str
    target: str
    """The directory on the shared file system."""
    target_inode: int
    drain_every: int | None = None
    """Each so-manieth generation is drained; None: the newest whenever the one before is drained."""
    earlier: tuple[str, ...] = ()
    """Bases of killed runs whose generations belong to the same target."""
    node: str = ALONE
    """This node's name in the run."""
    nodes: tuple[str, ...] = (ALONE,)
    """All nodes of the run, by index."""
    group_dir: str = ""
    """The directory in which the lead says which nodes live."""
    protect: tuple[int, int] | None = None
    """How many data blocks and parities were asked for; None: what fits."""
    protect_rate_bytes_per_s: float | None = None
    """The most bytes that each node sends in a second for parities; None: no limit."""
    domain: str = ""
    """The failure domain of this node as the scheduler tells it; empty: it does not."""
    is_elastic: bool = False
    """Whether the program is started anew without a node that is lost."""
    owner: str = ""
    """The run that owns the target, where another one goes on with what this one left."""
    tree: str = ""
    """The local directory as the command knew it: what a killed run left is moved."""

    def save(self, place: CheckpointPlace) -> None:
        """Writes the charter; it is on the disk before a command can start."""
        place.charter.write_bytes(json.dumps(asdict(self)).encode("utf-8", "surrogateescape"))

    @classmethod
    def load(cls, place: CheckpointPlace) -> CheckpointCharter:
        """Reads what `save` wrote. Raises OSError or ValueError."""
        found = json.loads(place.charter.read_bytes().decode("utf-8", "surrogateescape"))
        try:
            protect = found.get("protect")
            lists = {"earlier": tuple(found["earlier"]), "nodes": tuple(found["nodes"])}
            return cls(**{**found, **lists, "protect": None if protect is None else (protect[0], protect[1])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{place.charter} is no charter of checkpoints") from error

    @property
    def is_alone(self) -> bool:
        """Whether the run has one node."""
        return len(self.nodes) == 1

    @property
    def suffix(self) -> str:
        """Returns the end of the names of what lies beside the program's entries in the target."""
        return self.run_id if self.is_alone else f"{self.run_id}.{self.node}"

    @property
    def run(self) -> Run:
        """Returns which run writes to the target, as its uploader needs it."""
        node = "" if self.is_alone else self.suffix
        return Run(self.run_id, self.target, self.target_inode, 0, os.uname().nodename, node, self.tree)


def charter_of(
    said: Mapping[str, Any], node: str, earlier: Sequence[str], domain: str = "", tree: str = ""
) -> CheckpointCharter:
    """Returns the charter of one node of a job, by what all its nodes are told, as plain data."""
    fields = {key: value for key, value in said.items() if key != "earlier"}
    protect = fields["protect"]
    typed = {"nodes": tuple(fields["nodes"]), "protect": None if protect is None else (protect[0], protect[1])}
    own = {"node": node, "earlier": tuple(earlier), "domain": domain, "tree": tree}
    return CheckpointCharter(**{**fields, **typed, **own})


@dataclass(frozen=True)
class DrainTerms:
    """The bounds of the drains of a run."""

    pace: Callable[[int], object] | None = None
    """Waits so long that the bytes keep below a rate."""
    hurry_unix_s: float | None = None
    """From then on everything that is saved is drained at once: the job's time ends. None: nobody knows when."""

    def hurries(self) -> bool:
        """Tells whether the job's time ends."""
        return self.hurry_unix_s is not None and time.time() >= self.hurry_unix_s

    def wake_after(self) -> float | None:
        """Returns the seconds until that begins; None if it has begun, or nobody knows when."""
        return None if self.hurry_unix_s is None or self.hurries() else self.hurry_unix_s - time.time()


@dataclass(frozen=True)
class UndrainedEntry:
    """A checkpoint that is not in the target as it should be, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class CheckpointReport:
    """The fate of the checkpoints. The fields that a `DrainReport` of outputs has, too, have its names."""

    restored: str = ""
    """The state in the directory at the start; empty: nothing was there."""
    restored_s: float = 0.0
    """The time until it lay there."""
    saved: tuple[GenerationRow, ...] = ()
    """The last generations."""
    saved_count: int = 0
    drained_number: int | None = None
    """The newest generation that is in the target."""
    protection: str = ""
    """How the nodes of a job protect each other; empty on one node."""
    protected_number: int | None = None
    """The newest generation that outlives the loss of nodes."""
    lost: tuple[str, ...] = ()
    """The nodes of the job that were lost while the command ran."""
    refused: tuple[str, ...] = ()
    """Lines about generations that were not restored, or could not be saved."""
    undrained: tuple[UndrainedEntry, ...] = ()
    unclosed: tuple[str, ...] = ()
    """Names in the target of entries that are in no generation: the command was killed before they were complete."""
    findings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    bytes_carried: int = 0
    own_bytes: int = 0
    """Of these the bytes of which no other node's report tells."""
    is_gone: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckpointReport:
        """Reads what `to_json` returned."""
        return read(cls, data)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)


def reason(error: OSError | HpcstageError) -> str:
    """Says what failed, for people."""
    if isinstance(error, OSError):
        return f"{error.filename or 'a file'}: {error.strerror or error}"
    return error.what
