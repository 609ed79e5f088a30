"""`hpcstage plan` and a run see the same machine; a damaged record is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage, python_command

from hpcstage import config
from hpcstage.preview.pipeline import PlanInputs
from hpcstage.preview.plan import find_earlier
from hpcstage.protocol import rundir
from hpcstage.record import index


def test_virtual_nodes_divide_the_machine_in_a_plan_as_in_a_run(
    hpcstage: Hpcstage, make_tree: Callable[..., Path]
) -> None:
    options = ("--nodes", "3", "--data", make_tree(files=6))
    said = hpcstage("plan", "--json", *options)
    assert said.returncode == 0, said.stderr
    run = hpcstage("run", *options, "--", *python_command("pass"))
    assert run.returncode == 0, run.stderr
    (record,) = hpcstage.records()
    planned, ran = json.loads(said.stdout)["budget"], json.loads(record.read_text())["nodes"][0]["budget_bytes"]
    assert "divided among 3 virtual nodes" in planned["why"]
    assert planned["size_bytes"] == pytest.approx(ran, rel=0.1)


@pytest.mark.parametrize(
    "data", ["{", "[]", "{}", '{"run_id": 3}', '{"run_id": "r", "problems": [{}]}', '{"problems": 7}']
)
def test_a_damaged_record_is_no_earlier_run(hpcstage: Hpcstage, make_tree: Callable[..., Path], data: str) -> None:
    root = make_tree(files=1)
    given = {"data": [os.fspath(root)]}
    inputs = PlanInputs.of_config(config.load(given, hpcstage.env, hpcstage.cwd), hpcstage.env, hpcstage.cwd, None)
    run_dir = hpcstage.cwd / "run"
    run_dir.mkdir()
    line = {"run_id": "r", "run_dir": os.fspath(run_dir), "command": ["true"], "started_unix_s": 1e9}
    line |= {"roots": [os.path.realpath(root)], "exit_code": 0}
    path = index.path_of(hpcstage.env)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**line, "roots": [1, "a"]}) + "\n" + json.dumps(line) + "\n")
    assert index.find([os.path.realpath(root)], hpcstage.env) == run_dir
    (run_dir / rundir.PART).write_text(data)
    assert find_earlier(inputs.datasets.all, hpcstage.env) is None
    (run_dir / rundir.RECORD).write_text(data)
    assert find_earlier(inputs.datasets.all, hpcstage.env) is None
    path.write_text(json.dumps({**line, "roots": [1, "a"]}) + "\n")
    assert find_earlier(inputs.datasets.all, hpcstage.env) is None
