"""Each benchmark runs to its end with --quick and leaves a valid result; what it measures is not judged here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, wait_for

from hpcstage.emulator import unavailable
from hpcstage.emulator.mounts import mounts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fuse,
    pytest.mark.compiler,
    pytest.mark.timeout(400),
    pytest.mark.skipif(unavailable() is not None, reason=f"emulator: {unavailable()}"),
]
needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and an MPI")
needs_torch = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]


def quick(name: str, tmp_path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    result = tmp_path / f"{name}.json"
    work = tmp_path.parent / "w"  # short: names of sockets below it have 107 bytes at most
    work.mkdir(exist_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(result), "--work-dir", str(work)]
    done = subprocess.run(
        [*command, *words], cwd=REPO, capture_output=True, text=True, timeout=380, check=False, env=os.environ.copy()
    )
    assert done.returncode == code, done.stderr
    assert not list(work.iterdir()), "what it worked with is removed"
    loaded: dict[str, Any] = json.loads(result.read_text())
    assert loaded["benchmark"] == name
    assert loaded["quick"] is True
    assert loaded["environment"]["cpus"] > 0
    assert loaded["samples"]
    assert loaded["figures"]
    assert all(isinstance(f["ok"], bool) for f in loaded["figures"])
    assert "figures" not in done.stdout
    return loaded


def arms(result: dict[str, Any], cell: str) -> set[str]:
    return {s["arm"] for s in result["samples"] if s["cell"] == cell}


def test_copy(tmp_path: Path) -> None:
    result = quick("copy", tmp_path)
    complete = {f["name"]: f["ok"] for f in result["figures"]}["every copy is complete"]
    assert complete
    assert {"hpcstage", "cp -r", "flat out"} <= arms(result, "400 x 100 kB, 2 ms")
    ours = [s for s in result["samples"] if s["arm"] == "hpcstage"]
    assert ours
    assert all(s["seconds"] > s["engine_s"] for s in ours), "the clock of the others: from the start to the end"


def test_libraries(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    result = quick("libraries", tmp_path, "--only", "h5py", "--check")
    (sample,) = result["samples"]
    assert set(sample["runs"]) == {"alone", "runtime", "alone again"}
    assert sum(ends["passed"] for ends in sample["same"].values()) <= sample["runs"]["runtime"]["passed"]


def test_ways(tmp_path: Path) -> None:
    words = ("--only", "pread-twice, source as fast", "--arms", "plain", "--arms", "runtime")
    result = quick("ways", tmp_path, *words)
    cell = "pread-twice, source as fast"
    assert arms(result, cell) == {"plain", "runtime"}
    same = {f["name"]: f["ok"] for f in result["figures"]}[f"{cell}: same output"]
    assert same
    again = quick("ways", tmp_path, *words)
    assert again["samples"] == result["samples"], "what the file has is not measured again"
    short = quick("ways", tmp_path, *words, "--check", code=1)
    assert not all(figure["ok"] for figure in short["figures"])


@needs_mpi
def test_peer(tmp_path: Path) -> None:
    result = quick("peer", tmp_path, "--only", "128 kB, memory", "--only", "128 kB, disk, shared", "--only", "at rest")
    met = {f["name"]: f["ok"] for f in result["figures"]}
    assert met["every file came"]
    expected = {"peer copies", "ping-pong", "ping-pong, one buffer", "files, no exchange"}
    assert arms(result, "128 kB, memory, tcp") == expected
    assert {"128 kB, memory, tcp: of a bare ping-pong", "128 kB, disk, shared memory: of the plainest program"} <= set(
        met
    )
    assert [s["exchanges"] for s in result["samples"] if s["cell"] == "at rest"] == [2]


class TestTraining:
    """Those that train."""

    pytestmark = needs_torch

    def test_staging(self, tmp_path: Path) -> None:
        cell = "cnn x1 E1 high"
        wanted = ("--only", cell, "--arms", "direct", "--arms", "upfront", "--arms", "runtime", "--arms", "compute")
        staged = quick("staging", tmp_path, *wanted)
        assert arms(staged, cell) == {"direct", "upfront", "runtime", "compute"}
        same = [f["ok"] for f in staged["figures"] if f["name"].startswith("same losses")]
        assert same == [True]

    def test_staging_with_another_ratio(self, tmp_path: Path) -> None:
        cell = "cnn x1 E1 high"
        words = ("--ratio", "0.3", "--only", cell, "--arms", "source", "--arms", "compute")
        staged = quick("staging", tmp_path, *words)
        assert staged["parameters"]["source_to_compute"] == 0.3
        took = {s["arm"]: s["seconds"] for s in staged["samples"] if s["cell"] == cell}
        assert took["source"] < 0.8 * took["compute"]

    def test_identity(self, tmp_path: Path) -> None:
        result = quick("identity", tmp_path, "--only", "workers 2 fork", "--check")
        assert all(f["ok"] for f in result["figures"])

    def test_truth(self, tmp_path: Path) -> None:
        result = quick("truth", tmp_path, "--only", "no load")
        by_name = {f["name"]: f for f in result["figures"]}
        assert by_name["no load: no contention reported"]["measured"] is not None

    @needs_mpi
    def test_nodes(self, tmp_path: Path) -> None:
        wanted = ("direct", "replicate", "partition")
        chosen = [word for arm in wanted for word in ("--arms", arm)]
        result = quick("nodes", tmp_path, "--only", "N2 E2", *chosen, "--check")
        assert arms(result, "N2 E2") == set(wanted)

    @needs_mpi
    def test_guard_with_faults(self, tmp_path: Path) -> None:
        folder = tmp_path / "guard"
        guard = quick("guard", tmp_path, "--only", "faults", "--folder", str(folder), "--check")
        assert [(figure["name"], figure["ok"]) for figure in guard["figures"]] == [("faults", True)]
        samples = json.loads((folder / "faults.json").read_text())["samples"]
        assert {sample["victim"] for sample in samples if sample["cell"] == "tries"} >= {"daemon", "node"}

    def test_warm(self, tmp_path: Path) -> None:
        result = quick("warm", tmp_path, "--only", "opens")
        assert arms(result, "opens") == {"without hpcstage", "native"}

    def test_check_fails_where_nothing_was_measured(self, tmp_path: Path) -> None:
        quick("warm", tmp_path, "--only", "opens", "--arms", "native", "--check", code=1)


def test_outputs(tmp_path: Path) -> None:
    result = quick("outputs", tmp_path, "--check")
    victims = {sample["victim"] for sample in result["samples"] if sample["cell"] == "kills"}
    assert victims == {"daemon", "wrapper", "both", "all"}


def test_arriving(tmp_path: Path) -> None:
    result = quick("arriving", tmp_path, "--check")
    assert {sample["victim"] for sample in result["samples"]} == {"daemon", "copiers", "both"}
    assert any(sample["write_s"] is not None for sample in result["samples"])
    assert all(sample["bytes"] > sample["served_bytes"] > 0 for sample in result["samples"])


def test_served(tmp_path: Path) -> None:
    result = quick("served", tmp_path)
    assert arms(result, "in order") == {"plain", "runtime"}
    assert len({sample["output"] for sample in result["samples"] if sample["cell"] == "in order"}) == 1
    assert all(sample["served_share"] >= 1 for sample in result["samples"] if sample["cell"] == "cost")


def test_a_terminated_benchmark_leaves_nothing(tmp_path: Path) -> None:
    memory, work = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    work.mkdir()
    words = ["-m", "benchmarks.copy", "--quick", "--work-dir", str(work), "--memory-dir", str(memory), "--only", "2 ms"]
    with subprocess.Popen([sys.executable, *words], cwd=REPO, stderr=subprocess.DEVNULL) as benchmark:
        wait_for(lambda: any(os.fsdecode(m.path).startswith(str(memory)) for m in mounts()), 60, "a mount")
        benchmark.terminate()
        assert benchmark.wait(30) == 143
    assert not list(memory.iterdir())
    assert not list(work.iterdir())


@needs_mpi
def test_onefile(tmp_path: Path) -> None:
    result = quick("onefile", tmp_path, "--only", "in order")
    assert arms(result, "in order") == {"plain", "runtime"}
    (plain,) = [sample for sample in result["samples"] if sample["arm"] == "plain"]
    assert plain["source_files"] == pytest.approx(2, abs=0.1), "each node reads it anew"
    assert {figure["name"]: figure["ok"] for figure in result["figures"]}["in order: same output"]
