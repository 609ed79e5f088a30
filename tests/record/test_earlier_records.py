"""Records that earlier versions of hpcstage wrote are shown: what those did not know is unknown, never zero.

The files in `earlier/` are of real runs of these versions; 1.0-order is of a later 1.0, which knew more of the order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from recordcases import announced, node_part

from hpcstage.record import files
from hpcstage.record.parts.part import NodePart, OrderPart
from hpcstage.record.schema import Record
from hpcstage.record.workload import workload_of
from hpcstage.report.canvas import Canvas
from hpcstage.report.terminal.page import render

REPO = Path(__file__).resolve().parents[2]
FILES = sorted((Path(__file__).parent / "earlier").glob("*.json"))
ADDED = {
    "run": ("state",),
    "totals": ("measuring_opens", "peer_files", "sent_bytes", "sent_files"),
    "coverage": ("unseen_bytes",),
    "contention": ("own_periods", "verdict"),
    "order": (
        "planned", "followed", "trace_used", "trace_unused_why", "trace_written", "trace_why", "announcements",
        "announced_files", "announced_opens", "unknown_samples", "opened_files", "lost_bytes", "near_share",
    ),
}  # fmt: skip
"""Keys that version 1.0 lacked at first."""


def report(path: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "hpcstage", "report", str(path), *arguments]
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_there_is_a_record_of_each_version() -> None:
    assert {json.loads(path.read_text())["schema_version"] for path in FILES} == {"1.0", "1.1", "1.2"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_command_shows_it(path: Path) -> None:
    data = json.loads(path.read_text())
    text = report(path)
    assert f"hpcstage report: {data['run']['id']}" in text
    assert "mode runtime, exit code 0" in text
    assert "40 of 40 files, 8 MB of 8 MB" in text
    assert f"120 opens below the datasets, {data['coverage']['swapped']} swapped" in text
    assert json.loads(report(path, "--json")) == data


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_value_is_the_files_and_what_is_missing_is_unknown(path: Path) -> None:
    data = json.loads(path.read_text())
    found = files.load(path).to_json()
    for section, names in ADDED.items():
        given = data[section]
        assert {name: found[section][name] for name in given if name in found[section]} == given
        missing = [name for name in names if name not in given and name != "state"]
        assert {found[section][name] for name in missing} <= {None}
    assert found["run"]["state"] == "ended"
    assert found["order"]["tables"] == data["order"].get("tables", [])
    assert workload_of(Record.from_json(data)).epochs == 3


@pytest.mark.parametrize(
    ("told", "state"),
    [({"exit_code": 1}, "ended"), ({"signal": 9}, "ended"), ({}, "lost"), ({"state": "aside"}, "aside")],
)
def test_the_state_of_the_run_follows_from_its_end(told: dict[str, Any], state: str) -> None:
    data = json.loads(FILES[0].read_text())
    data["run"] = {**data["run"], "exit_code": None, "signal": None, **told}
    assert Record.from_json(data).run.state == state


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_key_that_may_be_null_or_says_little_may_be_missing(path: Path) -> None:
    data = json.loads(path.read_text())
    canvas = Canvas.of_stdout(no_color=True)
    for section in ("run", "order", "coverage", "totals", "time_split"):
        for name in data[section]:
            if data[section][name] is None or name in ("cwd", "started_unix_s", "method", "state"):
                less = {**data, section: {key: value for key, value in data[section].items() if key != name}}
                assert render(Record.from_json(less), canvas) == render(Record.from_json(data), canvas), name
    for name in ("generator", "problems", "config"):
        assert render(Record.from_json({key: data[key] for key in data if key != name}), canvas)


def test_a_damaged_table_of_a_nodes_part_costs_only_itself() -> None:
    whole = node_part(order=announced(), errors=[{"path": "p", "error": "e"}])
    data = json.loads(json.dumps(whole.to_json()))
    order = {**data["order"], "lead": {"median_files": 1}, "tables": [{"key": 1}]}
    damaged = {"order": order, "errors": [{}], "missed_processes": [{"command": "python"}], "budget": []}
    found = NodePart.from_json({**data, **damaged})
    assert (found.errors, found.missed_processes, found.budget) == ((), (), None)
    assert (found.order.lead, found.order.tables) == (None, ())
    assert found.order.announcements == whole.order.announcements
    assert (found.totals, found.samples) == (whole.totals, whole.samples)
    assert NodePart.from_json({**data, "order": 1}).order == OrderPart()
    with pytest.raises(ValueError, match="NodePart has no host"):
        NodePart.from_json({key: data[key] for key in data if key != "host"})
