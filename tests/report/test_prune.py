"""`hpcstage prune`: old runs go, and nothing else does, whenever it is killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import manyruns
import pytest
from conftest import Hpcstage, kill_all, wait_for

from hpcstage.record import index

Tree = Callable[..., Path]
COUNT = 200
AGO = "30d"


def prune(hpcstage: Hpcstage, *words: str, code: int = 0) -> list[str]:
    done = hpcstage("prune", *words)
    assert (done.returncode, done.stderr) == (code, b"")
    return done.stdout.decode().splitlines()


def directories(hpcstage: Hpcstage) -> list[str]:
    return sorted(path.name for path in (hpcstage.cwd / "hpcstage-runs").iterdir())


def indexed(hpcstage: Hpcstage) -> list[str]:
    return [line.run_id for line in index.newest(hpcstage.env)]


@pytest.fixture
def old(hpcstage: Hpcstage) -> Hpcstage:
    """Some runs of 2026-05-28, ended and killed."""
    hpcstage.env |= manyruns.make(hpcstage.cwd, COUNT)
    return hpcstage


@pytest.fixture
def one(hpcstage: Hpcstage, make_tree: Tree) -> Path:
    """The directory of a real run that ended long ago."""
    assert hpcstage("run", "-q", "--data", make_tree(files=2), "--", "true").returncode == 0
    (path,) = (hpcstage.cwd / "hpcstage-runs").iterdir()
    manyruns.grow_old(path)
    return path


def test_without_an_age_it_says_what_to_give(old: Hpcstage) -> None:
    done = old("prune")
    assert (done.returncode, done.stdout) == (2, b"")
    said = "hpcstage: `hpcstage prune` needs --older AGE (for example hpcstage prune --older 30d --dry-run)\n"
    assert done.stderr.decode() == said
    assert len(directories(old)) == COUNT


def test_old_runs_go_with_their_lines(old: Hpcstage) -> None:
    before = directories(old)
    size = sum(path.stat().st_size for path in (old.cwd / "hpcstage-runs").rglob("*") if path.is_file())
    *would, said = prune(old, "--older", AGO, "--dry-run")
    assert len(would) == COUNT == len(directories(old)) == len(indexed(old))
    assert said == f"would remove 200 runs, {size / 1e6:.3g} MB"
    assert prune(old, "--older", "10000d") == ["removed 0 runs, 0 B"]
    assert directories(old) == before
    assert prune(old, "--older", AGO) == [said.removeprefix("would ").replace("remove", "removed")]
    assert directories(old) == indexed(old) == []
    assert prune(old, "--older", AGO) == ["removed 0 runs, 0 B"]


def test_without_the_index(old: Hpcstage) -> None:
    shutil.rmtree(old.cwd / "state")
    assert prune(old, "--older", AGO)[-1].startswith("removed 200 runs, ")
    assert directories(old) == []


def test_whoever_is_killed_is_followed_by_one_who_goes_on(old: Hpcstage) -> None:
    for left in (180, 120, 60, 10):
        process = old.start("prune", "--older", AGO)
        wait_for(lambda left=left: len(directories(old)) <= left)  # type: ignore[misc]
        process.kill()
        process.wait()
        assert old("list", "--all").returncode == 0
    prune(old, "--older", AGO)
    assert directories(old) == indexed(old) == []


def test_a_run_that_goes_on_stays(hpcstage: Hpcstage, make_tree: Tree) -> None:
    with manyruns.going(hpcstage, "--data", make_tree(files=3)):
        (path,) = (hpcstage.cwd / "hpcstage-runs").iterdir()
        line = json.loads(index.path_of(hpcstage.env).read_bytes())
        manyruns.grow_old(path)
        index.path_of(hpcstage.env).write_text(json.dumps(line) + "\n")
        assert prune(hpcstage, "--older", "0s")[-1] == "removed 0 runs, 0 B"
        assert (path / "run.part.json").exists()
    assert prune(hpcstage, "--older", "1h") == ["removed 0 runs, 0 B"], "it ended a moment ago"
    assert prune(hpcstage, "--older", "0s")[-1].startswith("removed 1 run, ")


def test_a_killed_run_goes(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    with manyruns.going(hpcstage, "--data", make_tree(files=3)) as process:
        kill_all(process)
    hpcstage("clean")
    assert prune(hpcstage, "--older", "0s")[-1].startswith("removed 1 run, ")
    assert directories(hpcstage) == []


def test_a_killed_run_with_output_files_stays(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    """They may be on its node, and its report says on which."""
    with manyruns.going(hpcstage, "--data", make_tree(files=3), "--out", "out") as process:
        kill_all(process)
    hpcstage("clean", "--drain")
    assert "files of its --out or --checkpoint may be on its nodes" in prune(hpcstage, "--older", "0s")[0]


def test_of_several_nodes(hpcstage: Hpcstage, make_tree: Tree) -> None:
    with manyruns.going(hpcstage, "--nodes", "2", "--data", make_tree(files=3)):
        pass
    assert prune(hpcstage, "--older", "0s")[-1].startswith("removed 1 run, ")
    assert directories(hpcstage) == []


@pytest.mark.parametrize("name", ["weights.pt", "nodes/mine.txt", "group/notes", ".run.txt"])
def test_what_is_not_of_hpcstage_stays_with_all_that_lies_beside(hpcstage: Hpcstage, one: Path, name: str) -> None:
    (one / name).parent.mkdir(exist_ok=True)
    (one / name).write_text("mine")
    before = sorted(one.rglob("*"))
    left, said = prune(hpcstage, "--older", "0s")
    assert left.startswith(f"left {one}: it holds what hpcstage did not write: ")
    assert said == "removed 0 runs, 0 B"
    assert sorted(one.rglob("*")) == before


def test_no_link_is_followed(hpcstage: Hpcstage, one: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "run.json").write_bytes((one / "run.json").read_bytes())
    (mine / "node.json").write_text("mine")
    shutil.rmtree(one / "nodes")
    (one / "nodes").symlink_to(mine)
    moved = one.rename(tmp_path / "elsewhere")
    one.symlink_to(moved)
    left, said = prune(hpcstage, "--older", "0s")
    assert "is a link" in left
    assert said == "removed 0 runs, 0 B"
    one.unlink()
    moved.rename(one)
    assert prune(hpcstage, "--older", "0s")[-1].startswith("removed 1 run, ")
    assert sorted(os.listdir(mine)) == ["node.json", "run.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_what_is_another_users_stays(hpcstage: Hpcstage, one: Path) -> None:
    os.chown(one, 12345, 12345)
    left = prune(hpcstage, "--older", "0s")[0]
    assert left == f"left {one}: it is another user's"
    assert (one / "run.json").exists()


def test_a_run_whose_files_are_not_copied_stays(hpcstage: Hpcstage, one: Path) -> None:
    record = json.loads((one / "run.json").read_bytes())
    record["drains"] = {"out": {"directory": "/out", "local_dir": "/local", "undrained": {"": 2}}}
    (one / "run.json").write_text(json.dumps(record))
    assert "were not copied to their directory" in prune(hpcstage, "--older", "0s")[0]
    assert (one / "nodes").exists()


def test_lines_of_directories_that_are_gone_go_unless_the_file_system_may_be_gone(
    hpcstage: Hpcstage, one: Path, tmp_path: Path
) -> None:
    kept = one.parent.rename(tmp_path / "unmounted")
    prune(hpcstage, "--older", "0s")
    assert len(indexed(hpcstage)) == 1
    kept.rename(one.parent)
    shutil.rmtree(one)
    prune(hpcstage, "--older", "0s")
    assert indexed(hpcstage) == []


@pytest.mark.parametrize("words", [(), ("--older", "soon"), ("--older", "-3d"), ("--older", "30d", "run")])
def test_bad_input(hpcstage: Hpcstage, one: Path, words: tuple[str, ...]) -> None:
    done = hpcstage("prune", *words)
    assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1)
    assert one.exists()
