"""Knows the state of each node of a run, as agents and daemons tell it, and words the problems of those that are not in
the group. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpcstage.node.kept import KINDS
from hpcstage.problem import Problem
from hpcstage.protocol.membership import GroupNode

_STATES = ("ready", "joined", "staged", "missing", "dead", "ended")
"""States in the order in which a node says them."""
_OF_DIRECTORIES = (*(kind.key for kind in KINDS), "draining", "drained")
"""The messages of a node about its directories: that of a kind of files is watched, or why not; how it drains them."""
_GONE = "gone"
"""The last state: nothing of the run is left on the node."""
ENDED_EARLY = "its daemon ended early"


@dataclass
class NodeState:
    """The state of one node."""

    entry: GroupNode
    """Its entry in the membership; directory and socket are known once it is up."""
    state: str = "waiting"
    """One of waiting, ready, staged, ended; or missing or dead, with a reason."""
    reason: str = ""
    joined: bool = False
    """Whether its daemon knows the files."""
    unwatched: dict[str, str] = field(default_factory=dict)
    """By the kind of files: why its directory is not watched; empty: it is."""
    is_drained: bool = False
    """Whether all that can be done for its output files and checkpoints was done."""
    beat: object = None
    """It changes now and then while the node drains."""
    cleaning: bool = False
    """Whether its agent has said that the end has come or that the daemon is dead, but not yet that it is gone."""

    @property
    def alive(self) -> bool:
        """Whether it has a daemon."""
        return self.state in ("ready", "staged")


class NodeStates:
    """The states by index. The first node belongs to the wrapper, which has its daemon; the lead answers for the
    others."""

    def __init__(self, run_id: str, nodes: Sequence[GroupNode]) -> None:
        self.all = list(map(NodeState, nodes))
        self.all[0].state = "ready"
        self._run_id = run_id

    @property
    def waiting(self) -> list[int]:
        """Returns the nodes that may still come."""
        return [index for index, node in enumerate(self.all) if node.state == "waiting"]

    @property
    def alive(self) -> list[int]:
        """Returns the nodes that can be in a group, in order."""
        return [index for index, node in enumerate(self.all) if node.alive]

    @property
    def are_others_alive(self) -> bool:
        """Whether another node than the first has a daemon."""
        return any(node.alive for node in self.all[1:])

    @property
    def have_others_joined(self) -> bool:
        """Whether the daemons of all other nodes know the files."""
        return all(node.joined for node in self.all[1:] if node.alive or node.state == "waiting")

    @property
    def have_others_staged(self) -> bool:
        """Whether, with mode upfront, all other nodes hold what they will hold."""
        return all(node.state not in ("waiting", "ready") for node in self.all[1:])

    @property
    def is_any_cleaning(self) -> bool:
        """Whether a node is still being cleaned up."""
        return any(node.cleaning for node in self.all)

    def unwatched_why(self, kind: str) -> str | None:
        """Returns why another node has no directory for a kind of files that is watched; empty if all have, None if
        that is not known yet."""
        for node in self.all[1:]:
            why = node.unwatched.get(kind)
            if node.state in ("missing", "dead", "ended") or why:
                return f"{node.entry.host}: {why or node.reason}"
        return "" if all(kind in node.unwatched for node in self.all[1:]) else None

    @property
    def have_others_drained(self) -> bool:
        """Whether no other node that has a daemon still drains what is in its directories."""
        return all(node.is_drained or not node.alive for node in self.all[1:])

    def entries(self) -> list[GroupNode]:
        """Returns the nodes as they are now: those that have a daemon are there."""
        return [replace(node.entry, is_present=node.alive) for node in self.all]

    # ---- changes

    def set(self, index: int, state: str, reason: str = "") -> None:
        """Gives a node another state."""
        self.all[index].state, self.all[index].reason = state, reason

    def give_up_waiting(self, reason: str) -> None:
        """Leaves out the nodes that have not come by now."""
        for index in self.waiting:
            self.set(index, "missing", reason)

    def lose_others(self, reason: str) -> None:
        """Leaves out all nodes but the first, whose agents have ended: those that were up are dead."""
        self.give_up_waiting(reason)
        for index in (index for index in self.alive if index != 0):
            self.set(index, "dead", reason)

    def heard(self, told: Iterable[Mapping[str, object]]) -> None:
        """Takes what agents have said, in whatever order it came."""
        order = [*_STATES, *_OF_DIRECTORIES, _GONE]
        known = [data for data in told if data.get("state") in order]
        for data in sorted(known, key=lambda data: order.index(str(data["state"]))):
            self._message(data)

    def _message(self, data: Mapping[str, object]) -> None:
        index, state = data.get("index"), data.get("state")
        if data.get("run_id") != self._run_id or not isinstance(index, int) or not 0 < index < len(self.all):
            return
        node = self.all[index]
        if state in _OF_DIRECTORIES:
            _note_directory(node, str(state), data)
            return
        node.cleaning = state in ("ended", "dead") or (node.cleaning and state != _GONE)
        if state not in _STATES or node.state in ("dead", "ended"):
            return
        node.joined = node.joined or state in ("joined", "staged")
        if state in ("ready", "joined") and node.state == "staged":
            return
        if state in ("ready", "joined", "staged"):
            self.set(index, "staged" if state == "staged" else "ready")
            node.entry = replace(node.entry, node_dir=str(data.get("node_dir")), sock=str(data.get("sock")))
        else:
            self.set(index, str(state), str(data.get("reason") or ""))


def _note_directory(node: NodeState, message: str, data: Mapping[str, object]) -> None:
    """Notes what a node says of its directories."""
    if message == "drained":
        node.is_drained = True
    elif message == "draining":
        node.beat = data.get("beat")
    else:
        node.unwatched[message] = str(data.get("why") or "")


def problem_of(node: NodeState) -> Problem:
    """Returns what to say of a node that is not in the group."""
    host = node.entry.host
    if node.state == "missing":
        text = f"nothing is staged on {host}: {node.reason}"
        remedy = "its ranks read the source; see nodes/lead.log in the run directory, or try another --launcher"
        return Problem("node-missing", text, remedy)
    why = "" if node.reason == ENDED_EARLY else f": {node.reason}"
    text = f"the staging daemon on {host} ended early{why}"
    remedy = f"what runs there reads the source; its log is nodes/{host}.log in the run directory"
    return Problem("node-dead", text, remedy)
