"""Owns what an agent has from its command line: who it is, its policy, and how long everything may take. It has no
behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from hpcstage.elastic.membership.deciding import Patience
from hpcstage.elastic.membership.values import Node
from hpcstage.elastic.policy import AskedPolicy


@dataclass(frozen=True)
class Bounds:
    """How often nodes speak, and how long calls may take."""

    beat_s: float = 0.25
    call_s: float = 1.0
    """A call to the store or the run directory that takes longer is given up."""
    grace_s: float = 1.0
    """How much longer than others a node may be silent that has to find a new store."""
    hang_s: float = 600.0
    """Processes that go on after changes leave their group after so long without a step, or ten times the longest. A
    validation is no step: the limit is long, since state that only processes have is lost with the last of them."""
    leave_s: float = 600.0
    """A process that has not left its group so long after it was told to is killed, or three times the longest step."""
    stuck_s: float = 5.0
    """The same for a process that waits for others, though the connections to them are closed. The C++ code of gloo may
    miss that a connection was closed by the other side, and then waits for ever."""


@dataclass(frozen=True)
class AgentSetting:
    """The facts that an agent has from its command line."""

    node: Node
    port: int
    may_begin: bool
    """Whether the store may begin on this host: the endpoint names it, or none."""
    most: int
    policy: AskedPolicy
    patience: Patience
    bounds: Bounds
    join_limit_s: float = 600.0
    """How long an agent looks for a store that it can reach."""
    ends_unix_s: float | None = None
    """When the job's time is over, where that is known."""
    joins: bool = False
    """Whether this agent is of another job than the training: it begins no training, goes on with none that was lost
    before it came, and ends with one that is over."""
