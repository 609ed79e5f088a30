"""`--out DIR` on several nodes: each drains its own files, nothing is lost, and what is not in DIR is said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import manylab
import psutil
import pytest
from conftest import Hpcstage, below, python_command, wait_for
from fakecluster import FakeCluster

from hpcstage.node import kept
from hpcstage.upload.facts import Place
from hpcstage.upload.start import start

pytest_plugins = ("fakeclusterfixtures",)
NOT_DRAINED = 74
VIRTUAL = """
import os, sys, time
out, results = sys.argv[1:]
places = [out.replace(".v0/", f".v{index}/") for index in range(2)]
def write(index, name):
    with open(f"{places[index]}/{name}", "w") as file:
        file.write(f"node {index}")
def await_drained(name):
    end = time.monotonic() + 30
    while not os.path.exists(f"{results}/{name}") and time.monotonic() < end:
        time.sleep(0.01)
for index in range(2):
    os.mkdir(f"{places[index]}/epoch")
    write(index, f"epoch/rank{index}")
for first, name in enumerate(("early", "late")):
    write(first, name)
    await_drained(name)
    write(1 - first, name)
"""
"""A program on two virtual nodes, whose directories have the same path but for the number of the node."""
KEPT = """
import os, sys, time
out, flag = sys.argv[1:]
with open(out.replace(".v0/", ".v1/") + "/kept", "w") as file:
    file.write("node 1")
open(flag + ".up", "w").close()
end = time.monotonic() + 60
while not os.path.exists(flag) and time.monotonic() < end:
    time.sleep(0.01)
with open(out.replace(".v0/", ".v1/") + "/afterwards", "w") as file:
    file.write("node 1")
"""
RANK = """
import os, sys
out = sys.argv[1]
rank = os.environ["RANK"]
assert out == os.environ["HPCSTAGE_OUT"]
assert open(f"{out}/old").read() == "old"
for name in (f"rank{rank}", "same"):
    with open(f"{out}/{name}", "w") as file:
        file.write(f"{rank} on {os.uname().nodename}")
"""


def left_on(local_dir: Path) -> list[Path]:
    return sorted(local_dir.glob("hpcstage-out-*/*"))


def contents(results: Path) -> dict[str, str]:
    return {os.fspath(path.relative_to(results)): path.read_text() for path in results.rglob("*") if path.is_file()}


def test_each_node_uploads_what_it_wrote_and_the_first_gets_the_name(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path
) -> None:
    results = tmp_path / "results"
    done = hpcstage("run", "--nodes", "2", "--out", results, "--", *python_command(VIRTUAL, "{out}", str(results)))
    assert done.returncode == 0, done.stderr
    host = os.uname().nodename
    assert contents(results) == {
        "epoch/rank0": "node 0", "epoch/rank1": "node 1", "early": "node 0", f"early.{host}.v1": "node 1",
        "late": "node 1", f"late.{host}.v0": "node 0",
    }  # fmt: skip
    assert left_on(local_dir) == []
    part = manylab.record_of(hpcstage)["drains"]["out"]
    assert part["undrained"] == {}
    beside = {(one["name"], one["why"], one["host"]) for one in part["names"] if one["fate"] == "beside"}
    assert beside == {("early", f"early.{host}.v1", f"{host}.v1"), ("late", f"late.{host}.v0", f"{host}.v0")}
    assert "several nodes wrote late" in hpcstage("report").stdout.decode().replace("\n", " ")


@pytest.mark.parametrize("killed", ["hpcstage.lead", "all"])
def test_nothing_is_lost_with_the_lead_or_with_everything(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path, killed: str
) -> None:
    results, flag = tmp_path / "results", tmp_path / "flag"
    process = hpcstage.start("run", "--nodes", "2", "--out", results, "--", *python_command(KEPT, "{out}", str(flag)))
    wait_for((tmp_path / "flag.up").exists, 120, "the command")
    ours = [one for one, words in below(process.pid) if killed in ("all", *words)]
    if killed == "all":
        ours.append(psutil.Process(process.pid))
    manylab.kill(ours)
    flag.touch()
    _, err = process.communicate(timeout=300)
    assert process.returncode == (-9 if killed == "all" else NOT_DRAINED), err
    psutil.wait_procs(ours, timeout=300)
    done = hpcstage("clean", "--drain")
    assert done.returncode == 0, done.stderr
    both = {"kept": "node 1", "afterwards": "node 1"}
    assert contents(results) == (both if killed != "all" else {"kept": "node 1"})
    assert left_on(local_dir) == []


LEFT = """
import os, sys, time
out, flag = sys.argv[1:]
places = [out.replace(".v0/", f".v{index}/") for index in range(2)]
for index, place in enumerate(places):
    os.makedirs(f"{place}/logs")
    for name in (f"rank{index}", "same", f"logs/{index}"):
        with open(f"{place}/{name}", "w") as file:
            file.write(f"node {index}")
