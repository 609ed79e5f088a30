"""What the command's environment holds, and what of it reaches a container that is started with a clean one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage

from hpcstage.config import load
from hpcstage.node import childenv, shimdir

SHIM = Path("/local/hpcstage-1/run/shim")
ON_PATH = f"{shimdir.ENTRY}:{shimdir.ENTRY}{SHIM}"


def for_command(env: dict[str, str]) -> dict[str, str]:
    node = SHIM.parent
    return childenv.for_command(
        env, shim_dir=SHIM, node_dir=node, run_dir=Path("/runs/1"), run_id="run", sock=node / "sock"
    )


def path_with(directory: Path, *commands: str) -> str:
    for command in commands:
        (directory / command).write_text("#!/bin/sh\n")
        (directory / command).chmod(0o755)
    return os.fspath(directory)


def test_the_callers_variables_stay():
    assert for_command({"PATH": "/nowhere", "HOME": "/home/me"})["HOME"] == "/home/me"
    assert for_command({"PATH": "/nowhere", "PYTHONPATH": "/mine"})["PYTHONPATH"] == f"{ON_PATH}:/mine"
    assert for_command({"PATH": "/nowhere"})["PYTHONPATH"] == ON_PATH


def test_a_directory_of_the_user_whose_name_ends_as_the_shims_stays():
    env = {"PYTHONPATH": "/mine/shim:/mine/:/other"}
    assert childenv.without_run(env) == env
    told = {"HPCSTAGE_NODE_DIR": "/local/1", "PYTHONPATH": f"/entry:/entry/local/1/shim:{env['PYTHONPATH']}"}
    assert childenv.without_run(told)["PYTHONPATH"] == env["PYTHONPATH"]


def test_the_users_settings_stay_the_users(tmp_path):
    for name in ("LOCAL_DIR", "BUDGET", "RUN_DIR"):
        assert for_command({"PATH": "/nowhere", f"HPCSTAGE_{name}": "/scratch"})[f"HPCSTAGE_{name}"] == "/scratch"
    told = for_command({"PATH": "/nowhere"})
    assert told["HPCSTAGE_STORE"] == os.fspath(SHIM.parent / "store")
    assert told["HPCSTAGE_RESULTS"] == "/runs/1"
    config = load({}, told, tmp_path)
    assert not [where for where in config.origin.values() if where.startswith("environment")]
    assert not config.warnings


@pytest.mark.parametrize(
    ("commands", "prefix"),
    [
        (("apptainer",), "APPTAINERENV_"),
        (("apptainer", "singularity"), "APPTAINERENV_"),
        (("singularity",), "SINGULARITYENV_"),
    ],
)
def test_our_variables_reach_a_container(tmp_path, commands, prefix):
    made = for_command({"PATH": path_with(tmp_path, *commands)})
    ours = {name for name in made if name.startswith("HPCSTAGE_")}
    assert ours
    assert {name: made[prefix + name] for name in ours} == {name: made[name] for name in ours}
    assert not [name for other in childenv.CONTAINERS.values() if other != prefix for name in made if other in name]
    assert prefix + "PYTHONPATH" not in made, "it would replace the image's own"


def test_without_a_container_runtime_there_is_nothing_for_one(tmp_path):
    made = for_command({"PATH": path_with(tmp_path)})
    assert not [name for name in made if name.startswith(tuple(childenv.CONTAINERS.values()))]


@pytest.mark.parametrize("prefix", ["APPTAINERENV_", "SINGULARITYENV_"])
@pytest.mark.parametrize("mine", ["", "/opt/lib"])
def test_a_pythonpath_that_the_user_gives_a_container_is_completed(prefix, mine):
    made = for_command({"PATH": "/nowhere", f"{prefix}PYTHONPATH": mine})
    assert made[f"{prefix}PYTHONPATH"] == (f"{ON_PATH}:{mine}" if mine else ON_PATH)


CLEAN = """#!/bin/sh
# A clean environment but for what is named for it, as `apptainer exec --cleanenv` makes it.
kept=$(env | sed -n 's/^APPTAINERENV_\\([A-Z_]*\\)=.*/\\1/p')
for name in $kept; do
    eval "value=\\$APPTAINERENV_$name"
    set -- "$name=$value" "$@"
done
exec env -i "$@"
"""
READ = "import sys, _hpcstage_attach; print(_hpcstage_attach.layer != 'none', len(open(sys.argv[1]).read()))"
INSIDE = 'PYTHONPATH=$HPCSTAGE_NODE_DIR/shim${PYTHONPATH:+:$PYTHONPATH} exec "$@"'


@pytest.mark.parametrize("way", ["the page's command", "a variable of the user's"])
def test_a_command_in_a_clean_environment_is_served(
    hpcstage: Hpcstage, make_tree: Callable[..., Path], tmp_path: Path, way: str
) -> None:
    (tmp_path / "apptainer").write_text(CLEAN)
    (tmp_path / "apptainer").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = [sys.executable, "-c", READ, os.fspath(make_tree() / "class0" / "file00000.bin")]
    if way == "the page's command":
        words = ["sh", "-c", INSIDE, "sh", *words]
    else:
        env["APPTAINERENV_PYTHONPATH"] = ""
    options = ("--mode", "upfront", "--data", make_tree())
    done = hpcstage("run", *options, "--", "apptainer", *words, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout == b"True 10000\n"


def test_a_run_inside_a_run_has_a_directory_of_its_own(hpcstage: Hpcstage, make_tree: Callable[..., Path]) -> None:
    data = os.fspath(make_tree(files=3))
    inner = [sys.executable, "-m", "hpcstage", "run", "-q", "--data", data, "--", sys.executable, "-c", "pass"]
    again = ["env", "-u", "HPCSTAGE_ACTIVE", *inner]  # else it only executes its command
    done = hpcstage("run", "-q", "--data", data, "--", *again)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(hpcstage.records()) == 2
