"""Programs without the shim read the datasets: copying beside them is in vain, so it stops until somebody is served."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage
from slowsource import NEEDS

from hpcstage.emulator import Settings, Slowfs

pytestmark = [*NEEDS]
MB = 1_000_000
TOTAL = 160 * MB
BANDWIDTH = 20 * MB
CAT = 'for file in "$0"/*; do cat "$file"; done | wc -c'
WAYS = {
    "cat of large files": (32 * MB, CAT),
    "small files": (MB // 4, CAT),
}
READ = """
import os, sys
root = sys.argv[1]
print(sum(len(open(os.path.join(root, name), "rb").read()) for name in sorted(os.listdir(root))))
"""


@pytest.fixture
def source(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slowfs]:
    """Files of the size that is asked for."""
    size = request.param
    behind = tmp_path / "behind"
    behind.mkdir()
    for number in range(TOTAL // size):
        with (behind / f"{number:04d}").open("wb") as file:
            file.truncate(size)
    with Slowfs(behind, Settings(bandwidth_bytes_per_s=BANDWIDTH)) as slow:
        yield slow


def run(hpcstage: Hpcstage, source: Slowfs, *command: str) -> dict[str, Any]:
    done = hpcstage("run", "--data", source.path, "--", *command, source.path, timeout_s=400)
    assert done.returncode == 0, done.stderr
    assert {int(line) for line in done.stdout.split()} == {TOTAL}
    found: dict[str, Any] = json.loads(hpcstage.records()[-1].read_text())
    return found


def notes(record: dict[str, Any]) -> dict[str, str]:
    return {note["id"]: note["text"] for note in record["notes"]}


@pytest.mark.parametrize(("source", "code"), WAYS.values(), ids=WAYS, indirect=["source"])
def test_copying_stops_where_nobody_is_served(hpcstage: Hpcstage, source: Slowfs, code: str) -> None:
    record = run(hpcstage, source, "sh", "-c", code)
    assert source.counters().read_bytes < 1.35 * TOTAL, "about two seconds of copying at half of the rate"
    said = notes(record)
    assert said["not-reached"].startswith("copying paused for ")
    assert "deferred-to-program" not in said


@pytest.mark.parametrize("source", [MB], indirect=True)
def test_copying_goes_on_for_a_program_that_is_served(hpcstage: Hpcstage, source: Slowfs) -> None:
    script = f'{CAT}; "$1" -c "$2" "$0"'
    words = ("sh", "-c", script, source.path, sys.executable, READ)
    done = hpcstage("run", "--data", source.path, "--", *words, timeout_s=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [b"%d" % TOTAL] * 2
    record = json.loads(hpcstage.records()[-1].read_text())
    assert "not-reached" in notes(record)
    assert sum(record["coverage"]["reasons"].values()) < 0.1 * TOTAL / MB, "nearly all opens were served"
    assert source.counters().read_bytes < 2.25 * TOTAL


@pytest.mark.parametrize("source", [MB], indirect=True)
def test_copying_does_not_stop_while_somebody_is_served(hpcstage: Hpcstage, source: Slowfs) -> None:
    script = f'({CAT}) & "$1" -c "$2" "$0"; wait'
    words = ("sh", "-c", script, source.path, sys.executable, READ)
    done = hpcstage("run", "--data", source.path, "--", *words, timeout_s=400)
    assert done.returncode == 0, done.stderr
    record = json.loads(hpcstage.records()[-1].read_text())
    assert "not-reached" not in notes(record)
    assert record["datasets"][0]["staged_bytes"] == TOTAL
