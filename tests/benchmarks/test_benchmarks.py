"""Each benchmark runs to its end with --quick and leaves a valid result; what it measures is not judged here."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO, wait_for

from benchmarks import coder
from hpcstage.emulator import unavailable
from hpcstage.emulator.mounts import mounts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fuse,
    pytest.mark.compiler,
    pytest.mark.skipif(unavailable() is not None, reason=f"emulator: {unavailable()}"),
]
needs_mpi = pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and an MPI")
needs_torch = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch"),
]


def quick(name: str, tmp_path: Path, *words: str, code: int = 0, work: Path | None = None) -> dict[str, Any]:
    result = tmp_path / f"{name}.json"
    work = work or tmp_path.parent / "w"  # short: names of sockets below it have 107 bytes at most
    work.mkdir(exist_ok=True)
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(result), "--work-dir", str(work)]
    done = subprocess.run(
        [*command, *words], cwd=REPO, capture_output=True, text=True, timeout=380, check=False, env=os.environ.copy()
    )
    assert done.returncode == code, done.stderr
    assert not list(work.iterdir()), "what it worked with is removed"
    loaded: dict[str, Any] = json.loads(result.read_text())
    assert (loaded["benchmark"], loaded["quick"]) == (name, True)
    assert loaded["environment"]["cpus"] > 0
    assert loaded["samples"]
    assert loaded["figures"]
    assert all(isinstance(f["ok"], bool) for f in loaded["figures"])
    assert "figures" not in done.stdout
    return loaded


def only(*cells: str, arms: tuple[str, ...] = ()) -> list[str]:
    """The options that choose cells and arms."""
    return [word for cell in cells for word in ("--only", cell)] + [word for arm in arms for word in ("--arms", arm)]


def arms(result: dict[str, Any], cell: str) -> set[str]:
    return {s["arm"] for s in result["samples"] if s["cell"] == cell}


def ok(result: dict[str, Any]) -> dict[str, bool]:
    return {figure["name"]: figure["ok"] for figure in result["figures"]}


def test_copy(tmp_path: Path) -> None:
    result = quick("copy", tmp_path)
    assert ok(result)["every copy is complete"]
    assert {"hpcstage", "cp -r", "flat out"} <= arms(result, "400 x 100 kB, 2 ms")
    ours = [s for s in result["samples"] if s["arm"] == "hpcstage"]
    assert ours
    assert all(s["seconds"] > s["engine_s"] for s in ours), "the clock of the others: from the start to the end"


def test_libraries(tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    result = quick("libraries", tmp_path, *only("h5py"), "--check")
    (sample,) = result["samples"]
    assert set(sample["runs"]) == {"alone", "runtime", "alone again"}
    assert sum(ends["passed"] for ends in sample["same"].values()) <= sample["runs"]["runtime"]["passed"]


def test_ways(tmp_path: Path) -> None:
    cell = "pread-twice, source as fast"
    words = only(cell, arms=("plain", "runtime"))
    result = quick("ways", tmp_path, *words)
    assert arms(result, cell) == {"plain", "runtime"}
    assert ok(result)[f"{cell}: same output"]
    short = quick("ways", tmp_path, *words, "--check", code=1)
    assert short["samples"] == result["samples"], "what the file has is not measured again"
    assert not all(ok(short).values())


@needs_mpi
def test_peer(tmp_path: Path) -> None:
    result = quick("peer", tmp_path, *only("128 kB, memory", "128 kB, disk, shared", "at rest"))
    assert ok(result)["every file came"]
    expected = {"peer copies", "ping-pong", "ping-pong, one buffer", "files, no exchange"}
    assert arms(result, "128 kB, memory, tcp") == expected
    assert [s["exchanges"] for s in result["samples"] if s["cell"] == "at rest"] == [2]


class TestTraining:
    """Those that train."""

    pytestmark = needs_torch

    def test_truth(self, tmp_path: Path) -> None:
        result = quick("truth", tmp_path, *only("no load"))
        by_name = {f["name"]: f for f in result["figures"]}
        assert by_name["no load: no contention reported"]["measured"] is not None

    def test_checkpointer(self, tmp_path: Path, local_dir: Path) -> None:
        pytest.importorskip("xxhash")
        result = quick("checkpointer", tmp_path, "--memory-dir", str(local_dir), work=local_dir / "work")
        cells = {s["cell"] for s in result["samples"]}
        assert cells == {"save, 70 tensors", "save, 4000 tensors", "training", "ways"}
        assert len(arms(result, "ways")) == 7
        assert ok(result)["every state came back bit for bit"]

    def test_elastic(self, tmp_path: Path) -> None:
        (sample,) = quick("elastic", tmp_path, "--arms", "hpcstage")["samples"]
        assert (sample["cell"], sample["arm"]) == ("host killed", "hpcstage")
        assert 0 < sample["agreed_s"] < sample["seconds"] < 60

    def test_threads(self, tmp_path: Path) -> None:
        cells, wanted = ("io, 2 workers", "decode, 0 workers"), ("PyTorch", "1 threads", "4 threads")
        result = quick("threads", tmp_path, *only(*cells, arms=wanted))
        assert {(s["cell"], s["arm"]) for s in result["samples"]} == {(c, arm) for c in cells for arm in wanted}
        assert ok(result)["the same batches in all arms"]

    def test_bundle(self, tmp_path: Path) -> None:
        result = quick("bundle", tmp_path)
        cells = {sample["cell"] for sample in result["samples"]}
        assert {"figure 4, Food-101", "figure 4, ImageNet-100", "figure 5, seed 1"} <= cells
        simulated = [is_ok for name, is_ok in ok(result).items() if name.startswith(("Food-101", "ImageNet-100"))]
        assert simulated == [True] * 6, "a simulation does not depend on the machine"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.skipif(coder.loaded_isal() is None, reason="needs ISA-L (package libisal2)")
def test_coder(tmp_path: Path) -> None:
    result = quick("coder", tmp_path, "--reps", "1")
    for cell in ("256 KB, encode", "1 MB, encode"):
        assert arms(result, cell) == {coder.C, coder.OURS, coder.REDSET}
    assert ok(result)["the same bytes in all arms"]


def test_scale(tmp_path: Path) -> None:
    result = quick("scale", tmp_path, *only("partition, 8 nodes"), "--check", code=1)
    assert {"partition, 8 nodes", "partition, 8 nodes, slow links"} <= {sample["cell"] for sample in result["samples"]}


def test_guard_with_what_arrives(tmp_path: Path) -> None:
    folder = tmp_path / "guard"
    guard = quick("guard", tmp_path, *only("arriving"), "--folder", str(folder), "--check")
    assert ok(guard) == {"arriving": True}
    samples = json.loads((folder / "arriving.json").read_text())["samples"]
    assert {sample["victim"] for sample in samples} == {"daemon", "copiers", "both"}
    assert all(sample["bytes"] > sample["served_bytes"] > 0 for sample in samples)


def test_a_terminated_benchmark_leaves_nothing(tmp_path: Path) -> None:
    memory, work = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    work.mkdir()
    words = ["-m", "benchmarks.copy", "--quick", "--work-dir", str(work), "--memory-dir", str(memory), "--only", "2 ms"]
    with subprocess.Popen([sys.executable, *words], cwd=REPO, stderr=subprocess.DEVNULL) as benchmark:
        wait_for(lambda: any(os.fsdecode(m.path).startswith(str(memory)) for m in mounts()), 120, "a mount")
        benchmark.terminate()
        assert benchmark.wait(300) == 143
    assert not list(memory.iterdir())
    assert not list(work.iterdir())
