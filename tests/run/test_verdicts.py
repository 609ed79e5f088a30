"""What the verdict says of real programs on a slow source, compared with what happened."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage, python_command
from slowsource import NEEDS

from hpcstage.emulator import Settings, Slowfs
from hpcstage.units import format_duration

pytestmark = NEEDS
MB = 1_000_000
FILE_BYTES = MB // 5
SLOW = Settings(20 * MB, metadata_latency_s=0.002, data_latency_s=0.002)
FAST = Settings(2000 * MB)
PASSES = """
import json, os, sys, time
root, passes, compute_s, read_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), 0.0
for _ in range(passes):
    for name in sorted(os.listdir(root)):
        begin = time.monotonic()
        with open(os.path.join(root, name), "rb") as file:
            file.read()
        read_s += time.monotonic() - begin
        time.sleep(compute_s)
print(json.dumps({"read_s": read_s}))
"""
NUMPY = """
import os, sys, time
import numpy
for _ in range(3):
    for name in sorted(os.listdir(sys.argv[1])):
        numpy.fromfile(os.path.join(sys.argv[1], name), dtype="u1").sum()
        time.sleep(0.05)
"""
LOADER = """
import os, sys, time
import torch
class Files(torch.utils.data.Dataset):
    def __init__(self, root):
        self.samples = [(os.path.join(root, name), 0) for name in sorted(os.listdir(root))]
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        with open(self.samples[index][0], "rb") as file:
            return len(file.read())
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Files(sys.argv[1]), batch_size=2, shuffle=True, num_workers=2)
    for epoch in range(3):
        for batch in loader:
            time.sleep(0.15)
"""
READS = "import os, sys; [open(os.path.join(sys.argv[1], name)).close() for name in os.listdir(sys.argv[1])]"
WRITES = """
import os, sys
for name in sorted(os.listdir(sys.argv[1])):
    with open(os.path.join(sys.argv[1], name), "rb") as file:
        size = len(file.read())
    with open(os.path.join(os.environ["HPCSTAGE_OUT"], name), "w") as out:
        out.write(str(size))
