"""A job that saves steps as checkpoints and writes a log as output, and what the next job of its script must do."""

from __future__ import annotations

import os

from clusterproject import Project
from nodeslab import LOCAL, until

SCRIPT = """#!/bin/bash
. .venv/bin/activate
exec hpcstage run --checkpoint ckpt --out results -- python steps.py {checkpoint} {out}
"""
SOME = 3


def drained(project: Project) -> list[int]:
    """The steps in DIR."""
    there = project.outside / "ckpt"
    names = [name for name in os.listdir(there) if not name.startswith(".")] if there.exists() else []
    assert all(name.removeprefix("step").isdigit() for name in names), names
    return sorted(int(name.removeprefix("step")) for name in names)


def logged(project: Project) -> list[int]:
    """The steps in the log in DIR; a line that is not whole fails."""
    log = project.outside / "results" / "log"
    return [int(line) for line in log.read_text().splitlines()] if log.exists() else []


def wait_for_some(project: Project) -> None:
    """Both directories on the shared file system hold steps."""
    until(lambda: min(len(drained(project)), len(logged(project))) >= SOME, 120, f"{SOME} steps in DIR")


def check(project: Project, before: list[int]) -> None:
    """The second process went on behind the last step that the first one had drained, from its local disk, and its log
    goes on behind what the first one had logged, with a file for each step that was logged."""
    first, second = project.said("steps-*.said")
    assert (first["first"], second["first"]) == (0, before[-1] + 1), project.log()
    assert second["whole"]
    assert all(place.startswith(f"{LOCAL}/") for place in (second["at"], second["out"]))
    last = drained(project)[-1]
    assert drained(project) == list(range(last + 1))
    assert "verified" in project.record(f"hpcstage-runs/{project.run_dirs()[-1].name}")["checkpoints"]["restored"]
    lines = logged(project)
    count = len(lines) - (last + 1 - second["first"])
    assert lines == [*range(count), *range(second["first"], last + 1)], project.log()
    assert count >= SOME
    results = project.outside / "results"
    metrics = {int(name): (results / "metrics" / name).read_text() for name in os.listdir(results / "metrics")}
    assert all(text == f"metrics of {step}" for step, text in metrics.items())
    assert set(range(second["first"], last + 1)) <= metrics.keys()
    assert sorted(os.listdir(results)) == ["log", "metrics"], "no lock and no temporary file"
