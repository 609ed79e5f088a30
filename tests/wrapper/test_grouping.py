"""Which nodes a run has and who starts what, from captured environments; and the script that agents are started by."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import REPO, SHM

from hpcstage.config import Config, load
from hpcstage.errors import NotStarted
from hpcstage.job import Job, detect, together
from hpcstage.job.localdir import LocalDir
from hpcstage.wrapper import grouping

ENVIRONMENTS = REPO / "tests" / "job" / "environments"
LOCAL = LocalDir(SHM, "", (), False, 10**9, 10**6, 1)
SHARED = LocalDir(SHM, "", (), False, 10**9, 10**6, 1, is_network=True)


def job(name: str, host_file: str = "", **changes: str) -> Job:
    lines = (ENVIRONMENTS / f"{name}.env").read_text().splitlines()
    env = {**dict(line.split("=", 1) for line in lines if not line.startswith("#")), **changes}
    hosts = ENVIRONMENTS / f"{name}.hosts"
    here = env.get("HOSTNAME", "here")
    return detect(env, hostname=here, read_text=lambda _: host_file or hosts.read_text(), parent_pid=99)


def config(tmp_path: Path, **given: str) -> Config:
    return load({"data": (str(tmp_path),), **given}, {}, tmp_path)


def test_in_front_of_srun_the_lead_starts_the_daemons(tmp_path: Path) -> None:
    found = together.find(config(tmp_path), job("slurm-batch"), LOCAL, "node1")
    assert found == together.Grouping(["node1", "node2", "node3", "node4"], 0, "srun", starts_daemons=True)
    assert found.node_name("run") == "run"


def test_behind_srun_each_node_starts_its_own(tmp_path: Path) -> None:
    found = together.find(config(tmp_path), job("slurm-srun"), LOCAL, "node3")
    assert found == together.Grouping(["node1", "node2", "node3", "node4"], 2, "srun", starts_daemons=False)


def test_the_node_of_the_script_comes_first_whatever_the_list_says(tmp_path: Path) -> None:
    hosts = "node3 2 all.q@node3 UNDEFINED\nnode1 2 all.q@node1 UNDEFINED\nnode2 2 all.q@node2 UNDEFINED\n"
    found = together.find(config(tmp_path), job("gridengine-pe", hosts, HOSTNAME="node1"), LOCAL, "node1")
    assert found is not None
    assert found.hosts == ["node1", "node3", "node2"]
    assert (found.index, found.launcher) == (0, "qrsh")


def test_one_slot_on_a_node_is_left_to_the_launcher_of_the_command(tmp_path: Path) -> None:
    few = job("gridengine-pe", HOSTNAME="node1")
    assert together.find(config(tmp_path), few, LOCAL, "node1") is None
    (line,) = together.warnings(config(tmp_path), few, LOCAL)
    assert "gave a node one slot" in line
    assert "two slots on each node" in line
    asked = config(tmp_path, launcher="qrsh")
    assert together.find(asked, few, LOCAL, "node1") is not None
    assert together.warnings(asked, few, LOCAL) == []


def test_a_job_of_several_parts_is_one_group(tmp_path: Path) -> None:
    found = together.find(config(tmp_path), job("slurm-het"), LOCAL, "big1")
    parts = (("big1",), ("gpu01", "gpu02"))
    assert found == together.Grouping(["big1", "gpu01", "gpu02"], 0, "srun", starts_daemons=True, parts=parts)


def test_a_login_node_is_told_to_start_hpcstage_on_the_nodes() -> None:
    with pytest.raises(NotStarted) as caught:
        grouping.require_node(job("slurm-login"))
    assert caught.value.exit_code == 125
    assert "login1 is not a node of job 500" in caught.value.line()
    assert "n[0001-0002]" in caught.value.line()
    assert "srun hpcstage run" in caught.value.remedy
    grouping.require_node(job("slurm-batch"))


@pytest.mark.parametrize(("strict", "code"), [([], 0), (["--strict"], 125)])
def test_on_a_login_node_the_command_runs_without_staging(tmp_path: Path, strict: list[str], code: int) -> None:
    lines = (ENVIRONMENTS / "slurm-login.env").read_text().splitlines()
    given = dict(line.split("=", 1) for line in lines if line.startswith("SLURM"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "HPCSTAGE"))}
    env = {**kept, **given, "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(REPO)}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "file").write_text("content")
    words = ["run", "--data", str(tmp_path / "data"), "--local-dir", str(SHM), *strict, "--", "cat", "data/file"]
    done = subprocess.run(
        [sys.executable, "-m", "hpcstage", *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stdout == ("" if strict else "content")
    (line,) = done.stderr.splitlines()
    assert "is not a node of job 500" in line
    (part,) = tmp_path.glob("hpcstage-runs/*/run.part.json")
    assert json.loads(part.read_text())["nodes"] == ["n0001", "n0002"]


def test_pbs(tmp_path: Path) -> None:
    found = together.find(config(tmp_path), job("openpbs"), LOCAL, "node1")
    assert found is not None
    assert found.launcher == "pbsdsh"
    assert len(found.hosts) == len(set(found.hosts)) > 1


def test_without_a_scheduler_nodes_are_virtual_and_only_if_asked_for(tmp_path: Path) -> None:
    assert together.find(config(tmp_path), job("none"), LOCAL, "here") is None
    found = together.find(config(tmp_path, nodes="3"), job("none"), LOCAL, "here")
    assert found is not None
    assert found.virtual
    assert found.hosts == ["here.v0", "here.v1", "here.v2"]
    assert found.node_name("run") == "run.v0"


@pytest.mark.parametrize("given", [{"nodes": "1"}, {"launcher": "none"}])
def test_the_user_may_have_one_node_only(tmp_path: Path, given: dict[str, str]) -> None:
    assert together.find(config(tmp_path, **given), job("slurm-batch"), LOCAL, "node1") is None


def test_nodes_that_share_their_local_directory_stage_alone(tmp_path: Path) -> None:
    assert together.find(config(tmp_path), job("slurm-batch"), SHARED, "node1") is None
    (line,) = together.warnings(config(tmp_path), job("slurm-batch"), SHARED)
    assert "stages alone" in line


def test_behind_a_launcher_only_the_first_node_warns(tmp_path: Path) -> None:
    asked = config(tmp_path, nodes="3")
    assert len(together.warnings(asked, job("slurm-batch"), SHARED)) == 2
    assert len(together.warnings(asked, job("slurm-srun", SLURM_NODEID="0", SLURMD_NODENAME="node1"), SHARED)) == 2
    assert together.warnings(asked, job("slurm-srun"), SHARED) == []


@pytest.mark.parametrize(
    "rank",
    [
        {"PMI_RANK": "1", "PMI_SIZE": "4"},
        {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"},
    ],
)
def test_ranks_that_have_no_name_in_common_stay_alone(tmp_path: Path, rank: dict[str, str]) -> None:
    behind = job("openpbs", **rank)
    assert behind.is_rank
    assert together.find(config(tmp_path), behind, LOCAL, "node1") is None


@pytest.mark.parametrize(
    ("name", "given", "local", "nodes"),
    [
        ("slurm-batch", {}, LOCAL, 4),
        ("slurm-batch", {}, SHARED, 1),
        ("slurm-batch", {}, None, 4),
        ("slurm-batch", {"launcher": "none"}, LOCAL, 1),
        ("slurm-batch", {"nodes": "16"}, LOCAL, 16),
        ("slurm-batch", {"nodes": "16"}, SHARED, 1),
        ("slurm-login", {}, LOCAL, 2),
        ("none", {}, LOCAL, 1),
        ("none", {"nodes": "3"}, LOCAL, 3),
    ],
)
def test_a_plan_is_for_the_nodes_that_stage_together(
    tmp_path: Path, name: str, given: dict[str, str], local: LocalDir | None, nodes: int
) -> None:
    found = together.planned(config(tmp_path, **given), job(name), local, "here")
    assert (1 if found is None else len(found.hosts)) == nodes
    assert (1 if found is None else found.shares) == (nodes if name == "none" else 1)


def test_the_agents_script_keeps_names_with_spaces_and_quotes(tmp_path: Path) -> None:
    odd = tmp_path / "it's a place"
    odd.mkdir()
    script = odd / "agent.sh"
    script.write_text(grouping.agent_script(odd, {"PATH": "/a b:/c", "LD_LIBRARY_PATH": "x'y", "SECRET": "no"}))
    text = script.read_text()
    assert "SECRET" not in text
    shown = text.replace("exec ", 'printf "%s\\n" "$PATH" "$LD_LIBRARY_PATH" ')
    done = subprocess.run(["/bin/sh", "-c", shown], capture_output=True, text=True, check=True, env={})
    path, libraries, *words = done.stdout.splitlines()
    assert (path, libraries) == ("/a b:/c", "x'y")
    assert words[-1] == os.fspath(odd / "spec.json")
    where = subprocess.run(
        ["/bin/sh", "-c", text.replace("exec ", "pwd; exit 0; ")], capture_output=True, text=True, check=True, cwd=odd
    )
    assert where.stdout == "/\n", "Python would look for modules in the user's home"


def test_the_end_waits_for_parts_of_this_run_only(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.mkdir()
    now = time.time()
    part = {"started_unix_s": now, "complete": True, "problems": []}
    (nodes / "a.json").write_text(json.dumps(part))
    (nodes / "b.json").write_text(json.dumps({**part, "started_unix_s": now - 3600}))
    soon = time.monotonic() + 0.1
    assert grouping.await_parts(tmp_path, ["a"], now, soon)
    assert not grouping.await_parts(tmp_path, ["a", "b"], now, soon)
    missing = {**part, "complete": False, "problems": [{"id": "node-missing"}]}
    (nodes / "b.json").write_text(json.dumps(missing))
    assert grouping.await_parts(tmp_path, ["a", "b"], now, soon)


def final(run_dir: Path, host: str, **changes: object) -> None:
    (run_dir / "nodes").mkdir(exist_ok=True)
    part = {"started_unix_s": 1000.0, "complete": True, "problems": [], **changes}
    temporary = run_dir / f".{host}"
    temporary.write_text(json.dumps(part))
    temporary.replace(run_dir / "nodes" / f"{host}.json")


def test_the_last_word_of_every_node_is_awaited(tmp_path: Path) -> None:
    final(tmp_path, "node1")
    final(tmp_path, "node2", complete=False)
    later = threading.Timer(0.2, final, (tmp_path, "node2"))
    later.start()
    assert grouping.await_parts(tmp_path, ["node1", "node2"], 1000.0, time.monotonic() + 30)
    later.join()


@pytest.mark.parametrize(
    ("part", "is_last"),
    [
        ({}, True),
        ({"complete": False}, False),
        ({"complete": False, "problems": [{"id": "node-missing"}]}, True),
        ({"started_unix_s": 900.0}, False),
    ],
)
def test_which_word_is_the_last(tmp_path: Path, part: dict[str, object], is_last: bool) -> None:
    final(tmp_path, "node1", **part)
    begun_s = time.monotonic()
    assert grouping.await_parts(tmp_path, ["node1"], 1000.0, begun_s + 0.1) is is_last
    assert is_last or time.monotonic() - begun_s >= 0.1
