"""`hpcstage install-hook`: Pythons whose PYTHONPATH a script sets anew are served, and nothing else is touched."""

from __future__ import annotations

import os
import subprocess
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage

Tree = Callable[..., Path]
LAYER = "import sys; a = sys.modules.get('_hpcstage_attach'); print(a.layer if a else None, end=' ')"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of its own."""
    path = tmp_path_factory.mktemp("hook") / "venv"
    venv.create(path, symlinks=True)
    return path


@pytest.fixture
def python(hpcstage: Hpcstage, environment: Path) -> Path:
    """Its Python, with the hook."""
    python = environment / "bin/python"
    assert hpcstage("install-hook", "--python", python).returncode == 0
    return python


def site_files(environment: Path) -> list[str]:
    return sorted(path.name for path in environment.glob("lib/python*/site-packages/*hpcstage*"))


SCRIPTS = {
    "replaced": 'export PYTHONPATH=/my/code; exec "$@"',
    "unset": 'unset PYTHONPATH; exec "$@"',
    "isolated": 'python=$1; shift; exec "$python" -I "$@"',
    "as it should be": 'export PYTHONPATH=/my/code:$PYTHONPATH; exec "$@"',
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_that_sets_pythonpath(hpcstage: Hpcstage, make_tree: Tree, python: Path, script: str) -> None:
    data = make_tree(files=1)
    code = LAYER + "; print(len(open(sys.argv[1]).read()), [p for p in sys.path if 'my' in p])"
    words = ["sh", "-c", SCRIPTS[script], "sh", python, "-c", code, data / "class0/file00000.bin"]
    done = hpcstage("run", "--mode", "upfront", "--data", data, "--", *words)
    assert done.returncode == 0, done.stderr
    own = ["/my/code"] if "code" in SCRIPTS[script] else []
    assert done.stdout.decode() in (f"native 10000 {own}\n", f"python 10000 {own}\n")


def test_without_the_hook_it_is_not_served(hpcstage: Hpcstage, make_tree: Tree, environment: Path) -> None:
    python = environment / "bin/python"
    hpcstage("install-hook", "--remove", "--python", python)
    words = ["sh", "-c", SCRIPTS["replaced"], "sh", python, "-c", LAYER]
    assert hpcstage("run", "--data", make_tree(files=1), "--", *words).stdout == b"None "


def test_removed_without_a_trace(hpcstage: Hpcstage, python: Path, environment: Path) -> None:
    assert "hpcstage-hook.pth" in site_files(environment)
    subprocess.run([python, "-c", "import _hpcstage_hook"], check=True)
    assert hpcstage("install-hook", "--python", python).returncode == 0, "again"
    assert hpcstage("install-hook", "--remove", "--python", python).returncode == 0
    assert site_files(environment) == []
    assert not list(environment.glob("lib/python*/site-packages/__pycache__/*hpcstage*"))
    assert hpcstage("install-hook", "--remove", "--python", python).returncode == 0, "nothing to remove"


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o770, None])
def test_no_directory_of_others_is_believed(tmp_path: Path, python: Path, mode: int | None) -> None:
    node = tmp_path / "node"
    (node / "shim").mkdir(parents=True)
    (node / "shim/sitecustomize.py").write_text("import sys; sys.taken = True\n")
    for directory in (node, node / "shim"):
        directory.chmod(mode or 0o700)
    named = tmp_path / "link"
    named.symlink_to(node)
    code = "import sys; print(hasattr(sys, 'taken'))"
    env = {"HPCSTAGE_NODE_DIR": os.fspath(named if mode is None else node)}
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, check=True)
    assert done.stdout == (b"True\n" if mode == 0o700 else b"False\n")
    assert done.stderr == b""


@pytest.mark.parametrize("node_dir", [None, "", "relative", "/nonexistent", "/etc/passwd", "/" + "x" * 5000])
def test_elsewhere_nothing_happens(python: Path, environment: Path, node_dir: str | None) -> None:
    code = "import sys; print('_hpcstage_hook' in sys.modules, sys.path)"
    env = {} if node_dir is None else {"HPCSTAGE_NODE_DIR": node_dir}
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, check=True, text=True)
    assert done.stderr == ""
    assert "shim" not in done.stdout
    if not node_dir:
        assert done.stdout.startswith("False")


def test_a_module_that_was_removed_by_hand(python: Path, environment: Path) -> None:
    next(environment.glob("lib/python*/site-packages/_hpcstage_hook.py")).unlink()
    done = subprocess.run([python, "-c", "pass"], env={"HPCSTAGE_NODE_DIR": "/x"}, capture_output=True, check=True)
    assert done.stderr == b""


def test_what_cannot_be_done_is_said_in_a_line(hpcstage: Hpcstage) -> None:
    done = hpcstage("install-hook", "--python", "/nonexistent/python")
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1
    assert b"/nonexistent/python" in done.stderr
