"""Records of all kinds, drawn from the record's cases."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "record"))

import manycases
from recordcases import SECOND, announced, blocked, node_part, run_part, trainer, worker
from recordcases import composed as compose

from hpcstage.problem import Problem
from hpcstage.record.parts.part import DatasetPart
from hpcstage.record.parts.rows import ProcessPart
from hpcstage.record.schema import Record
from hpcstage.report import comparison
from hpcstage.report.canvas import Canvas
from hpcstage.report.terminal import short as shortly
from hpcstage.report.terminal.page import render

HOSTILE = "/data/\x1b[31mred\x07\n\r\t\udcff\u202eevil 漢字漢字 " + "x" * 300


def hostile() -> dict[str, Any]:
    node = node_part(
        host=HOSTILE,
        datasets=[DatasetPart(HOSTILE)],
        errors=[{"path": HOSTILE, "error": HOSTILE, "count": 3}],
        problems=[Problem(HOSTILE, HOSTILE, HOSTILE)] * 3,
        missed_processes=[{"command": HOSTILE}],
        missed_count=1,
        order=announced(provenance=HOSTILE),
        complete=False,
    )
    return compose(
        run_part(run_id=HOSTILE, command=["python", HOSTILE], host=HOSTILE, job_id=HOSTILE, direct_why=HOSTILE), [node]
    )


def python_layer() -> dict[str, Any]:
    process = ProcessPart(5, 1, "python", {"hit_opens": 100, "source_opens": 90, "direct_full": 90})
    return compose(run_part(), [node_part(processes=[process])])


@cache
def group(count: int, failed: int = 0, slow: int = 0) -> dict[str, Any]:
    """A job of many nodes: some missing, some dead, some slow, and one slow source."""

    def source(now_s: float) -> float:
        return 0.3 if 10 <= now_s < 20 else 1.0

    def own(now_s: float) -> float:
        return 0.3 if 25 <= now_s < 35 else 1.0

    shared = list(manycases.job(min(count, 16), 40, source=source))
    nodes = []
    for index in range(count):
        whole = manycases.node(index, count, 40, source=source, own=own) if index < slow else None
        part = whole or replace(shared[index % 16], host=f"node{index:04d}", node_index=index, node_count=count)
        if index >= count - failed:
            part = manycases.missing(index, count) if index % 2 else replace(part, complete=False, ended_s=None)
        nodes.append(part)
    told = [problem for node in nodes for problem in node.problems]
    return compose(manycases.run(count, problems=told), nodes)


def everything_at_once() -> dict[str, Any]:
    """As many lines as a report of several nodes can have."""
    record = deepcopy(group(64, failed=9, slow=5))
    record["order"] |= {name: value for name, value in announced().items() if name in record["order"]}
    record["run"] |= {"mode_asked": "upfront", "mode_why": "x" * 300}
    record["time_split"]["unmeasured"] = ["y" * 300]
    record["contention"]["periods"] *= 5
    return record


def hostile_nodes() -> dict[str, Any]:
    nodes = [manycases.node(index, 5, host=HOSTILE + str(index)) for index in range(3)]
    lost = replace(manycases.missing(3, 5, why=HOSTILE), host=HOSTILE + "3")
    group = {"generations": 4, "why": HOSTILE}
    dead = manycases.node(4, 5, host=HOSTILE + "4", complete=False, placement_why=HOSTILE, group=group)
    nodes[0] = replace(nodes[0], placement_why=HOSTILE)
    nodes[1].processes[0].counters["loader_wait_ns"] = 40 * SECOND
    nodes[1].processes[1].counters |= blocked(90)
    return compose(manycases.run(5, host=HOSTILE, nodes=[HOSTILE + str(n) for n in range(5)]), [*nodes, lost, dead])


CASES = {
    "whole": lambda: compose(run_part(), [node_part()]),
    "announced": lambda: compose(run_part(), [node_part(order=announced())]),
    "upfront": lambda: compose(run_part(mode_asked="upfront", child_started_s=40.0), [node_part(mode="upfront")]),
    "direct": lambda: compose(run_part(mode_asked="direct"), [node_part(mode="direct")]),
    "local": lambda: compose(run_part(direct_why="/d is local"), [node_part(mode="direct")]),
    "no node": lambda: compose(run_part(), []),
    "killed": lambda: compose(run_part(exit_code=None, child_ended_s=None), [node_part(complete=False)]),
    "signal": lambda: compose(run_part(exit_code=137, signal=9), [node_part()]),
    "nothing attached": lambda: compose(run_part(), [node_part(processes=[], samples=[])]),
    "python layer": python_layer,
    "several nodes": lambda: compose(
        run_part(nodes=[f"node{n}" for n in range(40)]), [node_part(host=f"node{n}") for n in range(5)]
    ),
    "many processes": lambda: compose(
        run_part(), [node_part(processes=[trainer(), *(worker(n) for n in range(200, 300))])]
    ),
    "hostile": hostile,
    "2 nodes": lambda: group(2),
    "4 nodes, one failed": lambda: group(4, failed=1, slow=1),
    "64 nodes, many failed": lambda: group(64, failed=9, slow=5),
    "1024 nodes": lambda: group(1024, failed=300, slow=3),
    "all nodes failed": lambda: group(8, failed=8),
    "everything at once": everything_at_once,
    "hostile nodes": hostile_nodes,
}


def shown(data: dict[str, Any], width: int = 80, *, color: bool = False, unicode: bool = True) -> str:
    """The report of a record."""
    return render(Record.from_json(data), Canvas(width, color=color, unicode=unicode))


def short(data: dict[str, Any]) -> list[str]:
    """The lines at the end of a run."""
    return shortly.short(Record.from_json(data))


def side_by_side(*names: str) -> str:
    """The comparison of some of the cases."""
    return comparison.side_by_side([Record.from_json(CASES[name]()) for name in names], Canvas())
