"""`--checkpoint DIR` on several nodes: one state for all, which outlives lost nodes, and is found on as many, fewer or
more nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import checkpointlab as lab
import manylab
import pytest
from conftest import GLOO, Hpcstage, torchrun, wait_for
from fakecluster import FakeCluster

from hpcstage.checkpoint.job.gathering import SHARES
from hpcstage.node.kept import KeptPlace

pytest_plugins = ("fakeclusterfixtures",)
pytestmark = lab.MARKS

HOST = os.uname().nodename
TRAIN = Path(__file__).parent / "train_dcp.py"


def test_what_each_node_saves_is_one_state_that_the_next_run_has_on_all_its_nodes(
    hpcstage: Hpcstage, local_dir: Path
) -> None:
    done = lab.run(hpcstage, 2, "save(1)")
    assert done.returncode == 0, done.stderr
    assert b"{checkpoint} is" not in done.stderr, done.stderr
    assert lab.in_dir(hpcstage) == lab.files_of(1, 2)
    assert lab.places(local_dir) == []
    part = lab.part_of(hpcstage)
    assert f"state {part['saved'][-1]['number']}, which is in DIR" in part["protection"]
    assert lab.drain_of(hpcstage)["undrained"] == {}
    done = lab.run(hpcstage, 3, "save(2)")
    assert done.returncode == 0, done.stderr
    assert lab.shown(done) == [lab.files_of(1, 2)] * 3
    assert lab.in_dir(hpcstage) == sorted(lab.files_of(1, 2) + lab.files_of(2, 3))
    done = hpcstage("checkpoint", "verify", "ckpt")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(b": whole") == 4
    for step in (1, 2):
        assert f"/ckpt/shards{step}: whole" in done.stdout.decode()
    assert "2+1" in lab.part_of(hpcstage)["protection"]
    done = lab.run(hpcstage, 1)
    assert lab.shown(done) == [sorted(lab.files_of(1, 2) + lab.files_of(2, 3))], "also on one node"


DIFFERENT = """
for node, place in enumerate(places):
    with open(f"{place}/.same", "w") as file:
        file.write(f"of {node}")
    os.rename(f"{place}/.same", f"{place}/same")
