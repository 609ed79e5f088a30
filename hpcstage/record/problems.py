"""Lists what is wrong with a run as a whole: what wrapper and daemons reported, and what their silence means. Pure.

The same problem on many nodes is one entry, whose text begins with the number and the first names of these nodes. Where
they told it in different words, the entry says whose words it has.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hpcstage.problem import Problem
from hpcstage.record.figures.digest import Digest
from hpcstage.record.parts.alive import Life
from hpcstage.record.parts.roster import Presence, few
from hpcstage.record.parts.run import RunPart

KILLED = "the figures end with the last thing noted; if the job ended early, look for its wall time or memory limit"
NO_PART = (
    "its daemon did not start, ended early, or could not write to the run directory; a log that it left is "
    "nodes/{host}.log there"
)
DIED = "training went on from the source; the figures of that node end where its daemon did"
RUNNING = "the figures are those up to now; ask again when the command has ended"
UNCLEAR = "the figures are those up to now; ask again in a minute, or on that host"
SILENT = "a node that is lost, or whose daemon is, looks so, and one that cannot write to the run directory"
_Told = tuple[str | None, Problem]
"""The name of a node, or None for the wrapper and the lead; and a problem that it reported."""


def problems_of(
    run: RunPart, nodes: Sequence[Digest], silent: Sequence[str], total: int, running: Life | None = None
) -> list[Problem]:
    """Returns all problems, reported ones first. `silent` names nodes without a part; the job has `total` nodes."""
    told: list[_Told] = [(None, problem) for problem in run.problems]
    told += [(node.row.host, problem) for node in nodes for problem in node.part.problems]
    problems = _grouped(told, total) if total > 1 else _unique(told)
    ids = {problem.id for problem in problems}
    return [*problems, *(p for p in _own(run, nodes, silent, running, ids) if p.id not in ids)]


def ended(run: RunPart) -> bool:
    """Returns whether the wrapper saw the end of the command."""
    return run.exit_code is not None or run.signal is not None


def _own(
    run: RunPart, nodes: Sequence[Digest], silent: Sequence[str], running: Life | None, ids: Collection[str]
) -> list[Problem]:
    if run.aside or (ended(run) and run.child_started_s is None):
        return []
    if running and not ended(run):
        return [*_silent(nodes), _going_on(run, running)]
    found = []
    if not ended(run):
        found.append(Problem("killed", "hpcstage stopped before the command did", KILLED))
    if silent:
        remedy = NO_PART.format(host=silent[0])
        found.append(Problem("no-part", f"no report from {few(silent)}", remedy))
    cut = [node.row.host for node in nodes if node.row.state is Presence.DIED]
    if cut and "node-dead" not in ids:
        found.append(Problem("daemon-died", f"the daemon on {few(cut)} did not shut down cleanly", DIED))
    return found


def _going_on(run: RunPart, running: Life) -> Problem:
    if running.is_certain:
        return Problem("running", f"the run goes on: {running.why}", RUNNING)
    text = f"the command runs on {run.host}, or was killed a moment ago: {running.why}"
    return Problem("unclear", text, UNCLEAR)


def _silent(nodes: Sequence[Digest]) -> list[Problem]:
    found = [node.row for node in nodes if node.row.state is Presence.SILENT]
    if not found:
        return []
    text = f"nothing was heard from {few([row.host for row in found])}: {found[0].why}"
    return [Problem("node-silent", text, SILENT)]


def _grouped(told: Sequence[_Told], total: int) -> list[Problem]:
    """Joins the reported problems into one for each id."""
    groups: dict[str, list[_Told]] = {}
    for one in told:
        groups.setdefault(one[1].id, []).append(one)
    return [_joined(found, total) for found in groups.values()]


def _joined(found: Sequence[_Told], total: int) -> Problem:
    names = list(dict.fromkeys(node for node, _ in found if node is not None))
    texts = list(dict.fromkeys(problem.text for _, problem in found))
    teller, first = found[0]
    if len(names) > 1:
        is_of_all = teller is None or len(texts) == 1 or teller in texts[0]
        whose = "" if is_of_all else f"; on {teller}"
        text = f"{len(names)} of {total} nodes ({few(names)}){whose}: {texts[0]}"
    elif names and names[0] not in texts[0]:
        text = f"{names[0]}: {texts[0]}"
    else:
        text = texts[0] if len(texts) == 1 else f"{texts[0]} (and {len(texts) - 1} more like it)"
    return Problem(first.id, text, first.remedy)


def _unique(told: Sequence[_Told]) -> list[Problem]:
    kept: dict[tuple[str, str], Problem] = {}
    for _, problem in told:
        kept.setdefault((problem.id, problem.text), problem)
    return list(kept.values())
