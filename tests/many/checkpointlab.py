"""Programs on virtual nodes that save checkpoints, and what they leave where, for tests of several nodes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import conftest
import manylab
import pytest
from conftest import Hpcstage, python_command, wait_for

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

MARKS = [manylab.needs_mpi]
"""What holds for all tests of a module."""

NODES = """
import os, sys, time
checkpoint, count = sys.argv[1], int(sys.argv[2])
places = [checkpoint.replace(".v0.", f".v{node}.") for node in range(count)]
def found(place):
    below = [os.path.join(d, f) for d, _, files in os.walk(place) for f in files]
    return sorted(os.path.relpath(path, place) for path in below)
for place in places:
    print(*found(place))
def save(step):
    for node, place in enumerate(places):  # each rank its part, below one name
        if os.path.isdir(place):
            os.mkdir(f"{place}/.shards")
            with open(f"{place}/.shards/rank{node}", "wb") as file:
                file.write(b"%d on %d" % (step, node) * 20_000)
            os.rename(f"{place}/.shards", f"{place}/shards{step}")
    with open(f"{places[0]}/.model", "wb") as file:  # rank 0 all of it
        file.write(b"%d" % step * 100_000)
    os.rename(f"{places[0]}/.model", f"{places[0]}/model{step}")
def wait(name):
    open(f"{os.environ['FLAG']}.{name}.up", "w").close()
    end = time.monotonic() + 90
    while not os.path.exists(f"{os.environ['FLAG']}.{name}") and time.monotonic() < end:
        time.sleep(0.01)
"""
"""A program on virtual nodes, whose directories have the same path but for the number of the node."""


def files_of(step: int, nodes: int) -> list[str]:
    return sorted([f"model{step}", *(f"shards{step}/rank{node}" for node in range(nodes))])


def program(text: str, nodes: int) -> list[str]:
    return list(python_command(NODES + text, "{checkpoint}", str(nodes)))


def run(hpcstage: Hpcstage, nodes: int, text: str = "", *options: str) -> subprocess.CompletedProcess[bytes]:
    return hpcstage("run", "--nodes", str(nodes), "--checkpoint", "ckpt", *options, "--", *program(text, nodes))


def shown(done: subprocess.CompletedProcess[bytes]) -> list[list[str]]:
    """What each node found at its start."""
    return [line.split() for line in done.stdout.decode().splitlines()]


def in_dir(hpcstage: Hpcstage) -> list[str]:
    target = hpcstage.cwd / "ckpt"
    found = (os.path.relpath(os.path.join(d, f), target) for d, _, files in os.walk(target) for f in files)
    return sorted(path for path in found if not path.startswith(".hpcstage-"))


def places(local_dir: Path, node: int | None = None) -> list[Path]:
    return sorted(local_dir.glob(f"hpcstage-out-*/*.v{'*' if node is None else node}.checkpoint"))


def known(local_dir: Path, node: int) -> list[dict[str, Any]]:
    """The protected generations of a node, as it knows them; older ones may go at any moment."""
    found = []
    for place in places(local_dir, node):
        for path in (place / "out" / "shares").glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                found.append(json.loads(path.read_text()))
    return [one for one in found if one["size"]]


def own(generation: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The entries that a generation has itself, with the marks of their parts by node."""
    return {name: one["marks"] for name, one in generation["entries"].items() if one["number"] == generation["number"]}


def protected(local_dir: Path, nodes: int) -> list[int]:
    """The generations with all of step 1 that are protected, as all nodes know."""
    of_nodes = [known(local_dir, node) for node in range(nodes)]
    found = [{one["number"] for one in of_node if _parts(one) == nodes + 1} for of_node in of_nodes]
    return sorted(set.intersection(*found))


def has_protected(local_dir: Path, nodes: int, name: str) -> bool:
    """Whether all nodes know of a protected generation in which each has a part of an entry."""
    return all(
        any(own(one).get(name, {}).keys() == {*one["nodes"]} for one in known(local_dir, node)) for node in range(nodes)
    )


def _parts(generation: dict[str, Any]) -> int:
    """How many parts of step 1 it has; others may be there since the start."""
    return sum(len(own(generation).get(name, ())) for name in ("model1", "shards1"))


def part_of(hpcstage: Hpcstage) -> dict[str, Any]:
    return dict(manylab.record_of(hpcstage)["checkpoints"])


def drain_of(hpcstage: Hpcstage) -> dict[str, Any]:
    return dict(manylab.record_of(hpcstage)["drains"]["checkpoint"])


def kill_all(wrapper: subprocess.Popen[bytes]) -> None:
    conftest.kill_all(wrapper)
    wrapper.communicate()


def killed(hpcstage: Hpcstage, local_dir: Path, nodes: int, *options: str, text: str = "") -> None:
    """A run that saved step 1, and of which everything was killed when it was protected; nothing of it is in DIR. What
    `text` does comes first."""
    flag = hpcstage.cwd / "flag"
    words = ("run", "--nodes", str(nodes), "--checkpoint", "ckpt", "--drain-every", "1000", *options)
    program_text = f"{text}\nsave(1)\nwait('saved')"
    wrapper = hpcstage.start(*words, "--", *program(program_text, nodes), env={"FLAG": os.fspath(flag)})
    wait_for((hpcstage.cwd / "flag.saved.up").exists, 120, "the command")
    wait_for(lambda: bool(protected(local_dir, nodes)), 120, "the protection")
    kill_all(wrapper)
    assert not [name for name in in_dir(hpcstage) if name.startswith(("model1", "shards1"))]


def lose(local_dir: Path, *nodes: int) -> None:
    for node in nodes:
        for place in places(local_dir, node):
            shutil.rmtree(place)