"""


def test_what_nodes_wrote_differently_is_named_and_does_not_keep_the_next_run_from_it(hpcstage: Hpcstage) -> None:
    done = lab.run(hpcstage, 2, DIFFERENT)
    assert done.returncode == 0, done.stderr
    assert lab.in_dir(hpcstage) == ["same", f"same.{HOST}.v0"]
    assert f"several nodes wrote same in {hpcstage.cwd}/ckpt; that of {HOST}.v0 lies there" in done.stderr.decode()
    done = lab.run(hpcstage, 2)
    assert b"{checkpoint} is" not in done.stderr, done.stderr
    assert lab.shown(done) == [["same"]] * 2


HALF = """
save(1)
half = open(f"{places[1]}/half", "w")
half.write("half")
half.flush()
os._exit(3)
"""


def test_beside_outputs_what_the_other_nodes_say_of_their_checkpoints_is_heard(hpcstage: Hpcstage) -> None:
    done = lab.run(hpcstage, 2, HALF, "--out", "results")
    assert done.returncode == 3, done.stderr
    assert b"was lost" not in done.stderr, done.stderr
    drain = lab.drain_of(hpcstage)
    assert [one["name"].partition(".")[0] for one in drain["names"] if one["fate"] == "unclosed"] == ["half"]
    assert f"half.{manylab.record_of(hpcstage)['run']['id']}.{HOST}.v1" in lab.in_dir(hpcstage)


AGAIN = """
file = open(f"{places[0]}/model1", "r+b")
file.write(b"2")
file.flush()
save(2)
wait("again")
"""


def test_what_is_being_rewritten_in_place_stays_in_dir_as_it_was(hpcstage: Hpcstage, local_dir: Path) -> None:
    """It is in no state until it is complete again, and the program did not remove it."""
    assert lab.run(hpcstage, 2, "save(1)").returncode == 0
    words = ("run", "--nodes", "2", "--checkpoint", "ckpt", "--", *lab.program(AGAIN, 2))
    wrapper = hpcstage.start(*words, env={"FLAG": os.fspath(hpcstage.cwd / "flag")})
    wait_for((hpcstage.cwd / "flag.again.up").exists, 120, "the command")
    wait_for(lambda: {"model2", *lab.files_of(2, 2)} <= set(lab.in_dir(hpcstage)), 120, "the next state in DIR")
    lab.kill_all(wrapper)
    done = hpcstage("clean", "--drain")
    assert done.returncode == 0, done.stderr
    assert (hpcstage.cwd / "ckpt" / "model1").read_bytes() == b"1" * 100_000
    assert lab.places(local_dir) == []


def test_a_lost_node_is_rebuilt_on_more_nodes(hpcstage: Hpcstage, local_dir: Path) -> None:
    lab.killed(hpcstage, local_dir, 3)
    lab.lose(local_dir, 0)
    done = lab.run(hpcstage, 4)
    assert done.returncode == 0, done.stderr
    assert lab.shown(done) == [lab.files_of(1, 3)] * 4
    assert "rebuilt from survivors" in lab.part_of(hpcstage)["restored"]
    assert lab.in_dir(hpcstage) == lab.files_of(1, 3), "what was on the local disks only is in DIR at the end"
    assert lab.places(local_dir) == []


def test_more_lost_than_parities_is_refused_and_the_copy_in_dir_is_taken(hpcstage: Hpcstage, local_dir: Path) -> None:
    assert lab.run(hpcstage, 2, "save(0)").returncode == 0
    lab.killed(hpcstage, local_dir, 3)
    lab.lose(local_dir, 0, 1)
    done = lab.run(hpcstage, 2)
    assert done.returncode == 0, done.stderr
    assert lab.shown(done) == [lab.files_of(0, 2)] * 2
    part = lab.part_of(hpcstage)
    assert "from " in part["restored"]
    assert any("can be rebuilt" in line or "is gone" in line for line in part["refused"]), part["refused"]
    (left,) = lab.places(local_dir)
    assert "are not there yet" in done.stderr.decode(), "what is left of it is named, and stays"
    assert hpcstage("clean", "--forget", KeptPlace(left).run_id).returncode == 0


@pytest.mark.parametrize("node", [0, 1])
def test_when_a_node_is_lost_the_last_state_of_all_nodes_is_in_dir_and_none_without_its_part(
    hpcstage: Hpcstage, local_dir: Path, node: int
) -> None:
    """What the others save without it lies there under other names."""
    flag = hpcstage.cwd / "flag"
    words = ("run", "--nodes", "3", "--checkpoint", "ckpt", "--drain-every", "1000")
    text = "save(1)\nwait('saved')\nsave(2)" if node else "save(1)\nwait('saved')\nplaces = places[1:]\nsave(2)"
    process = hpcstage.start(*words, "--", *lab.program(text, 3), env={"FLAG": os.fspath(flag)})
    wait_for((hpcstage.cwd / "flag.saved.up").exists, 120, "the command")
    wait_for(lambda: bool(lab.protected(local_dir, 3)), 120, "the protection")
    manylab.kill(manylab.of_nodes(process, node))
    lab.lose(local_dir, node)
    wait_for(lambda: lab.in_dir(hpcstage) == lab.files_of(1, 3), 120, "the copy of what the lost node had")
    (hpcstage.cwd / "flag.saved").touch()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 74, err
    run_id, host = manylab.record_of(hpcstage)["run"]["id"], f"{HOST}.v{node}"
    found = lab.in_dir(hpcstage)
    assert [name for name in found if run_id not in name] == lab.files_of(1, 3), err
    assert len([name for name in found if name.startswith(f"shards2.{run_id}")]) == 2, found
    assert lab.part_of(hpcstage)["lost"] == [host]
    assert f"the parts of {host} are missing" in err.decode()
    assert "of all nodes is in" not in err.decode()
    done = hpcstage("clean", "--drain")
    assert done.returncode == 0, done.stderr
    assert lab.places(local_dir) == []
    assert lab.in_dir(hpcstage) == found, err


def test_states_are_saved_while_the_part_of_a_lost_node_is_rebuilt_at_a_rate(
    hpcstage: Hpcstage, local_dir: Path
) -> None:
    flag = hpcstage.cwd / "flag"
    words = ("run", "--nodes", "3", "--checkpoint", "ckpt", "--drain-every", "1000", "--drain-rate", "2MB")
    text = """
def write(node, name, size):
    with open(f"{places[node]}/.{name}", "wb") as file:
        file.write(os.urandom(size))
    os.rename(f"{places[node]}/.{name}", f"{places[node]}/{name}")
