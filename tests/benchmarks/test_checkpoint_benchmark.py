"""`benchmarks.checkpoint` runs to its end with --quick and leaves a valid result; its figures are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

pytest.importorskip("torch")
pytest.importorskip("xxhash")
pytest.importorskip("mpi4py")

from benchmarks.checkpointed import simulation

pytestmark = [pytest.mark.slow, pytest.mark.torch, pytest.mark.timeout(300)]


def test_checkpoint(tmp_path: Path, local_dir: Path) -> None:
    result, work = tmp_path / "checkpoint.json", local_dir / "work"  # no disk that others write to
    work.mkdir()
    cells = ["frozen body, Adam head, tensors", "work of a node", "simulated", "exchanged, 3 nodes, 2+1"]
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--quick", "--json", str(result), "--work-dir", str(work)]
    command += [word for cell in cells for word in ("--only", cell)]
    done = subprocess.run(
        command, cwd=REPO, capture_output=True, text=True, timeout=280, check=False, env=os.environ.copy()
    )
    assert done.returncode == 0, done.stderr
    assert not list(work.iterdir()), "what it worked with is removed"
    loaded = json.loads(result.read_text())
    assert loaded["benchmark"] == "checkpoint"
    found = {s["cell"] for s in loaded["samples"]}
    assert {cell for cell in cells if cell != "simulated"} | {"simulated, tcp"} <= found
    assert all(s.get("same", True) for s in loaded["samples"])
    figures = {figure["name"]: figure for figure in loaded["figures"]}
    assert figures["every state came back bit for bit"]["ok"]
    counted = [figure for name, figure in figures.items() if "counted bytes" in name]
    assert [figure["ok"] for figure in counted] == [True] * 4
    encoded = {s["arm"] for s in loaded["samples"] if s["cell"] == cells[0] and s["parity_bytes"]}
    assert encoded == {"full", "incremental"}
    exchanged = [s for s in loaded["samples"] if s["cell"] == cells[-1]]
    assert min(s["sent_bytes"] for s in exchanged) > 0


def test_a_simulated_pipeline_takes_what_its_slowest_part_takes_and_the_way_through_it() -> None:
    """In closed form: with one slow lane, all blocks one after the other and one message more for each node behind."""
    layout = simulation.Layout(8, rotated=False, node_bytes=16 << 20)
    fast = simulation.Terms(1e15, 1e15, 1e15, 1e15, 1e9, 0.0)
    message_s = 2 * 65536 / 1e9
    took_s = simulation.simulated(layout, fast)["seconds"]
    assert took_s == pytest.approx((layout.blocks + 7) * message_s, rel=0.01)
    slow_coder = simulation.Terms(1e8, 1e15, 1e15, 1e15, 1e15, 0.0)
    took_s = simulation.simulated(layout, slow_coder)["seconds"]
    assert took_s == pytest.approx((layout.blocks + 7) * 2 * 65536 / 1e8, rel=0.01)
