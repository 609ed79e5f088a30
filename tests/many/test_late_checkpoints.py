"""What runs on several nodes left: drained late, restored by hand, protected anew; and where nodes cannot be asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import checkpointlab as lab
import manylab
import psutil
import pytest
from conftest import Hpcstage, wait_for
from fakecluster import FakeCluster

from hpcstage.checkpoint.job.gathering import SHARES
from hpcstage.errors import NotDrained

pytestmark = lab.MARKS

HOST = os.uname().nodename
NOT_DRAINED = NotDrained.exit_code


def tree(directory: Path) -> dict[str, bytes]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {os.fspath(path.relative_to(directory)): path.read_bytes() for path in files}


def saved(step: int, nodes: int) -> dict[str, bytes]:
    shards = {f"shards{step}/rank{node}": b"%d on %d" % (step, node) * 20_000 for node in range(nodes)}
    return {f"model{step}": b"%d" % step * 100_000, **shards}


def test_what_a_killed_job_left_is_listed_restored_rebuilt_and_drained_late(
    hpcstage: Hpcstage, local_dir: Path
) -> None:
    lab.killed(hpcstage, local_dir, 3)
    lines = hpcstage("checkpoint", "ls", "ckpt").stdout.decode().splitlines()
    names = ", ".join(f"{HOST}.v{node}" for node in range(3))
    coded = [line for line in lines if line.endswith(f", 2+1 with {names}")]
    assert len({line.partition(":")[0] for line in coded}) == 3, lines
    done = hpcstage("checkpoint", "restore", "ckpt", "whole")
    assert b"of all nodes, verified" in done.stdout, done.stderr
    assert tree(hpcstage.cwd / "whole") == saved(1, 3)
    lab.lose(local_dir, 0)
    done = hpcstage("checkpoint", "restore", "ckpt", "rebuilt")
    assert b"of all nodes, verified" in done.stdout, done.stderr
    assert tree(hpcstage.cwd / "rebuilt") == saved(1, 3)
    done = hpcstage("clean", "--drain")
    assert done.returncode == 0, done.stderr
    assert lab.in_dir(hpcstage) == lab.files_of(1, 3)
    assert {name: content for name, content in tree(hpcstage.cwd / "ckpt").items() if not name.startswith(".")} == (
        saved(1, 3)
    )
    assert lab.places(local_dir) == []


def test_nodes_with_disks_of_their_own_are_drained_one_after_the_other(
    hpcstage: Hpcstage, local_dir: Path, tmp_path: Path
) -> None:
    """A node can read its own disk alone. Until the last share is there, DIR has none of it, each node names what it
    has, and keeps it."""
    lab.killed(hpcstage, local_dir, 3)
    disks = [tmp_path / f"disk{node}" for node in range(3)]
    for node, disk in enumerate(disks):
        (place,) = lab.places(local_dir, node)
        (disk / place.parent.name).mkdir(parents=True, mode=0o700)
        shutil.move(place, disk / place.parent.name)

    def drained(node: int) -> tuple[int, str]:
        done = hpcstage("clean", "--drain", "--local-dir", os.fspath(disks[node]))
        return done.returncode, done.stderr.decode()

    for node in (1, 0):
        code, said = drained(node)
        assert code == NOT_DRAINED, said
        assert "are not there yet" in said
        assert "model1" in said or node == 1
        assert lab.in_dir(hpcstage) == []
        assert hpcstage("clean", "--local-dir", os.fspath(disks[node])).returncode == NOT_DRAINED
    for node in (2, 0, 1):
        code, said = drained(node)
        assert code == 0, said
        assert lab.places(disks[node]) == []
        assert {name: text for name, text in tree(hpcstage.cwd / "ckpt").items() if name[0] != "."} == saved(1, 3)
    assert not [name for name in os.listdir(hpcstage.cwd / "ckpt") if name.startswith(SHARES)]
    done = lab.run(hpcstage, 2)
    assert lab.shown(done) == [lab.files_of(1, 3)] * 2


def entries(local_dir: Path, node: int) -> list[set[str]]:
    """The entries of each protected generation, as a node of any run knows them."""
    return [set(lab.own(one)) for one in lab.known(local_dir, node)]


def test_a_restored_state_is_protected_anew_before_anything_is_saved(hpcstage: Hpcstage, local_dir: Path) -> None:
    """One loss after the other, of as many nodes as there are parities each time; nothing of it is in DIR."""
    lab.killed(hpcstage, local_dir, 3)
    lab.lose(local_dir, 0)
    flag = hpcstage.cwd / "flag"
    words = ("run", "--nodes", "3", "--checkpoint", "ckpt", "--drain-every", "1000")
    wrapper = hpcstage.start(*words, "--", *lab.program("wait('again')", 3), env={"FLAG": os.fspath(flag)})
    wait_for((hpcstage.cwd / "flag.again.up").exists, 120, "the command")
    wait_for(lambda: {"model1", "shards1"} in entries(local_dir, 0), 120, "the protection on the node that was lost")
    lab.kill_all(wrapper)
    assert lab.in_dir(hpcstage) == []
    lab.lose(local_dir, 1)
    done = lab.run(hpcstage, 3)
    assert done.returncode == 0, done.stderr
    assert lab.shown(done) == [lab.files_of(1, 3)] * 3
    assert lab.in_dir(hpcstage) == lab.files_of(1, 3)


REWRITES = """
files = [open(f"{place}/model0", "r+b") for place in places]
for file in files:
    file.write(b"x")
    file.flush()
