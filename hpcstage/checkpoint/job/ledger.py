"""Owns what the agents of a job tell each other: frozen values, which are JSON on the way (`jsonform`). Pure.

Each agent tells its whole report anew whenever it changes, so that one that was lost with a connection costs nothing:
the next one has all. The agent of the lowest node that is there, the coordinator, hears all others and tells them its
own, into which it puts orders, in each lane one after the other; each has the ledger of what was decided before, from
which another node takes over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hpcstage.record.parts.checkpoints import GenerationRow

NO_ROOM = "no_room"
"""The fact of an outcome that the local disk has no room for a generation."""


class CommandEnding(str, Enum):
    """The end of the command, as a node's daemon tells it."""

    NOT = ""
    """It runs."""
    ORDERLY = "orderly"
    """It has ended by itself with exit code 0, as far as the node that started it knows."""
    DISORDERLY = "disorderly"


class OrderLane(str, Enum):
    """What orders are about. Those of one lane follow each other; a target that hangs holds up its own lane alone."""

    LOCAL = "local"
    """The directory of the program, and the generations on the local disks."""
    TARGET = "target"


class OrderKind(str, Enum):
    """The kinds of orders."""

    BEGIN = "begin"
    """Put a state into the directory of the program."""
    READY = "ready"
    """All nodes have it: the program may start."""
    CLOSE = "close"
    """The program has ended: look for the last time at what it completed."""
    REFUSE = "refuse"
    """The directories cannot be kept; `why` says why."""
    SAVE = "save"
    """Save a share of a generation."""
    PROTECT = "protect"
    """Make the parities of a generation."""
    PUBLISH = "publish"
    """Bring a share of a generation to the target."""
    COPY = "copy"
    """Bring complete entries to the target as they are: there is no room for a generation."""
    PLACE = "place"
    """The coordinator gives all that was brought its names there."""
    DROP = "drop"
    """Drop the generations that no node retains."""
    FINISH = "finish"
    """Bring to the target what is in no generation, and end."""

    @property
    def lane(self) -> OrderLane:
        """Returns the lane of such orders."""
        return OrderLane.TARGET if self in (OrderKind.PUBLISH, OrderKind.COPY, OrderKind.PLACE) else OrderLane.LOCAL


@dataclass(frozen=True)
class EntryState:
    """One entry of the directory of a node."""

    mark: str
    """It differs when the entry does."""
    is_complete: bool = True
    is_restored: bool = False
    """Whether it is what was put there at the start."""


@dataclass(frozen=True)
class JobEntry:
    """An entry of a generation of a job."""

    number: int
    """The generation that has all of it: an older one where a node that had a part of it is lost, or where it is being
    written again."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """By node: the mark of its part."""


@dataclass(frozen=True)
class JobGeneration:
    """A generation of a job that all its nodes have committed."""

    number: int
    attempt: str
    created_ns: int
    nodes: tuple[str, ...]
    """Those that committed it, also without an entry."""
    entries: Mapping[str, JobEntry] = field(default_factory=dict)
    dropped: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Entries that the program removed on one node, by the nodes that still have a part, with its mark."""
    put: tuple[str, ...] = ()
    """Entries that are as they were put into the directories at the start."""
    lacking: tuple[str, ...] = ()
    """Entries that nodes had and that neither it nor an older one has: they were being written. The target may have
    them."""
    needs: tuple[int, ...] = ()
    """The older generations that any of its nodes reads for it."""
    size: str = ""
    """The code by which it is protected; empty: by none."""
    state_bytes: int = 0

    @property
    def names(self) -> frozenset[str]:
        """Returns the names of all entries."""
        return frozenset(self.entries)

    @property
    def numbers(self) -> frozenset[int]:
        """Returns the generations that have its entries, and itself."""
        return frozenset({self.number, *(one.number for one in self.entries.values())})

    @property
    def parts(self) -> list[tuple[int, str, frozenset[str]]]:
        """Returns all parts, those of the newest generation first: the generation that has it, node and entries."""
        found: dict[tuple[int, str], set[str]] = {}
        for name, one in self.entries.items():
            for node in one.marks:
                found.setdefault((-one.number, node), set()).add(name)
        return [(-below, node, frozenset(names)) for (below, node), names in sorted(found.items())]

    @property
    def own(self) -> dict[str, JobEntry]:
        """Returns the entries that it has itself."""
        return {name: one for name, one in self.entries.items() if one.number == self.number}

    def share(self, node: str) -> dict[str, str]:
        """Returns the entries of which a node has a part, with its marks."""
        return {name: one.marks[node] for name, one in self.entries.items() if node in one.marks}

    def parts_of(self, node: str) -> set[tuple[str, str]]:
        """Returns the names and marks of all that a node has of its entries, and of those that were removed."""
        dropped = {(name, marks[node]) for name, marks in self.dropped.items() if node in marks}
        return {*self.share(node).items(), *dropped}

    def marks(self, name: str) -> dict[str, str]:
        """Returns the marks of an entry, by node; they tell one content from another."""
        return dict(self.entries[name].marks) if name in self.entries else {}


