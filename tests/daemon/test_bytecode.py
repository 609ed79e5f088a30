"""The shim's bytecode: made where it is missing, taken by interpreters, kept in the package where that is permitted."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_process import start_daemon, wait_until  # noqa: F401

from hpcstage.daemon.process import bytecode
from hpcstage.node import shimdir

FILL = """
import sys
from pathlib import Path
from hpcstage.daemon.process import bytecode
shim, package = Path(sys.argv[1]), Path(sys.argv[2])
names = bytecode.missing(shim)
bytecode.fill(shim, names, sorted(package.glob("*.py")))
print(len(names), len(bytecode.missing(shim)))
"""


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    """The shim in a node directory and in a package, without bytecode."""
    made = tmp_path / "node", tmp_path / "package"
    for place in made:
        place.mkdir()
        for source in shimdir.modules():
            shutil.copy2(source, place / source.name)
    return made


def fill(places: tuple[Path, Path], *options: str) -> list[int]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")}
    command = [sys.executable, *options, "-c", FILL, *map(os.fspath, places)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60)
    return [int(word) for word in done.stdout.split()]


def taken(shim: Path, module: str) -> bool:
    """Whether an interpreter takes the bytecode of a module, by what it says itself."""
    env = {**os.environ, "PYTHONPATH": os.fspath(shim), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, "-S", "-v", "-c", f"import {module}"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False, timeout=60)
    return f"matches {shim / module}.py" in done.stderr


def test_it_is_made_once_and_taken(places):
    node, package = places
    files = len(list(node.glob("*.py")))
    assert fill(places) == [files, 0]
    assert taken(node, "_hpcstage_wire")
    assert taken(package, "_hpcstage_wire")
    assert len(list((package / "__pycache__").iterdir())) == files
    before = {path.name: path.stat().st_mtime_ns for path in (package / "__pycache__").iterdir()}
    shutil.rmtree(node / "__pycache__")
    assert fill(places) == [files, 0]
    assert {path.name: path.stat().st_mtime_ns for path in (package / "__pycache__").iterdir()} == before, "copied"
    assert fill(places) == [0, 0]


def test_a_changed_source_is_compiled_again(places):
    node, package = places
    fill(places)
    for place in places:
        with (place / "_hpcstage_wire.py").open("a") as file:
            file.write("CHANGED = 1\n")
    shutil.copystat(package / "_hpcstage_wire.py", node / "_hpcstage_wire.py")
    assert not taken(node, "_hpcstage_wire")
    assert fill(places) == [1, 0]
    assert taken(node, "_hpcstage_wire")


def test_a_package_that_may_not_be_written_stays_as_it_is(places):
    node, package = places
    files = len(list(node.glob("*.py")))
    assert fill(places, "-B") == [files, 0]
    assert taken(node, "_hpcstage_wire")
    assert not (package / "__pycache__").exists()
    shutil.rmtree(node / "__pycache__")
    (package / "__pycache__").write_text("a file in its place")
    assert fill(places) == [files, 0]
    assert taken(node, "_hpcstage_wire")


def test_a_source_that_cannot_be_compiled_hinders_no_other(places):
    node, _package = places
    for place in places:
        (place / "_hpcstage_wire.py").write_text("this is no Python\n")
    assert fill(places)[1] == 1
    assert taken(node, "_hpcstage_attach")


def test_a_prefix_of_the_users_is_left_to_python(places, tmp_path):
    assert fill(places, "-X", f"pycache_prefix={tmp_path / 'prefix'}") == [0, 0]


def test_the_daemon_makes_it(start_daemon, make_tree, local_dir):
    node_dir = local_dir / "node"
    shim = node_dir / "shim"
    shim.mkdir(parents=True)
    for source in shimdir.modules():
        shutil.copy2(source, shim / source.name)
    daemon = start_daemon(make_tree(), node_dir=node_dir).attach()
    wait_until(lambda: not bytecode.missing(shim))
    daemon.staged()
    daemon.end()
