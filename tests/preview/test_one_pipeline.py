"""`hpcstage plan` and a run in mode auto make the same plan of the same situation, figure for figure."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage, python_command

from hpcstage import config
from hpcstage.preview import pipeline, planfile
from hpcstage.preview.inputs import Inputs
from hpcstage.preview.pipeline import RUN_PROBE_S, find, forecast, look
from hpcstage.preview.program import find_earlier
from hpcstage.protocol import rundir
from hpcstage.record import index

READS = """
import os, sys, time
for name in sys.argv[2:]:
    open(f"{sys.argv[1]}/{name}", "rb").read()
deadline = time.monotonic() + 30
while not os.path.exists(os.environ["HPCSTAGE_RESULTS"] + "/plan.json") and time.monotonic() < deadline:
    time.sleep(0.01)
"""
OPTIONS = {
    "epochs": "7", "epoch_compute": "30s", "readers": "2", "startup": "1s", "budget": "200kB,1000", "max_rate": "1GB",
    "order": "manifest", "mode": "auto",
}  # fmt: skip


def words(options: dict[str, str]) -> list[str]:
    return [word for key, value in options.items() for word in ("--" + key.replace("_", "-"), value)]


def without_measurements(plan: dict[str, Any]) -> dict[str, Any]:
    """What does not follow from how fast this machine is at the moment."""
    kept = {key: value for key, value in plan.items() if key not in ("local", "mode", "notes")}
    nodes = plan["nodes"] and {
        **plan["nodes"],
        "knee": None,
        "sizes": [size["choice"] for size in plan["nodes"]["sizes"]],
    }
    return {
        **kept,
        "scan": {**plan["scan"], "seconds": 0},
        "probe_s": 0,
        "rates": sorted(name for name, value in plan["rates"].items() if value is not None),
        "forecast": {**plan["forecast"], "modes": sorted(plan["forecast"]["modes"]), "choice": "", "why": ""},
        "nodes": nodes,
    }


@pytest.mark.parametrize("nodes", ["1", "3"])
def test_a_run_in_mode_auto_records_what_plan_says(
    hpcstage: Hpcstage, make_tree: Callable[..., Path], nodes: str
) -> None:
    root = make_tree(files=24)
    options = {**OPTIONS, "nodes": nodes, "placement": "partition"}
    run_only = {"mode": options.pop("mode")}
    said = hpcstage("plan", "--json", "--data", root, *words(options))
    assert said.returncode == 0, said.stderr
    command = python_command(READS, root, "class0/file00000.bin")
    run = hpcstage("run", "--data", root, *words(options | run_only), "--", *command)
    assert run.returncode == 0, run.stderr
    (record,) = hpcstage.records()
    plan = json.loads((record.parent / "plan.json").read_text())
    assert without_measurements(plan) == without_measurements(json.loads(said.stdout))
    assert json.loads(record.read_text())["forecast"] == plan["forecast"]
    # With the run's measurements in place of its own, `plan` says what the run recorded.
    given = {"data": [os.fspath(root)], **options}
    inputs = Inputs.of_config(config.load(given, hpcstage.env, hpcstage.cwd), hpcstage.env, hpcstage.cwd)
    past = planfile.load(record.parent)
    assert past.scan is not None
    assert past.rates is not None
    found = find(inputs)
    found = replace(found, scan=replace(found.scan, seconds=past.scan.seconds))
    facts = replace(look(inputs, found, 0.0), earlier=None, rates=past.rates, probe_s=past.probe_s)
    again = forecast(inputs, found, facts)
    summary = json.loads(json.dumps(planfile.summary(again)))
    for name in ("forecast", "workload", "rates", "fit", "budget", "nodes"):
        assert summary[name] == plan[name], name
    assert past.probe_s > 0
    assert past.forecast is not None
    unprobed = forecast(inputs, found, replace(facts, probe_s=0.0)).forecast
    assert unprobed is not None
    saved_s = past.forecast.modes["upfront"].total_s - unprobed.modes["upfront"].total_s
    assert saved_s == pytest.approx(past.probe_s), "copying begins after the probe"


def test_virtual_nodes_divide_the_machine_in_a_plan_as_in_a_run(
    hpcstage: Hpcstage, make_tree: Callable[..., Path]
) -> None:
    options = ("--nodes", "3", "--data", make_tree(files=6))
    said = hpcstage("plan", "--json", "--no-probe", *options)
    assert said.returncode == 0, said.stderr
    run = hpcstage("run", *options, "--", *python_command("pass"))
    assert run.returncode == 0, run.stderr
    (record,) = hpcstage.records()
    planned, ran = json.loads(said.stdout)["budget"], json.loads(record.read_text())["nodes"][0]["budget"]
    assert planned["why"] == ran["why"]
    assert "divided among 3 virtual nodes" in planned["why"]
    assert planned["size_bytes"] == pytest.approx(ran["size_bytes"], rel=0.1)


def test_a_preview_counts_the_time_of_a_runs_probe(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    given = {"data": [os.fspath(make_tree(files=4))]}
    inputs = Inputs.of_config(config.load(given, hpcstage.env, hpcstage.cwd), hpcstage.env, hpcstage.cwd)
    found = find(inputs)
    assert look(inputs, found, 0.0).probe_s == RUN_PROBE_S
    assert 0 < look(inputs, found, 2.0).probe_s <= RUN_PROBE_S


def test_a_run_looks_for_an_earlier_one_only_where_something_is_not_known(
    hpcstage: Hpcstage, make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"data": [os.fspath(make_tree(files=4))], **{name: OPTIONS[name] for name in ("epoch_compute", "startup")}}
    inputs = Inputs.of_config(config.load(given, hpcstage.env, hpcstage.cwd), hpcstage.env, hpcstage.cwd)
    found = find(inputs)
    looked: list[object] = []
    monkeypatch.setattr(pipeline, "find_earlier", lambda *arguments: looked.append(arguments))
    look(replace(inputs, command=("train", "--epochs", "3", "--workers=2")), found, 0.5)
    assert not looked, "options and the command say everything"
    look(replace(inputs, command=("train", "--epochs", "3")), found, 0.5)
    look(inputs, found, 0.5)
    assert len(looked) == 2


@pytest.mark.parametrize(
    "data", ["{", "[]", "{}", '{"run_id": 3}', '{"run_id": "r", "problems": [{}]}', '{"problems": 7}']
)
def test_a_damaged_record_is_no_earlier_run(hpcstage: Hpcstage, make_tree: Callable[..., Path], data: str) -> None:
    root = make_tree(files=1)
    given = {"data": [os.fspath(root)]}
    inputs = Inputs.of_config(config.load(given, hpcstage.env, hpcstage.cwd), hpcstage.env, hpcstage.cwd)
    run_dir = hpcstage.cwd / "run"
    run_dir.mkdir()
    line = {"run_dir": os.fspath(run_dir), "roots": [os.path.realpath(root)], "exit_code": 0}
    path = index.path_of(hpcstage.env)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**line, "roots": [1, "a"]}) + "\n" + json.dumps(line) + "\n")
    assert index.find(None, [os.path.realpath(root)], hpcstage.env) == run_dir
    (run_dir / rundir.PART).write_text(data)
    assert find_earlier(inputs.resolved.datasets, hpcstage.env) is None
    (run_dir / rundir.RECORD).write_text(data)
    assert find_earlier(inputs.resolved.datasets, hpcstage.env) is None
    path.write_text(json.dumps({**line, "roots": [1, "a"]}) + "\n")
    assert find_earlier(inputs.resolved.datasets, hpcstage.env) is None
