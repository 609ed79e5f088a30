"""`hpcstage.load_run` for notebooks, and the tables that pandas gets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import REPO, Hpcstage
from reportcases import CASES

from hpcstage.record.schema import Record

LIGHT = """
import sys
import hpcstage
heavy = {"click", "rich", "psutil", "yaml", "jinja2", "pandas", "json", "pathlib", "hpcstage.record"}
print(sorted(heavy & set(sys.modules)))
"""
LOADED = """
import json, sys
import hpcstage
for name in sys.argv[1:]:
    run = hpcstage.load_run(name)
    print(json.dumps([run.run.id, run.run.exit_code, run.time_split.wall_s, len(run.datasets)]))
try:
    hpcstage.load_run("unknown")
except hpcstage.errors.NoResult as error:
    print(error)
"""


def python(hpcstage: Hpcstage, code: str, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=hpcstage.cwd, env=hpcstage.env, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_by_directory_file_and_id(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    hpcstage("run", "-q", "--data", make_tree(files=2), "--", "false")
    (path,) = hpcstage.records()
    record = json.loads(path.read_bytes())
    *loaded, error = python(hpcstage, LOADED, str(path.parent), str(path), path.parent.name)
    wanted = [record["run"]["id"], 1, record["time_split"]["wall_s"], 1]
    assert [json.loads(line) for line in loaded] == [wanted] * 3
    assert error.startswith("unknown is no run directory")


def test_to_import_hpcstage_is_light() -> None:
    done = subprocess.run(
        [sys.executable, "-S", "-E", "-c", LIGHT], cwd=REPO, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "[]\n"


def readable(name: str) -> str:
    """A name whose bytes that are not UTF-8 are escaped."""
    return name.encode(errors="backslashreplace").decode()


@pytest.mark.parametrize("case", CASES)
def test_frames(case: str) -> None:
    pytest.importorskip("pandas", reason="needs pandas")
    record = Record.from_json(CASES[case]())
    frames = record.to_frames()
    assert set(frames) == {"nodes", "time", "datasets", "series", "periods", "notes"}
    assert list(frames["nodes"]["host"]) == [readable(node.host) for node in record.nodes]
    assert list(frames["nodes"]["state"]) == [node.state.value for node in record.nodes]
    assert len(frames["series"]) == len(record.series.start_s)
    assert list(frames["periods"]["loss"]) == [period.loss for period in record.contention.periods]
    assert list(frames["notes"]["id"]) == [readable(note.id) for note in record.notes]
    (wall_s,) = frames["time"]["wall_s"]
    assert wall_s == pytest.approx(record.time_split.wall_s) or record.time_split.wall_s is None
