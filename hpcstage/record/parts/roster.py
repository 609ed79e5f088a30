"""Says which nodes a job has, what they are called, and which of them never came up or died. Pure.

A node that never came up has no part, or one (with the problem `node-missing`) from the program that should have
started its daemon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from enum import Enum

from hpcstage.problem import Problem
from hpcstage.record.parts.alive import Life
from hpcstage.record.parts.part import NodePart, NodeTotals
from hpcstage.record.parts.run import RunPart
from hpcstage.units import format_duration

MISSING = "node-missing"
FAR_S = 10.0
"""A node's times may lie outside of the run by up to this before its clock is taken to be wrong."""
LEFT_OVER_S = 60.0
"""A part that began longer than this before the run is of an earlier run, or of a node with a wrong clock."""


class Presence(Enum):
    """The state of a node at the end of the run, or now."""

    OK = "ok"
    DIED = "died"
    """The node's daemon ended before the job did."""
    MISSING = "missing"
    """The node's daemon never reported."""
    SILENT = "silent"
    """The job goes on, but the node's daemon has not reported for a while."""
    RUNNING = "running"
    """The job has not ended."""


def is_left_over(run: RunPart, node: NodePart) -> bool:
    """Returns whether the part is of an earlier run in the same run directory, and of a node that this run lacks."""
    early = node.started_unix_s < run.started_unix_s - LEFT_OVER_S
    return early and _short(node.host) not in {_short(host) for host in (run.host, *run.nodes)}


def state_of(node: NodePart, running: Life | None = None) -> Presence:
    """Returns a node's state from its part. While the job runs, a part without an end is normal, as long as it is
    written again and again."""
    if any(problem.id == MISSING for problem in node.problems):
        return Presence.MISSING
    if node.complete:
        return Presence.OK
    if running is None:
        return Presence.DIED
    return Presence.SILENT if node.host in running.silent_s else Presence.RUNNING


def says_something(node: NodePart) -> bool:
    """Returns whether a part holds any figure; if not, sums cover the other nodes only."""
    return node.complete or bool(node.totals != NodeTotals() or node.samples or node.processes)


def reason_of(run: RunPart, node: NodePart, state: Presence, running: Life | None) -> str | None:
    """Says why a node did not come up or died, as far as a part says it; None for other nodes."""
    if state in (Presence.OK, Presence.RUNNING):
        return None
    if state is Presence.SILENT and running is not None:
        return f"its last sign of life is {format_duration(running.silent_s[node.host])} old"
    told = [problem for problem in node.problems if problem.id == MISSING] or _of_host(run, node.host)
    told = told or list(node.problems)
    if told:
        return without_host(told[0].text, node.host)
    return (node.group and node.group.why) or "its daemon did not shut down cleanly"


def _of_host(run: RunPart, host: str) -> list[Problem]:
    """Returns what the lead said of a node: `... on HOST ended early: REASON` or `... on HOST: REASON`."""
    told = [problem for problem in run.problems if problem.id.startswith("node-")]
    return [problem for problem in told if host in problem.text.partition(": ")[0].split()]


def unheard_why(run: RunPart, host: str) -> str:
    """Says why a node without a part did not come up, as `reason_of` does for a node with one."""
    told = _of_host(run, host)
    return without_host(told[0].text, host) if told else "nothing was heard from it"


def without_host(text: str, host: str) -> str:
    """Returns what follows `nothing is staged on HOST: `, as the caller names the host elsewhere."""
    head, _, rest = text.partition(": ")
    return rest if rest and host in head.split() else text


def names_of(nodes: Sequence[NodePart]) -> list[str]:
    """Returns the nodes' names: their hosts, with the node's index where several nodes share a host."""
    hosts = Counter(node.host for node in nodes)
    return [node.host if hosts[node.host] == 1 else f"{node.host}.v{node.node_index}" for node in nodes]


def expected(run: RunPart, nodes: Sequence[NodePart]) -> int:
    """Returns how many nodes the job has."""
    return max([len(set(run.nodes)) or 1, *(node.node_count for node in nodes)])


def without_part(run: RunPart, nodes: Sequence[NodePart]) -> list[str]:
    """Lists the nodes that have no part: by name as far as names are known, else by index."""
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
    """Returns the host name without its domain, on which schedulers and hosts do not agree."""
    head = host.split(".", maxsplit=1)[0]
    return host if head.isdigit() else head


def few(names: Collection[str]) -> str:
    """Returns the first three names and how many more there are, as text."""
    listed = list(names)
    shown = ", ".join(listed[:3])
    return shown if len(listed) <= 3 else f"{shown} and {len(listed) - 3} more"


def clock_error_s(run: RunPart, node: NodePart, last_s: float) -> float:
    """Returns by how much a node's clock must be ahead (positive) or behind, if its times are to lie within the run.

    Only errors that the run's own span proves are found: smaller ones show nowhere. A node on the wrapper's host has
    the wrapper's clock.
    """
    if node.host == run.host:
        return 0.0
    start_s = node.started_unix_s - run.started_unix_s
    if start_s < -FAR_S:
        return start_s
    if run.ended_s is not None and start_s + last_s > run.ended_s + FAR_S:
        return min(start_s, start_s + last_s - run.ended_s) if start_s > 0 else 0.0
    return 0.0