file = open(f"{places[1]}/open", "w")
file.write("half")
file.flush()
open(flag + ".up", "w").close()
time.sleep(90)
"""


def test_all_that_killed_nodes_left_is_copied_when_dir_is_back(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path
) -> None:
    """Everything is killed. While DIR is away nothing can be copied, and all of it stays."""
    results, flag = tmp_path / "results", tmp_path / "flag"
    process = hpcstage.start("run", "--nodes", "2", "--out", results, "--", *python_command(LEFT, "{out}", str(flag)))
    wait_for((tmp_path / "flag.up").exists, 120, "the command")
    ours = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    manylab.kill(ours)
    process.communicate(timeout=300)
    psutil.wait_procs(ours, timeout=300)
    results.rename(tmp_path / "away")
    done = hpcstage("clean", "--drain")
    assert done.returncode == NOT_DRAINED, done.stderr
    assert len(left_on(local_dir)) == 2
    (tmp_path / "away").rename(results)
    assert hpcstage("clean").returncode == NOT_DRAINED
    done = hpcstage("clean", "--drain")
    assert done.returncode == 0, done.stderr
    found = contents(results)
    both = [found.pop(name) for name in list(found) if name.partition(".")[0] == "same"]
    assert sorted(both) == ["node 0", "node 1"], "each node's file is there, under whatever name"
    assert found == {
        "rank0": "node 0", "rank1": "node 1", "logs/0": "node 0", "logs/1": "node 1", "open": "half",
    }  # fmt: skip
    assert left_on(local_dir) == []


def test_files_of_a_node_that_died_are_named_with_their_place_and_copied_later(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path
) -> None:
    results, flag = tmp_path / "results", tmp_path / "flag"
    (results / "old").mkdir(parents=True)
    process = hpcstage.start("run", "--nodes", "2", "--out", results, "--", *python_command(KEPT, "{out}", str(flag)))
    wait_for((tmp_path / "flag.up").exists, 120, "the command")
    wait_for((results / "kept").exists, 120, "what was written before")
    manylab.kill(manylab.of_nodes(process, 1))
    flag.touch()
    _, err = process.communicate(timeout=300)
    said = err.decode()
    assert process.returncode == NOT_DRAINED, said
    (place,) = left_on(local_dir)
    assert place.name.endswith(".v1")
    machine = os.uname().nodename
    assert f"they are on {machine} in {place}" in said, "the machine, since nobody can log in to a virtual node"
    assert sorted(os.listdir(results)) == ["kept", "old"], "a node that is lost removes nothing"
    record = manylab.record_of(hpcstage)
    assert [one["host"] for one in record["drains"]["out"]["names"]] == [f"{machine}.v1"]
    (problem,) = [one for one in record["notes"] if one["id"] == "not-drained"]
    assert problem["remedy"] == f"hpcstage clean --drain on {machine}; they are in {place}/out/tree"
    assert hpcstage("clean").returncode == NOT_DRAINED
    done = hpcstage("clean", "--drain")
    assert done.returncode == 0, done.stderr
    assert contents(results) == {"kept": "node 1", "afterwards": "node 1"}
    assert left_on(local_dir) == []


# ---- nodes with disks of their own


RUNS_OUT_OF_TIME = """
echo a > "$0/a"
until [ -e "$1/a" ]; do sleep 0.05; done
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do head -c 2000000 /dev/zero > "$0/large$i"; done
kill -TERM $$
"""


def test_what_was_not_copied_is_named_where_there_is_no_time(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path
) -> None:
    results = tmp_path / "results"
    words = ("run", "--nodes", "2", "--out", results, "--drain-rate", "1MB", "--drain", "1s")
    done = hpcstage(*words, "--", "sh", "-c", RUNS_OUT_OF_TIME, "{out}", results)
    assert done.returncode == -signal.SIGTERM, done.stderr
    left = {one["name"]: one["why"] for one in manylab.record_of(hpcstage)["drains"]["out"]["names"]}
    assert left["large20"] == "there was no time left"
    assert "a" not in left, "it was copied, and nobody could write to it since"
    assert (results / "a").read_text() == "a\n"
    assert hpcstage("clean", "--drain").returncode == 0
    assert left_on(local_dir) == []


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for nodes of their own")


def made(disk: Path, results: Path) -> tuple[kept.KeptPlace, kept.KeptLock]:
    """The place of another run with the same DIR on a node's disk."""
    name = kept.named_after(os.fspath(results))
    return kept.make(disk / f"hpcstage-out-{os.geteuid()}", [name], "earlier-run")


