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
from hpcstage.preview import planfile
from hpcstage.preview.inputs import Inputs
from hpcstage.preview.pipeline import find, forecast, look

READS = """
import os, sys, time
for name in sys.argv[2:]:
    open(f"{sys.argv[1]}/{name}", "rb").read()
deadline = time.monotonic() + 30
while not os.path.exists(os.environ["HPCSTAGE_RUN_DIR"] + "/plan.json") and time.monotonic() < deadline:
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
    again = forecast(inputs, found, replace(look(inputs, found, 0.0), earlier=None, rates=past.rates))
    summary = json.loads(json.dumps(planfile.summary(again)))
    for name in ("forecast", "workload", "rates", "fit", "budget", "nodes"):
        assert summary[name] == plan[name], name
