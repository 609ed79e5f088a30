"""What goes into a simulation and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field

DIRECT = "direct"


@dataclass(frozen=True)
class Machine:
    """Rates and limits."""

    source_bytes_per_s: float
    link_bytes_per_s: float
    source_file_s: float = 0.002
    link_file_s: float = 0.0001
    transfers: int = 32
    asks: int = 64
    asked_bytes: int = 64 << 20


@dataclass(frozen=True)
class Work:
    """What is trained, and how the files are placed."""

    nodes: int
    kind: str
    files: int
    file_bytes: int
    epochs: int
    compute_s: float
    """Of an epoch on one node."""
    batch: int = 8
    """Files of a step on each node."""
    ahead: int = 32
    """Files that a node's readers may be ahead of the training."""
    readers: int = 1 << 30
    """Files that a node reads at a time."""
    room: float = 1.0
    """What a node has room for, in datasets."""
    known: bool = True
    """Nodes know in which order the first epoch reads, and fetch in it; else each from its own place of the list."""
    lockstep: bool = False
    seed: int = 1

    @property
    def dataset_bytes(self) -> int:
        """Of all files."""
        return self.files * self.file_bytes


@dataclass
class Outcome:
    """What came out."""

    epoch_s: list[float] = field(default_factory=list)
    source_bytes: int = 0
    peer_bytes: int = 0
    messages: int = 0
    """Between nodes: requests and files."""
    most_messages: int = 0
    """Of one node, sent and received."""
    most_sent_bytes: int = 0
    """By one node to others."""
    local: list[float] = field(default_factory=list)
    """Per epoch: the share of reads that found the file on the node."""
    peers: list[float] = field(default_factory=list)
    source: list[float] = field(default_factory=list)