def leave(disk: Path, results: Path) -> kept.KeptPlace:
    """What a run leaves on a node's disk that was killed with all its processes before a file was drained."""
    place, lock = made(disk, results)
    start(Place(place.output), os.fspath(results), "earlier-run", "node3").close()
    (place.tree / "left").write_text("left")
    place.watched.touch()
    lock.let_go()
    return place


def on_cluster(
    hpcstage: Hpcstage, cluster: FakeCluster, scheduler: str, results: Path, launcher: list[str], *behind: str
) -> str:
    """Runs a program by a launcher, with hpcstage in front of it, or behind another; returns what was said."""
    results.mkdir(exist_ok=True)
    (results / "old").write_text("old")
    program = hpcstage.cwd / "rank.py"
    program.write_text(RANK)
    own = {name: value for name, value in hpcstage.env.items() if name != "HPCSTAGE_LOCAL_DIR"}
    words = [sys.executable, "-m", "hpcstage", "run", "--out", str(results), "--", *launcher, str(program), "{out}"]
    done = subprocess.run(
        cluster.on(cluster.nodes[0], [*behind, *words]),
        env={**own, **cluster.job(scheduler)},
        cwd=hpcstage.cwd,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.decode()


@pytest.mark.root
@needs_root
@manylab.needs_mpi
def test_the_directory_has_one_path_on_all_nodes(hpcstage: Hpcstage, cluster: FakeCluster, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    place = leave(cluster.disk("node3"), results)
    said = on_cluster(hpcstage, cluster, "slurm", results, ["srun", sys.executable])
    found = contents(results)
    assert found.pop("left") == "left", "what an earlier run left on another node"
    assert not place.path.exists()
    assert "{out} is" not in said
    assert {name: text for name, text in found.items() if name.startswith("rank")} == {
        f"rank{rank}": f"{rank} on node{rank // 2 + 1}" for rank in range(6)
    }
    same = {name: text.partition(" on ")[2] for name, text in found.items() if name.startswith("same")}
    assert sorted(same.values()) == cluster.nodes, "one file of each node"
    assert all(name in ("same", f"same.{node}") for name, node in same.items())
    assert found["old"] == "old"


@pytest.mark.root
@needs_root
@manylab.needs_mpi
@pytest.mark.parametrize("what", ["a file", "a run"])
def test_a_node_without_a_local_directory_makes_all_write_to_the_target(
    hpcstage: Hpcstage, cluster: FakeCluster, tmp_path: Path, what: str
) -> None:
    results = tmp_path / "results"
    if what == "a file":
        (cluster.disk("node3") / f"hpcstage-out-{os.geteuid()}").write_text("in the way")
    else:
        place, living = made(cluster.disk("node3"), results)
    said = on_cluster(hpcstage, cluster, "slurm", results, ["srun", sys.executable])
    (line,) = [line for line in said.splitlines() if "{out} is" in line]
    assert f"{{out}} is {results}: node3: cannot make" in line
    if what == "a run":
        assert "run earlier-run, or a program of it, has it" in line
        living.let_go()
        place.remove()
    assert {f"rank{rank}" for rank in range(6)} <= contents(results).keys()


@pytest.mark.root
@needs_root
def test_several_agents_on_a_node_are_one_and_the_word_comes_by_a_file(
    hpcstage: Hpcstage, cluster: FakeCluster, tmp_path: Path
) -> None:
    """pbsdsh starts an agent for each processor, and passes no input on."""
    results = tmp_path / "results"
    said = on_cluster(hpcstage, cluster, "pbs", results, ["env", "RANK=0", sys.executable])
    assert "{out} is" not in said
    assert contents(results) == {"old": "old", "rank0": "0 on node1", "same": "0 on node1"}
    assert len(manylab.record_of(hpcstage)["nodes"]) == 3


@pytest.mark.root
@needs_root
@manylab.needs_mpi
def test_behind_a_launcher_all_write_to_the_target_and_one_rank_says_so(
    hpcstage: Hpcstage, cluster: FakeCluster, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    said = on_cluster(hpcstage, cluster, "slurm", results, [sys.executable], "srun")
    assert said.count(f"{{out}} is {results}: hpcstage stands behind a launcher") == 1
    assert {f"rank{rank}" for rank in range(6)} <= contents(results).keys()
