"""What is wrong with a run as a whole: what wrappers and daemons told, and what their silence says. Pure.

The same thing on many nodes is one problem, with the number and the first names of these nodes before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from hpcstage.record.digest import Digest
from hpcstage.record.part import RunPart
from hpcstage.record.roster import MISSING, State, few

KILLED = "the numbers end with the last thing noted; look for a wall time or memory limit of the job"
NO_PART = "its daemon did not start or could not write to the run directory: see daemon.log in the node directory"
DIED = "training went on from the source; the numbers of that node end where it did; see daemon.log"
CLOCKS = "set the nodes' clocks (NTP); their times were moved into the run as far as it proves them wrong"
NAMED = 16
"""So many nodes of a problem are named."""

Problem = dict[str, Any]


def problems_of(run: RunPart, nodes: Sequence[Digest], silent: Sequence[str], total: int) -> list[Problem]:
    """Told ones first. `silent`: nodes of which nothing was heard; `total`: so many nodes the job has."""
    told = [_whole(problem) for problem in run.problems]
    told += _of_nodes(nodes, total) if total > 1 else [_whole(p) for node in nodes for p in node.part.problems]
    names = {problem["id"] for problem in told}
    return _unique([*told, *(problem for problem in _own(run, nodes, silent) if problem["id"] not in names)])


def ended(run: RunPart) -> bool:
    """Whether the wrapper saw the end of the command."""
    return run.exit_code is not None or run.signal is not None


def _own(run: RunPart, nodes: Sequence[Digest], silent: Sequence[str]) -> list[Problem]:
    found = []
    if not ended(run):
        found.append(_problem("killed", "the wrapper did not see the end of the command", KILLED))
    if silent:
        found.append(_problem("no-part", f"no report from {few(silent)}", NO_PART, silent))
    cut = [node.name for node in nodes if node.state is State.DIED]
    if cut:
        found.append(_problem("daemon-died", f"the daemon on {few(cut)} did not end in order", DIED, cut))
    moved = {node.name: node.clock_moved_s for node in nodes if node.clock_moved_s}
    if moved:
        worst = max(abs(value) for value in moved.values())
        text = f"the clocks of {few(moved)} differ by {worst:.0f} s or more from that of {run.host}"
        found.append(_problem("clocks", text, CLOCKS, list(moved)))
    return found


def _problem(name: str, text: str, remedy: str, nodes: Sequence[str] = ()) -> Problem:
    problem: Problem = {"id": name, "text": text, "remedy": remedy}
    return problem | ({"nodes": list(nodes[:NAMED]), "count": len(nodes)} if nodes else {})


def _whole(problem: dict[str, str]) -> Problem:
    return _problem(problem.get("id", "unknown"), problem.get("text", ""), problem.get("remedy", ""))


def _of_nodes(nodes: Sequence[Digest], total: int) -> list[Problem]:
    """By name: one node's as it told it, several nodes' together with the text of the first."""
    groups: dict[str, list[tuple[Digest, Problem]]] = {}
    for node in nodes:
        for problem in {p.get("id", "unknown"): p for p in reversed(node.part.problems)}.values():
            groups.setdefault(problem.get("id", "unknown"), []).append((node, _whole(problem)))
    return [_joined(found, total) for found in groups.values()]


def _joined(found: Sequence[tuple[Digest, Problem]], total: int) -> Problem:
    names = [node.name for node, _ in found]
    first = found[0][1]
    who = names[0] if len(names) == 1 else f"{len(names)} of {total} nodes ({few(names)})"
    alike = len({problem["text"] for _, problem in found}) == 1
    lead = "" if len(names) == 1 or alike else f"{names[0]}: "
    if first["id"] == MISSING:
        who = f"no daemon on {who}"
    return _problem(first["id"], f"{who}: {lead}{first['text']}", first["remedy"], names)


def _unique(problems: Iterable[Problem]) -> list[Problem]:
    kept: dict[tuple[str, str], Problem] = {}
    for problem in problems:
        kept.setdefault((problem["id"], problem["text"]), problem)
    return list(kept.values())
