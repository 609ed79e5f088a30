"""Every mode gives the command the same bytes, and the record says what happened."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Hpcstage

from hpcstage.job import disks, share

Tree = Callable[..., Path]

DIGEST = """
import hashlib, os, sys
total = hashlib.sha256()
names = sorted(os.path.join(d, f) for d, _, files in os.walk(sys.argv[1]) for f in files)
for _ in range(int(sys.argv[2])):
    for name in names:
        with open(name, "rb") as file:
            assert file.name == name
            total.update(file.read())
print(total.hexdigest())
"""


def digest(root: Path, epochs: int = 1) -> str:
    total = hashlib.sha256()
    names = sorted(os.path.join(d, f) for d, _, files in os.walk(root) for f in files)
    for _ in range(epochs):
        for name in names:
            total.update(Path(name).read_bytes())
    return total.hexdigest()


def last_record(hpcstage: Hpcstage) -> dict[str, Any]:
    return json.loads(hpcstage.records()[-1].read_text())


@pytest.mark.parametrize("intercept", ["native", "python", "off"])
def test_the_same_bytes_in_every_layer(hpcstage: Hpcstage, make_tree: Tree, intercept: str) -> None:
    data = make_tree(files=60)
    done = hpcstage("run", "--intercept", intercept, "--data", data, "--", sys.executable, "-c", DIGEST, data, "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == digest(data, 2)
    record = last_record(hpcstage)
    assert record["complete"] is True, record["notes"]
    assert record["run"]["exit_code"] == 0


def test_upfront_serves_everything_locally(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=60, size_bytes=5000)
    done = hpcstage("run", "--mode", "upfront", "--data", data, "--", sys.executable, "-c", DIGEST, data, "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == digest(data)
    record = last_record(hpcstage)
    assert record["totals"]["source_bytes"] == 60 * 5000
    assert record["coverage"]["opens"] == 60
    assert record["coverage"]["swapped"] == 60
    assert sum(record["coverage"]["layers"].values()) == 1


def test_direct_copies_nothing_and_measures(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=60, size_bytes=5000)
    done = hpcstage("run", "--mode", "direct", "--data", data, "--", sys.executable, "-c", DIGEST, data, "1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == digest(data)
    record = last_record(hpcstage)
    assert record["coverage"]["opens"] == 60
    assert record["coverage"]["swapped"] == 0
    assert record["totals"]["source_bytes"] == 60 * 5000


def test_a_list_gives_the_order(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    data = make_tree(files=30)
    names = sorted(data.rglob("*.bin"), reverse=True)
    listing = tmp_path / "list.txt"
    listing.write_text("\n".join(map(str, names)) + "\n")
    code = "import sys; print(sum(len(open(l.strip(), 'rb').read()) for l in open(sys.argv[1])))"
    done = hpcstage("run", "--mode", "upfront", "--data", f"@{listing}", "--", sys.executable, "-c", code, listing)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 30 * 10_000
    assert last_record(hpcstage)["order"]["provenance"] == "given"


def test_the_program_may_announce_its_order(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=30)
    code = (
        "import sys, hpcstage, pathlib; names = sorted(pathlib.Path(sys.argv[1]).rglob('*.bin'), reverse=True);"
        "print(hpcstage.order(names)); [n.read_bytes() for n in names]"
    )
    done = hpcstage("run", "--mode", "upfront", "--data", data, "--", sys.executable, "-c", code, data)
    assert done.stdout.decode().strip() == "True", done.stderr
    assert last_record(hpcstage)["order"]["provenance"] == "given"


def test_announcing_outside_of_a_run_does_nothing(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=3)
    code = "import sys, hpcstage, pathlib; print(hpcstage.order(pathlib.Path(sys.argv[1]).rglob('*.bin')))"
    done = hpcstage("run", "--data", data, "--", sys.executable, "-c", code, data, env={"HPCSTAGE_DISABLE": "1"})
    assert done.stdout.decode().strip() == "False"


def test_two_runs_side_by_side_do_not_see_each_other(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=40)
    arguments = ["run", "--data", data, "--", sys.executable, "-c", DIGEST, data, "3"]
    both = [hpcstage.start(*arguments) for _ in range(2)]
    outputs = {process.communicate(timeout=300)[0].decode().strip() for process in both}
    assert outputs == {digest(data, 3)}
    assert [process.returncode for process in both] == [0, 0]
    records = [json.loads(path.read_text()) for path in hpcstage.records()]
    assert len({record["run"]["id"] for record in records}) == 2
    assert all(record["coverage"]["opens"] == 120 for record in records)


def test_the_run_leaves_only_its_results(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    data = make_tree(files=10)
    before = sorted(data.rglob("*"))
    hpcstage("run", "--data", data, "--", sys.executable, "-c", DIGEST, data, "1")
    assert sorted(data.rglob("*")) == before
    assert not list(local_dir.glob("hpcstage-*/*/store"))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one processor cannot be shared")
def test_a_job_with_some_of_the_processors_takes_its_part_of_the_disk(hpcstage: Hpcstage, tmp_path: Path) -> None:
    if disks.is_memory(disks.Machine().kind(os.fspath(tmp_path))):
        pytest.skip("needs a disk that is not memory")
    data, disk = hpcstage.local_dir / "data", tmp_path / "disk"
    data.mkdir()
    disk.mkdir(mode=0o700)
    (data / "file").write_bytes(b"x")
    slurm = {"JOB_ID": "4711", "CPUS_ON_NODE": "1", "JOB_NODELIST": "node1"}
    job = {"SLURMD_NODENAME": "node1", **{f"SLURM_{name}": value for name, value in slurm.items()}}
    options = ("--mode", "upfront", "--local-dir", disk, "--data", data)
    done = hpcstage("run", *options, "--", sys.executable, "-c", "pass", env=job)
    assert done.returncode == 0, done.stderr
    said = hpcstage("plan", "--json", "--local-dir", disk, "--data", data, env=job)
    why = json.loads(said.stdout)["budget"]["why"]
    mine = share.of_node(1, share.processors())
    assert (why == f"80% of what is free for {mine.why}") if mine else ("processors" not in why)