@dataclass(frozen=True)
class JobLedger:
    """Holds all that the coordinator knows and decided so far."""

    is_begun: bool = False
    """Whether a state was chosen and lies on all nodes."""
    failed: tuple[str, ...] = ()
    """Keys of the states that could not be restored."""
    restored: str = ""
    """The state that lies in the directories since the start, for people."""
    is_unsaved: bool = False
    """Whether that state is in no generation of this run and not in the target."""
    seen: tuple[str, ...] = ()
    """Entries that the program had before this run."""
    next_number: int = 1
    after_ns: int = 0
    """All generations of this run are made after this time."""
    generations: tuple[JobGeneration, ...] = ()
    """The complete ones that are kept, oldest first."""
    is_closed: bool = False
    """Whether the program has ended on all nodes, and they have looked for the last time."""
    is_orderly: bool = False
    """Whether it ended by itself with exit code 0."""
    is_last_whole: bool = True
    """Whether the last attempt at a generation was committed by all."""
    drained: int = 0
    """The newest generation that is in the target; 0: none of this run."""
    drained_marks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By entry: the marks, by node, of what the target has of it."""
    gone: tuple[str, ...] = ()
    """Entries that the target has not, since parts of them went with lost nodes and cannot be rebuilt."""
    writers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By kind of entry: the nodes that made parts of such entries."""
    since_drain: int = 0
    undrained_why: str = ""
    """Why the newest generation is not in the target."""
    saved_count: int = 0
    rows: tuple[GenerationRow, ...] = ()
    lines: tuple[str, ...] = ()
    """One line for each state that was refused, could not be saved, or is less protected than was asked."""
    plan: str = ""
    """The protection: code, groups and what is less than was asked."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """By name: the name in the target under which an entry lies, since another one has its own."""
    size_bytes: int = 0
    copied: tuple[str, ...] = ()
    """Entries that were copied as they are, with their marks."""

    @property
    def last(self) -> JobGeneration | None:
        """Returns the newest complete generation of this run."""
        return self.generations[-1] if self.generations else None


@dataclass(frozen=True)
class JobOrder:
    """One order of a coordinator. Orders of a job are numbered; a newer one replaces an older one."""

    seq: int
    by: int
    """The node that gave it."""
    view: int
    """The membership for which it holds."""
    kind: OrderKind
    body: Mapping[str, Any] = field(default_factory=dict)
    ledger: JobLedger = field(default_factory=JobLedger)

    @property
    def key(self) -> tuple[int, int]:
        """Returns by what orders are compared."""
        return self.seq, self.by


@dataclass(frozen=True)
class Outcome:
    """The result of an order on one node."""

    key: tuple[int, int]
    error: str = ""
    """Why it failed; empty: it did not."""
    is_soon: bool = False
    """Whether it is to be tried again soon: the program changed something meanwhile."""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FoundStore:
    """The store of one node of an earlier run, as the node tells that has it now."""

    run_id: str
    member: str
    """The node's name in that run, by which coding records know it."""
    key: str
    """The name under which others read it."""
    generations: tuple[JobGeneration, ...]
    """Those that all nodes of the run had committed, as far as this store knows."""
    origins: Mapping[str, int] = field(default_factory=dict)
    """The runs from which that one went on, each with the time up to which it has what they made."""
    seen: tuple[str, ...] | None = None
    """The entries that the programs of that run and of those before it had before it; None: nobody knows."""
    completed: tuple[str, ...] = ()
    """Entries in the directory of a run on one node that are complete and in none of its generations as they are."""
    completed_ns: int = 0
    """When the newest of them was made."""


@dataclass(frozen=True)
class NodeReport:
    """All that an agent says."""

    view: int = -1
    orders: Mapping[OrderLane, JobOrder] = field(default_factory=dict)
    """The newest order of each lane that the agent knows."""
    outcomes: Mapping[OrderLane, Outcome] = field(default_factory=dict)
    """The result of the last order of each lane that it carried out."""
    entries: Mapping[str, EntryState] = field(default_factory=dict)
    removed: tuple[str, ...] = ()
    """Entries that were put there at the start and that the program removed."""
    is_gone: bool = False
    """Whether the directory of the program is gone: nothing that is not there was removed by the program."""
    found: tuple[FoundStore, ...] | None = None
    """The stores that earlier runs left on the node. None: that is not known yet."""
    domain: str = ""
    """The node's failure domain; empty: nobody knows of one."""
    target_ns: int = 0
    """When the state in the target was made; 0: nothing says that."""
    is_ready: bool = False
    """Whether the program may use the directory."""
    ending: CommandEnding = CommandEnding.NOT
    hurries: bool = False