write(2, "large", 12_000_000)
wait('saved')
write(0, "later", 1000)
wait('end')
"""
    process = hpcstage.start(*words, "--", *lab.program(text, 3), env={"FLAG": os.fspath(flag)})
    wait_for(lambda: any("large" in lab.own(one) for one in lab.known(local_dir, 0)), 120, "the protection")
    manylab.kill(manylab.of_nodes(process, 2))
    lab.lose(local_dir, 2)
    wait_for(lambda: any((hpcstage.cwd / "ckpt").glob(f"{SHARES}*/*/*.v2")), 120, "the rebuilt part")
    (hpcstage.cwd / "flag.saved").touch()
    wait_for(lambda: any("later" in lab.own(one) for one in lab.known(local_dir, 0)), 120, "the next state")
    assert lab.in_dir(hpcstage) == [], "it is still being rebuilt"
    (hpcstage.cwd / "flag.end").touch()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert lab.in_dir(hpcstage) == ["large", "later"], err
    assert (hpcstage.cwd / "ckpt" / "large").stat().st_size == 12_000_000


def test_more_lost_than_parities_while_the_command_runs_is_an_error(hpcstage: Hpcstage, local_dir: Path) -> None:
    """What is gone has no name in DIR and is named; what is left is there."""
    flag = hpcstage.cwd / "flag"
    words = ("run", "--nodes", "3", "--checkpoint", "ckpt", "--drain-every", "1000")
    process = hpcstage.start(*words, "--", *lab.program("save(1)\nwait('saved')", 3), env={"FLAG": os.fspath(flag)})
    wait_for(lambda: len(lab.places(local_dir)) == 3 and bool(lab.protected(local_dir, 3)), 120, "the protection")
    manylab.kill(manylab.of_nodes(process, 1, 2))
    lab.lose(local_dir, 1, 2)
    wait_for(lambda: "model1" in lab.in_dir(hpcstage), 120, "what is left in DIR")
    (hpcstage.cwd / "flag.saved").touch()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 74, err
    assert lab.in_dir(hpcstage) == ["model1"]
    assert "ckpt: shards1 (parts of it are gone with their nodes)" in err.decode()
    assert "of all nodes is in" not in err.decode()
    forgotten = {KeptPlace(place).run_id for place in lab.places(local_dir)}
    assert all(hpcstage("clean", "--forget", name).returncode == 0 for name in forgotten)


def test_what_a_lost_node_never_had_a_part_of_is_saved_without_it(hpcstage: Hpcstage, local_dir: Path) -> None:
    flag = hpcstage.cwd / "flag"
    words = ("run", "--nodes", "3", "--checkpoint", "ckpt")
    text = "places = places[:1]\nsave(1)\nwait('saved')\nsave(2)"
    process = hpcstage.start(*words, "--", *lab.program(text, 3), env={"FLAG": os.fspath(flag)})
    wait_for(lambda: lab.in_dir(hpcstage) == lab.files_of(1, 1), 120, "the first state in DIR")
    manylab.kill(manylab.of_nodes(process, 2))
    lab.lose(local_dir, 2)
    (hpcstage.cwd / "flag.saved").touch()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert lab.in_dir(hpcstage) == sorted(lab.files_of(1, 1) + lab.files_of(2, 1)), err
    assert f"{HOST}.v2 was lost; state" in err.decode()
    assert lab.places(local_dir) == []


def test_more_than_the_nodes_is_the_most_that_fits_or_refused(hpcstage: Hpcstage) -> None:
    done = lab.run(hpcstage, 2, "save(1)", "--protect", "4+2", "--strict")
    assert done.returncode == 125
    assert b"4+2 needs 6 nodes" in done.stderr
    assert done.stdout == b""
    done = lab.run(hpcstage, 2, "save(1)", "--protect", "4+2")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(b"4+2 needs 6 nodes; on 2 it is 1+1") == 1
    assert lab.in_dir(hpcstage) == lab.files_of(1, 2)


def test_behind_a_launcher_the_error_says_that_it_stands_there(hpcstage: Hpcstage) -> None:
    words = hpcstage.command("run", "--checkpoint", "ckpt", "--protect", "2+1", "--strict", "--", "echo", "started")
    done = subprocess.run(
        [Path(sys.executable).with_name("mpiexec"), "-n", "2", *words],
        env=hpcstage.env,
        cwd=hpcstage.cwd,
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (125, b""), done.stderr
    assert b"hpcstage stands behind a launcher" in done.stderr
    assert b"one node" not in done.stderr


@pytest.mark.torch
def test_training_that_lost_two_nodes_goes_on_to_the_weights_of_an_undisturbed_one(
    hpcstage: Hpcstage, local_dir: Path
) -> None:
    """Three ranks on three virtual nodes; everything of the run is killed, the directories of two are gone."""
    torch = pytest.importorskip("torch")
    cwd = hpcstage.cwd

    def train(count: int, stop_after: int, out: Path, place: str = "{checkpoint}") -> list[str]:
        return torchrun(3, TRAIN, place, count, stop_after, out)

    plain = cwd / "plain"
    plain.mkdir()
    alone = subprocess.run(
        train(1, -1, cwd / "plain.pt", os.fspath(plain)), env={**os.environ, **GLOO}, capture_output=True, check=False
    )
    assert alone.returncode == 0, alone.stderr
    words = ("run", "--nodes", "3", "--checkpoint", "ckpt", "--protect", "1+2", "--drain-every", "1000")
    wrapper = hpcstage.start(*words, "--", *train(3, 2, cwd / "cut.pt"), env=GLOO)
    wait_for((cwd / "cut.pt.up").exists, 120, "step 2")
    wait_for(lambda: lab.has_protected(local_dir, 3, "step2"), 120, "the protection of step 2")
    lab.kill_all(wrapper)
    lab.lose(local_dir, 0, 2)
    words = ("run", "--nodes", "2", "--checkpoint", "ckpt")
    done = hpcstage(*words, "--", *train(2, -1, cwd / "cut.pt"), env=GLOO, timeout_s=400)
    assert done.returncode == 0, done.stderr
    assert (done.stdout.count(b"from"), done.stdout.count(b"3")) == (3, 3), done.stdout
    weights, expected = torch.load(cwd / "cut.pt"), torch.load(cwd / "plain.pt")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert {f"step{step}/.metadata" for step in range(6)} <= set(lab.in_dir(hpcstage))


# ---- nodes with disks of their own

RANK = """
import os, sys, time
checkpoint, step = sys.argv[1:]
assert checkpoint == os.environ["HPCSTAGE_CHECKPOINT"]
rank, host = os.environ["RANK"], os.uname().nodename
sys.stdout.write(" ".join([host, *sorted(os.listdir(checkpoint))]) + "\\n")  # in one piece, beside other ranks
sys.stdout.flush()
with open(f"{checkpoint}/.{rank}", "w") as file:
    file.write(f"{step} on {host}")
