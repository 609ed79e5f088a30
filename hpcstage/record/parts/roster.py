"""Which nodes a job has, what they are called, which of them never came up or died. Pure.

A node that never came up has a part that whoever should have started its daemon wrote (problem `node-missing`), or no
part at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum

from hpcstage.record.parts.part import NodePart, RunPart

MISSING = "node-missing"
FAR_S = 10.0
"""By so much a node's times may lie outside of the run before its clock is taken to be wrong."""
LEFT_OVER_S = 60.0
"""A part that began so long before the run is of an earlier one, or of a node with a wrong clock."""


class State(Enum):
    """How a node fared."""

    OK = "ok"
    DIED = "died"
    """Its daemon ended before the job did."""
    MISSING = "missing"
    """No daemon ever reported."""
    RUNNING = "running"
    """The job has not ended."""


def is_left_over(run: RunPart, node: NodePart) -> bool:
    """A part of an earlier run into the same run directory, of a node that this one does not have."""
    early = node.started_unix_s < run.started_unix_s - LEFT_OVER_S
    return early and _short(node.host) not in {_short(host) for host in (run.host, *run.nodes)}


def state_of(node: NodePart, *, running: bool = False) -> State:
    """From its part. While the job runs, a part without an end is as it should be."""
    if any(problem.get("id") == MISSING for problem in node.problems):
        return State.MISSING
    if node.complete:
        return State.OK
    return State.RUNNING if running else State.DIED


def says_something(node: NodePart) -> bool:
    """Whether a part holds any figure; if not, the sums are those of the other nodes."""
    return node.complete or bool(node.totals or node.samples or node.processes)


def reason_of(run: RunPart, node: NodePart, state: State) -> str | None:
    """Why it did not come up or died, as far as anybody said."""
    if state in (State.OK, State.RUNNING):
        return None
    told = [problem for problem in node.problems if problem.get("id") == MISSING] or _of_host(run, node.host)
    told = told or node.problems
    if told:
        return without_host(str(told[0].get("text", "")), node.host)
    return node.group.get("why") or "its daemon did not end in order"


def _of_host(run: RunPart, host: str) -> list[dict[str, str]]:
    return [p for p in run.problems if p.get("id", "").startswith("node-") and host in p.get("text", "").split()]


def unheard_why(run: RunPart, host: str) -> str:
    """As `reason_of`, of a node without a part."""
    told = _of_host(run, host)
    return without_host(told[0]["text"], host) if told else "nothing was heard of it"


def without_host(text: str, host: str) -> str:
    """What comes after `nothing is staged on HOST: `: the host is said elsewhere."""
    head, _, rest = text.partition(": ")
    return rest if rest and host in head.split() else text


def names_of(nodes: Sequence[NodePart]) -> list[str]:
    """Hosts; where several nodes share one, with the node's index."""
    hosts = Counter(node.host for node in nodes)
    return [node.host if hosts[node.host] == 1 else f"{node.host}.v{node.node_index}" for node in nodes]


def expected(run: RunPart, nodes: Sequence[NodePart]) -> int:
    """How many nodes the job has."""
    return max([len(set(run.nodes)) or 1, *(node.node_count for node in nodes)])


def without_part(run: RunPart, nodes: Sequence[NodePart]) -> list[str]:
    """Nodes of which nothing at all was heard: by name as far as names are known, else by index."""
    lacking = expected(run, nodes) - len(nodes)
    if lacking <= 0:
        return []
    hosts = list(dict.fromkeys(run.nodes or [run.host]))
    plain = len({_short(host) for host in hosts}) < len(hosts)  # virtual nodes differ behind the dot
    seen = {node.host if plain else _short(node.host) for node in nodes}
    names = [host for host in hosts if (host if plain else _short(host)) not in seen]
    indices = {node.node_index for node in nodes}
    unseen = [f"node {index}" for index in range(expected(run, nodes)) if index not in indices]
    return [*names, *unseen[len(names) :]][:lacking]


def _short(host: str) -> str:
    """Without its domain: schedulers and hosts do not agree on it."""
    head = host.split(".", maxsplit=1)[0]
    return host if head.isdigit() else head


def few(names: Collection[str]) -> str:
    """The first three, and how many more."""
    listed = list(names)
    shown = ", ".join(listed[:3])
    return shown if len(listed) <= 3 else f"{shown} and {len(listed) - 3} more"


def clock_error_s(run: RunPart, node: NodePart, last_s: float) -> float:
    """By how much a node's clock must be ahead (positive) or behind, if its times are to lie within the run.

    Only what the run's own span proves: smaller errors show nowhere. Nodes of the wrapper's host have its clock.
    """
    if node.host == run.host:
        return 0.0
    start_s = node.started_unix_s - run.started_unix_s
    if start_s < -FAR_S:
        return start_s
    if run.ended_s is not None and start_s + last_s > run.ended_s + FAR_S:
        return min(start_s, start_s + last_s - run.ended_s) if start_s > 0 else 0.0
    return 0.0
