"""`hpcstage plan --order trace`: the command line against what a run left."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan
from hpcstage.plan.order import trace


def plan(hpcstage: Any, root: Path, *arguments: str, as_json: bool = False) -> Any:
    result = hpcstage("plan", "--data", root, *arguments, *(["--json"] if as_json else []))
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout) if as_json else result.stdout.decode()


def leave_trace(hpcstage: Any, root: Path, ids: list[int]) -> None:
    manifest = scan(resolve([os.fspath(root)], hpcstage.cwd)).manifest
    made = trace.TraceHeader(
        ("python", "my train.py"), (os.fspath(root.resolve()),), manifest.paths_digest(), len(manifest), "run-7",
        "2026-01-01T00:00:00Z",
    )  # fmt: skip
    assert trace.save(hpcstage.cwd / "state/hpcstage/traces", trace.Trace(made, array("I", ids))) is None


@pytest.mark.parametrize("setting", [["--order", "trace"], []])
def test_the_trace_of_the_last_run(hpcstage: Any, make_tree: Callable[..., Path], setting: list[str]) -> None:
    root = make_tree(files=5)
    leave_trace(hpcstage, root, [4, 0, 2])
    text = plan(hpcstage, root, *setting)
    for words in ("order    trace, 3 files, then 2", "left by run run-7: python 'my train.py'"):
        assert words in text
    data = plan(hpcstage, root, *setting, "--limit", "9", as_json=True)
    names = sorted(f"{p.parent.name}/{p.name}" for p in root.glob("*/*"))
    assert [entry["path"][-len(names[0]) :] for entry in data["entries"]] == [names[i] for i in (4, 0, 2, 1, 3)]


def test_a_trace_of_other_files_is_said_and_not_taken(hpcstage: Any, make_tree: Callable[..., Path]) -> None:
    root = make_tree(files=5)
    assert "no earlier run on these datasets left a trace" in plan(hpcstage, root, "--order", "trace")
    leave_trace(hpcstage, root, [1])
    (root / "new").write_text("")
    for setting in (["--order", "trace"], []):
        assert "the dataset's files are not those of run run-7" in plan(hpcstage, root, *setting)
    assert "by path (as asked for)" in plan(hpcstage, root, "--order", "manifest")
    assert "while the command runs" in plan(hpcstage, root, "--order", "sampler")
