"""Bad input: one line that names it, where it came from, and the fix; exit code 2; the command never starts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage

from hpcstage.config.model import GROUPS, SETTINGS

Tree = Callable[..., Path]


def refused(hpcstage: Hpcstage, *arguments: str | Path, code: int = 2) -> str:
    done = hpcstage("run", *arguments, "--", "echo", "started")
    assert done.returncode == code, done.stderr
    assert done.stdout == b""
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("group", [[], ["config"]])
def test_a_command_that_only_has_commands_prints_its_help(hpcstage: Hpcstage, group: list[str]) -> None:
    alone, asked = hpcstage(*group), hpcstage(*group, "--help")
    assert alone.returncode == asked.returncode == 0
    assert alone.stdout == asked.stdout
    assert alone.stdout.startswith(b"Usage: ")
    assert alone.stderr == b""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "--data"),
        (["--data", "nowhere"], "nowhere"),
        (["--data", "@nowhere.txt"], "nowhere.txt"),
        (["--data", "@."], "."),
        (["--budget", "lots", "--data", "."], "budget"),
    ],
)
def test_options_that_name_nothing(hpcstage: Hpcstage, options: list[str], said: str) -> None:
    assert said in refused(hpcstage, *options)


def test_an_unknown_key_with_its_line_and_the_nearest_name(hpcstage: Hpcstage, make_tree: Tree) -> None:
    (hpcstage.cwd / "hpcstage.yaml").write_text("schema: 1\nmode: runtime\nnode: 3\n")
    line = refused(hpcstage, "--data", make_tree())
    assert "hpcstage.yaml:3" in line
    assert "nodes" in line


@pytest.mark.parametrize("bad", ["/proc/x", "/etc/passwd", "list.txt/below"])
def test_a_run_directory_that_cannot_be_made(hpcstage: Hpcstage, make_tree: Tree, bad: str) -> None:
    (hpcstage.cwd / "list.txt").touch()
    assert f"--run-dir {bad} cannot be made" in refused(hpcstage, "--run-dir", bad, "--data", make_tree())


# ---- what --data and --order name: `run` and `plan` say the same, before anything is made


def both_refuse(hpcstage: Hpcstage, *arguments: str | Path) -> str:
    """The line that `run`, `run --strict` and `plan` end with."""
    line = refused(hpcstage, *arguments)
    assert refused(hpcstage, "--strict", *arguments) == line
    planned = hpcstage("plan", *arguments)
    assert (planned.returncode, planned.stdout) == (2, b"")
    assert planned.stderr.decode().splitlines() == [line]
    assert not (hpcstage.cwd / "hpcstage-runs").exists()
    return line


def listed(hpcstage: Hpcstage, *lines: str | Path) -> str:
    (hpcstage.cwd / "list.txt").write_text("".join(f"{line}\n" for line in lines))
    return "@list.txt"


def test_what_names_no_file(hpcstage: Hpcstage, make_tree: Tree) -> None:
    root = make_tree()
    assert "randm" in both_refuse(hpcstage, "--data", root, "--order", "randm")
    assert "*.xyz matches no file" in both_refuse(hpcstage, "--data", root / "*.xyz")
    line = both_refuse(
        hpcstage, "--data", listed(hpcstage, "# mine", root / "class1/file00001.bin", root / "class0/file00000.bin 0")
    )
    assert "@list.txt, line 3" in line


def refused_by_the_scan(hpcstage: Hpcstage, *arguments: str | Path) -> str:
    """With --strict, besides what is said of the local directory."""
    done = hpcstage("run", "--strict", *arguments, "--", "echo", "started")
    assert (done.returncode, done.stdout) == (125, b"")
    (line,) = [line for line in done.stderr.decode().splitlines() if "/dev/shm" not in line]
    return line


@pytest.mark.parametrize("order", [False, True])
def test_missing_entries_are_counted_and_named_and_the_rest_is_staged(
    hpcstage: Hpcstage, make_tree: Tree, order: bool
) -> None:
    root = make_tree(files=5)
    there = sorted(root.rglob("*.bin"))
    missing = ["/nowhere/at/all", root / "nowhere" / "x", root / "class0" / "y", "$HOME/z"]
    given = listed(hpcstage, missing[0], *there[:2], *missing[1:], *there[2:])
    asked = ["--data", root, "--order", "list.txt"] if order else ["--data", given]
    named = "list.txt of --order" if order else given
    text = f"4 of 9 entries of the list {named} name no file that can be staged: /nowhere/at/all"
    done = hpcstage("run", "--mode", "upfront", *asked, "--", "echo", "started")
    assert (done.returncode, done.stdout) == (0, b"started\n")
    assert text in done.stderr.decode()
    record = json.loads(hpcstage.records()[-1].read_text())
    assert sum(dataset["staged_files"] for dataset in record["datasets"]) == 5
    (note,) = [note for note in record["notes"] if note["id"] == "list-missing"]
    assert note["text"].startswith(text)
    assert note["text"].count("/x") == note["text"].count("/y") == 1, "the first three"
    assert "/z" not in note["text"]
    assert "4 of 9 entries" in hpcstage("report").stdout.decode()
    assert text in hpcstage("plan", *asked).stdout.decode()
    for mode in ("runtime", "upfront"):
        assert text in refused_by_the_scan(hpcstage, "--mode", mode, *asked)


def test_strict_lets_good_datasets_pass(hpcstage: Hpcstage, make_tree: Tree) -> None:
    for mode in ("runtime", "upfront", "direct"):
        done = hpcstage("run", "--strict", "--mode", mode, "--data", make_tree(), "--", "echo", "started")
        assert (done.returncode, done.stdout) == (0, b"started\n"), done.stderr


def test_strict_with_a_directory_that_only_the_scan_finds_empty(hpcstage: Hpcstage) -> None:
    for number in range(3000):
        (hpcstage.cwd / "many" / str(number)).mkdir(parents=True)
    assert hpcstage("run", "--mode", "upfront", "--data", "many", "--", "true").returncode == 0
    assert "no-file" in {note["id"] for note in json.loads(hpcstage.records()[-1].read_text())["notes"]}
    assert "hold no file" in refused_by_the_scan(hpcstage, "--data", "many")


def test_the_help_of_run_explains_what_is_common_and_names_the_rest(hpcstage: Hpcstage) -> None:
    brief, whole = (hpcstage("run", flag).stdout.decode() for flag in ("--help", "--help-all"))
    assert brief.startswith("Usage: hpcstage run [OPTIONS] -- COMMAND")
    assert brief.index("Common options:") < brief.index("--data PATH") < brief.index("Several nodes:\n  --nodes")
    for setting in SETTINGS:
        assert setting.flag in brief
        assert (setting.env in brief) is setting.is_common, setting.key
        assert len(re.findall(rf"\[{setting.env}[;\]]", whole)) == 1, setting.key
    assert {setting.group for setting in SETTINGS} == set(GROUPS)
