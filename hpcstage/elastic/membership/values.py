"""Owns the values that the agents of a training tell each other and write into the run directory, their plain form, and
what an agent has from its command line. It has no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from hpcstage.elastic.policy import AskedPolicy
from hpcstage.jsonform import read

State = Literal["ready", "training", "left", "finished"]
GONE = ("left", "finished")


@dataclass(frozen=True)
class Node:
    """An agent, from its start to its end. One that is started again is another node."""

    id: str
    host: str
    address: str
    """The name or address by which the other hosts reach this one."""
    processes: int = 1


@dataclass(frozen=True)
class Generation:
    """A membership: the nodes that train, in the order of their ranks."""

    number: int
    term: int
    """The term of the store through which it was agreed."""
    nodes: tuple[Node, ...]
    kind: str
    """Why it was made: the kind of a policy's `Cause`."""
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    waited_s: float = 0.0
    """The time from when the change was seen to when it was agreed."""
    silent_s: float = 0.0
    """The longest silence after which a node was taken for lost."""

    def rank(self, node_id: str) -> int | None:
        """Returns a node's rank, or None if it does not train."""
        return next((rank for rank, node in enumerate(self.nodes) if node.id == node_id), None)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Generation:
        """Reads what `to_json` returned. Raises ValueError for anything else."""
        return read(cls, data)


@dataclass(frozen=True)
class Term:
    """Where the store is. Each host that takes the store over begins a term."""

    number: int
    node: str
    host: str
    address: str
    port: int


@dataclass(frozen=True)
class Beat:
    """A node says this of itself again and again. Whoever does not see `count` change takes the node for lost."""

    node: Node
    count: int
    state: State
    generation: int
    """The generation in which it trains or trained; 0 before the first."""
    progress: Mapping[str, float] | None = None
    """The fields of a policy's `Progress`, as its processes say them."""
    has_state: bool | None = None
    """Whether its processes have a state from which training can go on, or could load one; None where nobody knows."""
    unreached: tuple[str, ...] = ()
    """The nodes, by their ids, to which nothing of what its processes send gets through."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Beat:
        """Reads what `asdict` returned. Raises ValueError for anything else."""
        return read(cls, data)


@dataclass(frozen=True)
class TrainingEnd:
    """Why the training ends on every host."""

    line: str
    exit_code: int


@dataclass(frozen=True)
class View:
    """The store's host says this of the training again and again."""

    count: int
    generation: int = 0
    is_over: bool = False
    """Whether nobody may train in this generation any more: hosts are lost, and the next one is not agreed yet."""
    end: TrainingEnd | None = None
    spares: tuple[str, ...] = ()
    """The nodes that wait to train, by their ids: whoever leads next waits for them, as for those that train."""
    apart: tuple[tuple[str, str, float], ...] = ()
    """Pairs of nodes, by their ids, that do not train together, and for how many seconds: whoever leads next keeps to
    that."""

    def followed(self, **changes: Any) -> View:  # noqa: ANN401 - the fields
        """Returns the next view."""
        return replace(self, count=self.count + 1, **changes)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> View:
        """Reads what `asdict` returned. Raises ValueError for anything else."""
        return read(cls, data)


@dataclass(frozen=True)
class Times:
    """How long is waited for what: the settings of the user, and what follows from `lease_s`."""

    lease_s: float = 2.0
    """A node that has been silent for so long is lost."""
    last_call_s: float = 5.0
    """A training begins when nothing has changed for so long, while there is room for more hosts."""
    wait_limit_s: float = 600.0
    """A policy that has said `wait` for so long, while nobody trains, has failed."""
    join_limit_s: float = 600.0
    """How long an agent looks for a store that it can reach."""
    hang_s: float = 600.0
    """Processes that go on after changes leave their group after so long without a step, or ten times the longest. A
    validation is no step: the limit is long, since state that only processes have is lost with the last of them."""
    leave_s: float = 600.0
    """A process that has not left its group so long after it was told to is killed, or three times the longest step."""

    @property
    def beat_s(self) -> float:
        """The time between two signs of life: some may be late or missed in a lease."""
        return min(1.0, self.lease_s / 8)

    @property
    def call_s(self) -> float:
        """A call to the store or the run directory that takes longer is given up."""
        return self.lease_s / 2

    @property
    def grace_s(self) -> float:
        """How much longer than others a node may be silent that has to find a new store."""
        return self.lease_s / 2

    @property
    def failure_s(self) -> float:
        """Where processes ended on some hosts only: how long the others have to be lost or to end as well."""
        return self.lease_s * 1.5


@dataclass(frozen=True)
class AgentSetting:
    """The facts that an agent has from its command line."""

    node: Node
    port: int
    may_begin: bool
    """Whether the store may begin on this host: the endpoint names it, or none."""
    most: int
    policy: AskedPolicy
    times: Times
    ends_unix_s: float | None = None
    """When the job's time is over, where that is known."""
    joins: bool = False
    """Whether this agent is of another job than the training: it begins no training, goes on with none that was lost
    before it came, and ends with one that is over."""
