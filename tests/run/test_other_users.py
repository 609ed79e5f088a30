"""What another user of the machine can and cannot do to a run; the other user is made by setuid in a child."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage

Tree = Callable[..., Path]
OTHER = 65534
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to act as another user")
SHOW = "import json, os, sys; print(json.dumps([dict(os.environ), sys.path]))"


def as_other(act: Callable[[], object]) -> None:
    """Does something as another user, which must succeed."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            act()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.fixture
def reachable(tmp_path: Path, hpcstage: Hpcstage) -> None:
    """Lets the other user reach the directories of the test, and makes the local one sticky."""
    for path in (tmp_path, hpcstage.local_dir, hpcstage.cwd):
        for above in (path, *path.parents):
            if above.stat().st_uid == os.geteuid() and above != Path("/"):
                above.chmod(above.stat().st_mode | 0o711)
    hpcstage.local_dir.chmod(0o1777)


KILLS = """
import psutil
run = next(p for p in psutil.Process().parents() if "hpcstage" in p.cmdline())
daemon = next(p for p in run.children() if "hpcstage.daemon" in p.cmdline())
daemon.kill()
"""


def test_nobody_else_reads_what_a_run_leaves(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    """With the umask and the directory of a project."""
    tmp_path.chmod(0o2775)
    index = tmp_path / "state" / "hpcstage" / "runs.jsonl"
    words = ("run", "-q", "--nodes", "2", "--data", make_tree(files=3), "--", sys.executable, "-c", "pass", "secret")
    process = hpcstage.start(*words, umask=0o002)
    assert process.wait(300) == 0
    runs = tmp_path / "hpcstage-runs"
    assert (runs / "..").stat().st_mode & 0o020
    left = [index, *runs.rglob("*")]
    assert len(left) > 5
    open_to_others = [path for path in left if path.lstat().st_mode & 0o077]
    assert not open_to_others


def test_links_in_a_run_directory_are_not_followed(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    run_dir, mine = tmp_path / "runs", tmp_path / "mine"
    mine.write_text("mine")
    (run_dir / "nodes").mkdir(parents=True)
    for path in run_dir, run_dir / "nodes":
        path.chmod(0o777)
    host = socket.gethostname()
    for name in (
        "run.json",
        "run.part.json",
        *(f"nodes/{host}.{end}" for end in ("log", "json", "late.log")),
    ):
        as_other_plants = run_dir / name
        as_other_plants.symlink_to(mine)
        os.lchown(as_other_plants, OTHER, OTHER)
    words = ("run", "--run-dir", run_dir, "--data", make_tree(files=3), "--", sys.executable, "-c", KILLS)
    done = hpcstage(*words)
    assert b"ended early" in done.stderr
    assert (run_dir / "nodes" / f"{host}.log").read_text() != "mine"
    assert mine.read_text() == "mine"


def test_a_run_directory_whose_nodes_are_elsewhere(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    run_dir, elsewhere = tmp_path / "runs", tmp_path / "elsewhere"
    for path in run_dir, elsewhere:
        path.mkdir()
    (run_dir / "nodes").symlink_to(elsewhere)
    done = hpcstage("run", "--run-dir", run_dir, "--data", make_tree(files=3), "--", "true")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(b"\n") == 1
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("planted", ["a directory", "a link to the directory of another run"])
def test_what_another_user_puts_in_the_place_of_an_ended_runs_shim(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, reachable: None, planted: str
) -> None:
    """A job that the command submitted, on another node: it has the variables of the command."""
    done = hpcstage("run", "-q", "--data", make_tree(files=1), "--", sys.executable, "-c", SHOW)
    env, in_run = json.loads(done.stdout)
    node_dir = Path(env["HPCSTAGE_NODE_DIR"])
    assert os.fspath(node_dir / "shim") in in_run
    shutil.rmtree(node_dir.parent)
    taken = hpcstage.local_dir / "taken"

    def plant() -> None:
        shim = node_dir / "shim" if planted == "a directory" else hpcstage.local_dir / "other" / "shim"
        shim.mkdir(parents=True)
        (shim / "sitecustomize.py").write_text(f"open({os.fspath(taken)!r}, 'w').close()\n")
        if planted != "a directory":
            node_dir.parent.mkdir()
            node_dir.symlink_to(shim.parent)

    as_other(plant)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("import sys; sys.mine = True\n")
    env["PYTHONPATH"] += f":{mine}"
    words = [sys.executable, "-c", "import sys; print(sys.mine)"]
    after = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert not taken.exists(), "a program of another user ran as this one"
    assert (after.returncode, after.stdout, after.stderr) == (0, "True\n", "")
    for path in node_dir.parent, hpcstage.local_dir / "other":
        shutil.rmtree(path, ignore_errors=True)