os.rename(f"{checkpoint}/.{rank}", f"{checkpoint}/step{step}.{rank}")
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for nodes of their own")
def test_nodes_with_disks_of_their_own_have_one_state(hpcstage: Hpcstage, cluster: FakeCluster, tmp_path: Path) -> None:
    program = hpcstage.cwd / "rank.py"
    program.write_text(RANK)
    own = {name: value for name, value in hpcstage.env.items() if name != "HPCSTAGE_LOCAL_DIR"}

    def go(step: int) -> subprocess.CompletedProcess[bytes]:
        words = [sys.executable, "-m", "hpcstage", "run", "--checkpoint", "ckpt", "--"]
        words += ["srun", sys.executable, str(program), "{checkpoint}", str(step)]
        return subprocess.run(
            cluster.on(cluster.nodes[0], words),
            env={**own, **cluster.job("slurm")},
            cwd=hpcstage.cwd,
            capture_output=True,
            timeout=300,
            check=False,
        )

    first = go(1)
    assert first.returncode == 0, first.stderr
    assert b"{checkpoint} is" not in first.stderr, first.stderr
    names = [f"step1.{rank}" for rank in range(6)]
    assert lab.in_dir(hpcstage) == names
    assert {(hpcstage.cwd / "ckpt" / f"step1.{rank}").read_text() for rank in range(6)} == {
        f"1 on {node}" for node in cluster.nodes
    }
    second = go(2)
    assert second.returncode == 0, second.stderr
    found = {line.split()[0]: line.split()[1:] for line in second.stdout.decode().splitlines()}
    assert sorted(found) == cluster.nodes
    assert all(set(names) <= set(there) for there in found.values()), found
    assert len(lab.in_dir(hpcstage)) == 12
