"""Records of all kinds, drawn from the record's cases."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "record"))

from recordcases import announced, node_part, run_part, trainer, worker

from hpcstage.record.compose import compose
from hpcstage.record.part import DatasetPart, ProcessPart

HOSTILE = "/data/\x1b[31mred\x07\n\r\t\udcff\u202eevil 漢字漢字 " + "x" * 300


def hostile() -> dict[str, Any]:
    node = node_part(
        host=HOSTILE,
        mode_why=HOSTILE,
        datasets=[DatasetPart("0", HOSTILE, [HOSTILE])],
        errors=[{"path": HOSTILE, "error": HOSTILE, "count": 3}],
        problems=[{"id": HOSTILE, "text": HOSTILE, "remedy": HOSTILE}] * 3,
        missed_processes=[{"pid": 1, "command": HOSTILE}],
        missed_count=1,
        order=announced(provenance=HOSTILE),
        complete=False,
    )
    return compose(
        run_part(run_id=HOSTILE, command=["python", HOSTILE], host=HOSTILE, job_id=HOSTILE, mode_asked="auto"), [node]
    )


def python_layer() -> dict[str, Any]:
    process = ProcessPart(5, 1, "python", "3.11", 0.0, {"hit_opens": 100, "source_opens": 90, "direct_full": 90})
    return compose(run_part(), [node_part(processes=[process])])


CASES = {
    "whole": lambda: compose(run_part(), [node_part()]),
    "announced": lambda: compose(run_part(), [node_part(order=announced())]),
    "not kept": lambda: compose(run_part(), [node_part(order=announced(kept_share=0.04, lead=None))]),
    "upfront": lambda: compose(run_part(mode_asked="auto", child_started_s=40.0), [node_part(mode="upfront")]),
    "direct": lambda: compose(run_part(mode_asked="direct"), [node_part(mode="direct")]),
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
}