for place in places:
    os.unlink(f"{place}/removed")
"""


def test_beside_what_a_killed_job_left_lies_what_dir_has_of_the_rest(hpcstage: Hpcstage, local_dir: Path) -> None:
    """What was being written anew when its first state was saved, what it found in DIR, and what others put there."""
    assert lab.run(hpcstage, 2, "save(0)").returncode == 0
    for name in ("base", "removed"):
        (hpcstage.cwd / "ckpt" / name).write_text("of the user")
    lab.killed(hpcstage, local_dir, 2, text=REWRITES)
    (hpcstage.cwd / "ckpt/pretrained").write_text("of the user, later")
    lab.lose(local_dir, 0)
    done = lab.run(hpcstage, 2)
    assert done.returncode == 0, done.stderr
    whole = sorted(["base", "pretrained", *lab.files_of(0, 2), *lab.files_of(1, 2)])
    assert lab.shown(done) == [whole] * 2
    left = [name for name in lab.in_dir(hpcstage) if not name.startswith("model0.")]
    assert left == sorted([*whole, "removed"]), "nothing is there twice"
    assert (hpcstage.cwd / "ckpt/model0").read_bytes() == b"0" * 100_000


WAITING_RANK = """
import os, sys, time
checkpoint = sys.argv[1]
with open(f"{checkpoint}/.new", "w") as file:
    file.write(os.environ["RANK"])
os.rename(f"{checkpoint}/.new", f"{checkpoint}/rank" + os.environ["RANK"])
time.sleep(90)
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for nodes of their own")
def test_nodes_below_one_switch_are_in_groups_apart(hpcstage: Hpcstage, tmp_path: Path) -> None:
    """As Slurm tells each node in its environment; without that the first node would be with the third."""
    rank = tmp_path / "rank.py"
    rank.write_text(WAITING_RANK)
    switches = {"node1": "s1", "node2": "s2", "node3": "s1", "node4": "s2"}
    with tempfile.TemporaryDirectory(prefix="test-hpcstage-", dir="/dev/shm") as base:
        cluster = FakeCluster(Path(base), 4)
        words = ["run", "--checkpoint", "ckpt", "--protect", "1+1", "--drain-every", "1000"]
        words += ["--", "srun", sys.executable, os.fspath(rank), "{checkpoint}"]
        env = {name: value for name, value in hpcstage.env.items() if name != "HPCSTAGE_LOCAL_DIR"}
        env |= cluster.job("slurm") | {
            "SLURM_NTASKS": "4",
            "HPCSTAGE_TEST_SWITCHES": ",".join(map(":".join, switches.items())),
            "SLURM_TOPOLOGY_ADDR": "s1.node1",
            "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node",
        }
        here = [sys.executable, "-m", "hpcstage"]
        wrapper = subprocess.Popen(
            cluster.on("node1", [*here, *words]), env=env, cwd=hpcstage.cwd, stdout=subprocess.PIPE
        )
        try:
            ls = cluster.on("node1", [*here, "checkpoint", "ls", "ckpt"])

            def listed() -> str:
                return subprocess.run(ls, env=env, cwd=hpcstage.cwd, capture_output=True, check=False).stdout.decode()

            wait_for(lambda: "1+1 with" in listed(), 120, "a protected generation")
            assert "1+1 with node1, node2" in listed()
        finally:
            lab.kill_all(wrapper)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["hpcstage.lead", "hpcstage.exchange"])
def test_nodes_that_lose_each_other_bring_their_shares_and_the_last_one_the_whole(
    hpcstage: Hpcstage, local_dir: Path, victim: str
) -> None:
    """The lead is killed, and with it goes all that connects the nodes; the program ends afterwards. Where the lead
    lives, it is known what each of them brought."""
    flag = hpcstage.cwd / "flag"
    words = ("run", "--nodes", "2", "--checkpoint", "ckpt", "--drain-every", "1000")
    process = hpcstage.start(*words, "--", *lab.program("save(1)\nwait('saved')", 2), env={"FLAG": os.fspath(flag)})
    wait_for((hpcstage.cwd / "flag.saved.up").exists, 120, "the command")
    wait_for(lambda: bool(lab.protected(local_dir, 2)), 120, "the protection")
    manylab.kill(manylab.below(process, victim))
    exchanges = [one for one in psutil.process_iter(["cmdline"]) if is_exchange(one, local_dir)]
    psutil.wait_procs(exchanges, timeout=300)
    assert lab.in_dir(hpcstage) == []
    (hpcstage.cwd / "flag.saved").touch()
    _, err = process.communicate(timeout=300)
    assert lab.in_dir(hpcstage) == lab.files_of(1, 2), err
    assert process.returncode == 0, err
    if victim != "hpcstage.lead":
        size_bytes = sum((hpcstage.cwd / "ckpt" / name).stat().st_size for name in lab.in_dir(hpcstage))
        assert lab.drain_of(hpcstage)["size_bytes"] == size_bytes
    assert hpcstage("clean", "--drain").returncode == 0
    assert lab.places(local_dir) == []


def is_exchange(process: psutil.Process, local_dir: Path) -> bool:
    words = process.info["cmdline"] or []
    return "hpcstage.exchange" in words and any(word.startswith(os.fspath(local_dir)) for word in words)
