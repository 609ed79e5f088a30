"""Bad input: one line that names it, where it came from, and the fix; exit code 2; the command never starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage

Tree = Callable[..., Path]


def refused(hpcstage: Hpcstage, *arguments: str | Path, code: int = 2) -> str:
    done = hpcstage("run", *arguments, "--", "echo", "started")
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_an_unknown_option(hpcstage: Hpcstage, make_tree: Tree) -> None:
    assert "--bogus" in refused(hpcstage, "--bogus", "--data", make_tree())


@pytest.mark.parametrize("group", [[], ["config"]])
def test_a_command_that_only_has_commands_prints_its_help(hpcstage: Hpcstage, group: list[str]) -> None:
    alone, asked = hpcstage(*group), hpcstage(*group, "--help")
    assert alone.returncode == asked.returncode == 0
    assert alone.stdout == asked.stdout
    assert alone.stdout.startswith(b"Usage: ")
    assert alone.stderr == b""


def test_there_is_one_degree_of_saying_more(hpcstage: Hpcstage, make_tree: Tree) -> None:
    assert b"twice" not in hpcstage("run", "--help").stdout
    told = [hpcstage("run", *more, "--data", make_tree(), "--", "true").stderr for more in ([], ["-v"], ["-vv"])]
    assert b"staging below" not in told[0]
    assert b"staging below" in told[1]
    assert b"staging below" in told[2]


def test_no_dataset(hpcstage: Hpcstage) -> None:
    assert "--data" in refused(hpcstage)


def test_a_missing_dataset(hpcstage: Hpcstage, tmp_path: Path) -> None:
    assert "nowhere" in refused(hpcstage, "--data", tmp_path / "nowhere")


def test_a_missing_list(hpcstage: Hpcstage) -> None:
    assert "nowhere.txt" in refused(hpcstage, "--data", "@nowhere.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_an_unreadable_list(hpcstage: Hpcstage, tmp_path: Path) -> None:
    listing = tmp_path / "list.txt"
    listing.write_text("x")
    listing.chmod(0)
    assert "list.txt" in refused(hpcstage, "--data", f"@{listing}")


def test_a_directory_as_list(hpcstage: Hpcstage, tmp_path: Path) -> None:
    assert tmp_path.name in refused(hpcstage, "--data", f"@{tmp_path}")


@pytest.mark.parametrize("text", ["-5GB", "lots", "", "0"])
def test_a_bad_budget(hpcstage: Hpcstage, make_tree: Tree, text: str) -> None:
    assert "budget" in refused(hpcstage, "--budget", text, "--data", make_tree())


def test_an_unknown_key_with_its_line_and_the_nearest_name(hpcstage: Hpcstage, make_tree: Tree) -> None:
    (hpcstage.cwd / "hpcstage.yaml").write_text("schema: 1\nmode: runtime\ncopier: 3\n")
    line = refused(hpcstage, "--data", make_tree())
    assert "hpcstage.yaml:3" in line
    assert "copiers" in line


def test_datasets_that_overlap(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree()
    line = refused(hpcstage, "--data", data, "--data", data / "class0")
    assert "class0" in line


def test_a_dataset_that_is_already_local_is_said_and_read_directly(
    hpcstage: Hpcstage, make_tree: Tree, local_dir: Path, tmp_path: Path
) -> None:
    data = make_tree(files=3)
    same_disk = tmp_path / "local"
    same_disk.mkdir()
    done = hpcstage("run", "--local-dir", same_disk, "--data", data, "--", "echo", "started")
    assert done.returncode == 0
    assert done.stdout == b"started\n"
    assert "already" in done.stderr.decode()
    line = refused(hpcstage, "--strict", "--local-dir", same_disk, "--data", data, code=125)
    assert "already" in line
