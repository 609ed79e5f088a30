"""The budget of a run: its record gives the numbers and the reason that `hpcstage plan` gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage

Tree = Callable[..., Path]


def budgets(hpcstage: Hpcstage, *arguments: str | Path) -> list[int]:
    """Each node's budget in bytes, by the record of a run."""
    done = hpcstage("run", "--mode", "upfront", *arguments, "--", "true")
    assert done.returncode == 0, done.stderr
    record = json.loads(hpcstage.records()[-1].read_text())
    return [node["budget_bytes"] for node in record["nodes"]]


def planned(hpcstage: Hpcstage, *arguments: str | Path) -> dict[str, Any]:
    done = hpcstage("plan", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["budget"]


def test_nodes_of_one_machine_divide_what_is_free(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=5)
    (whole,) = budgets(hpcstage, "--data", data)
    parts = budgets(hpcstage, "--nodes", "2", "--data", data)
    assert len(parts) == 2
    assert parts == [pytest.approx(whole / 2, rel=0.1)] * 2


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--local-dir", "ram"),
        ("--budget", "auto,1000"),
        ("--budget", "40%,30%"),
    ],
)
def test_plan_and_record_say_the_same(hpcstage: Hpcstage, make_tree: Tree, options: tuple[str, ...]) -> None:
    data = make_tree(files=5)
    before = planned(hpcstage, *options, "--data", data)
    (used,) = budgets(hpcstage, *options, "--data", data)
    assert used == pytest.approx(before["size_bytes"], rel=0.1)
    assert "memory" in before["why"] or "ram" not in options or "--budget" in options
    assert ("as asked for" in before["why"]) == ("--budget" in options)


def test_a_budget_in_bytes_that_was_asked_for_can_be_raised(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=20)
    done = hpcstage("run", "--mode", "upfront", "--budget", "100kB", "--data", data, "--", "true")
    assert done.returncode == 0, done.stderr
    notes = json.loads(hpcstage.records()[-1].read_text())["notes"]
    (note,) = [note for note in notes if note["id"] == "store-full"]
    assert "raise --budget" in note["remedy"]
