"""What another user of the machine can and cannot do to a run; the other user is made by setuid in a child."""

from __future__ import annotations

import json
import os
import shutil
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
