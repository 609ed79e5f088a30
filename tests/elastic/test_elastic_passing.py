"""Jobs that join a training fill their stores from its nodes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for
from test_elastic_join import RESTARTED, Jobs, jobs  # noqa: F401 - a fixture

from hpcstage.store.passed import BEGIN_S

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]
FILES = 40
COUNTED = ("source_files", "source_bytes", "peer_files", "peer_bytes")


def totals(run_dir: Path) -> dict[str, Any]:
    parts = [json.loads(path.read_text())["totals"] for path in (run_dir / "nodes").glob("*.json")]
    return {name: sum(part.get(name) or 0 for part in parts) for name in COUNTED}


def test_a_job_that_joins_reads_nothing_from_the_source(
    jobs: Jobs,  # noqa: F811
    tmp_path: Path,
    make_tree: Callable[..., Path],
) -> None:
    """Each of two nodes has a half of the files."""
    data = os.fspath(make_tree(files=FILES))
    first, second = tmp_path / "first", tmp_path / "second"
    words = ("--elastic", "1:3", "--nodes", "2", "--placement", "partition", "--data", data, "--run-dir", str(first))
    jobs.train(RESTARTED, *words, arguments=(data,))
    wait_for(lambda: any(step[2] == "2" for step in jobs.steps()), 120, f"two ranks: {jobs.text()}")
    jobs.join("second", "--run-dir", str(second))
    wait_for(lambda: any(step[2] == "3" for step in jobs.steps()), 120, f"three ranks: {jobs.text()}")
    jobs.stop()
    assert jobs.processes["first"].wait(90) == 0, jobs.text()
    assert jobs.processes["second"].wait(90) == 0, jobs.text()
    assert totals(first)["source_files"] == FILES
    assert tuple(totals(second).values()) == (0, 0, FILES, FILES * 10_000)


def test_what_is_copied_before_the_command_waits_for_no_agent(
    jobs: Jobs,  # noqa: F811
    tmp_path: Path,
    make_tree: Callable[..., Path],
) -> None:
    data, second = os.fspath(make_tree(files=FILES)), tmp_path / "second"
    jobs.train(RESTARTED, "--elastic", "1:2", "--nodes", "1", "--data", data, arguments=(data,))
    jobs.wait("first")
    began_s = time.monotonic()
    jobs.join("second", "--mode", "upfront", "--run-dir", str(second))
    jobs.wait("first", "second")
    assert time.monotonic() - began_s < BEGIN_S
    jobs.stop()
    assert jobs.processes["first"].wait(90) == 0, jobs.text()
    assert jobs.processes["second"].wait(90) == 0, jobs.text()
    assert tuple(totals(second).values()) == (FILES, FILES * 10_000, 0, 0)
