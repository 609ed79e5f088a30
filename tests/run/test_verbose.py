"""`-v` says each decision with its reason before the command starts; without it none is said."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage

Tree = Callable[..., Path]


def told(hpcstage: Hpcstage, *options: str | Path) -> list[str]:
    done = hpcstage("run", *options, "--", sys.executable, "-c", "")
    assert done.returncode == 0, done.stderr
    return [line.removeprefix("hpcstage: ") for line in done.stderr.decode().splitlines()]


def test_one_node(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=6)
    options = ["--data", data, "--mode", "upfront", "--budget", "30kB"]
    lines = told(hpcstage, "-v", *options)
    for line in (
        f"datasets: {data} (option --data)",
        "mode upfront (option --mode): copies everything, then starts the command",
        f"staging below {hpcstage.local_dir} (environment HPCSTAGE_LOCAL_DIR)",
        "order auto (default): the best that is known",
        "one node: no scheduler is seen",
    ):
        assert lines.count(line) == 1, (line, lines)
    (budget,) = [line for line in lines if line.startswith("budget 30 kB")]
    assert "(option --budget): " in budget
    assert "as asked for" in budget
    quiet = told(hpcstage, *options)
    assert not any(line.startswith(("mode ", "budget ", "datasets: ")) for line in quiet), quiet


def test_several_nodes(hpcstage: Hpcstage, make_tree: Tree) -> None:
    pytest.importorskip("mpi4py")
    lines = told(hpcstage, "-v", "--nodes", "2", "--mode", "upfront", "--data", make_tree(files=6))
    assert any(line.endswith(", virtual nodes of this machine") for line in lines), lines
    assert "placement replicate (default): partition where a node has no room for all files" in lines