"""


@dataclass
class Place:
    """A slow source of twenty files of 200 kB, and the runs on it."""

    hpcstage: Hpcstage
    slow: Slowfs
    stderr: list[str] = field(default_factory=list)
    """The last lines: from the verdict on."""
    stdout: str = ""
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def waited_s(self) -> float:
        split = self.record["time_split"]
        return float(split["wait_source_s"] + split["wait_local_s"])

    def run(self, *command: object, mode: str = "runtime", options: tuple[object, ...] = ()) -> dict[str, Any]:
        """Returns the verdict, which the end of the run and the report say, too."""
        words = [*map(str, options), "--", *map(str, command)]
        done = self.hpcstage("run", "--mode", mode, "--data", self.slow.path, *words)
        assert done.returncode == 0, done.stderr
        self.record = json.loads(self.hpcstage.records()[-1].read_text())
        found: dict[str, Any] = self.record["verdict"]
        lines = done.stderr.decode().splitlines()
        self.stdout, self.stderr = done.stdout.decode(), lines[lines.index(f"hpcstage: {found['text']}") :]
        assert len(self.stderr) <= 4
        assert self.stderr[-1].startswith("hpcstage: report: hpcstage report ")
        said = " ".join(self.hpcstage("report").stdout.decode().split())
        assert said.lower().startswith(f"verdict {found['text']}".lower()[:200])
        return found


@pytest.fixture
def place(hpcstage: Hpcstage, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    behind = tmp_path / "behind"
    behind.mkdir()
    for index in range(20):
        (behind / f"f{index:02d}").write_bytes(os.urandom(FILE_BYTES))
    with Slowfs(behind, request.param) as mounted:
        yield Place(hpcstage, mounted)


def passes(root: Path, number: int, compute_s: float = 0.0) -> list[Any]:
    return [*python_command(PASSES, root, str(number), str(compute_s))]


slow = pytest.mark.parametrize("place", [SLOW], indirect=True)
fast = pytest.mark.parametrize("place", [FAST], indirect=True)


@slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_program_that_waits_is_told_what_copies_can_save_at_most(place: Place, number: int) -> None:
    found = place.run(*passes(place.slow.path, number), mode="direct")
    assert found["kind"] == "source-limits"
    own = json.loads(place.stdout)
    assert f"copies can save at most {format_duration(place.waited_s)}" in found["text"]
    assert place.waited_s == pytest.approx(own["read_s"], abs=0.25 * own["read_s"] + 0.1)
    assert "try --mode runtime" in found["text"]


@fast
def test_a_source_that_keeps_up(place: Place) -> None:
    found = place.run(*passes(place.slow.path, 1, 0.15), mode="direct")
    assert found["kind"] == "source-keeps-up", found
    assert place.waited_s <= json.loads(place.stdout)["read_s"] + 0.1
    assert found["text"].endswith("leave hpcstage out, or use it when the file system is busy")


@slow
def test_copies_that_were_there_before_and_two_times_side_by_side(place: Place) -> None:
    command = [*python_command(NUMPY, place.slow.path)]
    place.run(*command, mode="direct")
    read = place.slow.counters().read_bytes
    found = place.run(*command, mode="upfront")
    assert place.slow.counters().read_bytes - read <= 20 * FILE_BYTES, "the program itself read nothing there"
    assert found["kind"] == "copies-served", found
    assert found["text"].startswith("100 % of the bytes that Python read came from the local copy, and the program ")
    assert "earlier: mode direct" in place.stderr[-2]
    assert "run it once with --mode direct" not in found["text"], "it was"


@slow
def test_files_that_do_not_fit(place: Place) -> None:
    found = place.run(*passes(place.slow.path, 2), options=("--budget", "1MB"))
    assert found["kind"] == "does-not-fit"
    assert "the local disk has room for 1 MB of 4 MB" in found["text"]


@slow
def test_a_program_that_reads_all_at_once_is_not_promised_anything(place: Place) -> None:
    found = place.run(*passes(place.slow.path, 1))
    assert found["kind"] in ("source-limits", "copies-late"), found
    assert place.waited_s == pytest.approx(json.loads(place.stdout)["read_s"], rel=0.3)


@slow
@pytest.mark.torch
def test_a_loader_whose_files_were_copied_ahead(place: Place) -> None:
    pytest.importorskip("torch")
    found = place.run(*python_command(LOADER, place.slow.path))
    record = place.record
    assert (found["kind"] == "copies-served") == (place.waited_s <= 0.05 * record["time_split"]["wall_s"]), found
    if found["kind"] == "copies-served":
        assert record["totals"]["local_bytes"] / (60 * FILE_BYTES) > 0.5


@slow
def test_a_program_that_hpcstage_cannot_serve(place: Place) -> None:
    found = place.run("tar", "cf", place.hpcstage.cwd / "all.tar", place.slow.path)
    assert found["kind"] == "not-attached"
    assert found["text"].startswith("hpcstage cannot serve tar, ")
    isolated = place.run(sys.executable, "-I", "-c", f"import time; {READS}; time.sleep(3)", place.slow.path)
    assert isolated["kind"] == "not-attached"
    assert "PYTHONPATH" in isolated["text"]


@slow
def test_a_program_that_opens_nothing(place: Place) -> None:
    found = place.run(*python_command("pass"))
    assert found["kind"] == "nothing-opened"
    assert str(place.slow.path) in found["text"]


@slow
def test_what_it_wrote_stands_beside_the_verdict(place: Place) -> None:
    place.run(*python_command(WRITES, place.slow.path), options=("--out", "results"))
    assert len(os.listdir(place.hpcstage.cwd / "results")) == 20
    assert any(line.startswith("hpcstage: outputs: ") for line in place.stderr[1:-1])
