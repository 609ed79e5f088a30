"""What newcomers mistype: one line says what was wrong, where, and what was probably meant; nothing is said twice."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage
from slowsource import NEEDS, slow_source

from hpcstage.emulator import Settings

Tree = Callable[..., Path]
HOST = os.uname().nodename


def said(hpcstage: Hpcstage, *words: str | Path, code: int, env: dict[str, str] | None = None) -> list[str]:
    done = hpcstage(*words, env=env or {})
    assert done.returncode == code, done.stderr
    return done.stderr.decode().splitlines()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rnu", "--data", "d", "--", "true"], "no such command 'rnu' (did you mean run?)"),
        (["config", "shw"], "no such command 'shw' (did you mean show?)"),
        (["checkpoint", "lss", "x"], "no such command 'lss' (did you mean ls?)"),
        (["true", "x"], "no such command 'true' (did you mean hpcstage run -- true ...?)"),
        (["run", "--dta", "d", "--", "true"], "no such option '--dta' (did you mean --data?)"),
        (["run", "--bogus", "--", "true"], "no such option '--bogus' (hpcstage run --help)"),
        (["plan", "data"], "'data' is no argument of `hpcstage plan` (did you mean --data data?)"),
        (["plan", "nowhere"], "'nowhere' is no argument of `hpcstage plan` (see hpcstage plan --help)"),
        (["report", "a", "b"], "'b' is no argument of `hpcstage report` (see hpcstage report --help)"),
    ],
)
def test_mistyped_words(hpcstage: Hpcstage, words: list[str], line: str) -> None:
    (hpcstage.cwd / "data").mkdir()
    assert said(hpcstage, *words, code=2) == [f"hpcstage: {line}"]


def test_a_command_that_is_like_none(hpcstage: Hpcstage) -> None:
    (line,) = said(hpcstage, "status", code=2)
    assert line.startswith("hpcstage: no such command 'status' (commands: run, plan, doctor, ")


@pytest.mark.parametrize("words", [["--data", "--"], ["--data", ""], ["--data="], ["--data", "--mode"]])
def test_a_variable_that_is_empty(hpcstage: Hpcstage, words: list[str]) -> None:
    (line,) = said(hpcstage, "run", *words, "true", code=2)
    assert line == "hpcstage: --data has no value (is its variable empty? use --data PATH)"


@pytest.mark.parametrize("option", ["--checkpoint", "--out", "--mode", "--config"])
def test_options_do_not_take_the_dashes_for_their_value(hpcstage: Hpcstage, make_tree: Tree, option: str) -> None:
    (line,) = said(hpcstage, "run", "--data", make_tree(), option, "--", "true", code=2)
    assert line.startswith(f"hpcstage: {option} has no value (is its variable empty? use {option} ")
    assert not (hpcstage.cwd / "--").exists()


@pytest.mark.parametrize("key", ["out", "checkpoint"])
def test_the_placeholder_is_no_directory(hpcstage: Hpcstage, make_tree: Tree, key: str) -> None:
    (line,) = said(hpcstage, "run", "--data", make_tree(), f"--{key}", f"{{{key}}}", "--", "true", code=2)
    assert line.startswith(f"hpcstage: --{key} {{{key}}} names what stands for the local directory in the command")


@pytest.mark.parametrize("words", [["data"], ["--data", "data", "more.tar"]])
def test_words_that_belong_to_no_option(hpcstage: Hpcstage, make_tree: Tree, words: list[str]) -> None:
    (hpcstage.cwd / "data").symlink_to(make_tree("there"))
    (line,) = said(hpcstage, "run", *words, "--", "true", code=2)
    assert line.startswith(
        f"hpcstage: '{words[-1]}' in front of `--` belongs to no option (repeat --data for each path"
    )


def test_a_command_with_dashes_of_its_own(hpcstage: Hpcstage, make_tree: Tree) -> None:
    done = hpcstage("run", "--data", make_tree(), "--", "echo", "a", "--", "b")
    assert (done.returncode, done.stdout) == (0, b"a -- b\n")


def test_quotes_around_the_command(hpcstage: Hpcstage, make_tree: Tree) -> None:
    *_, line = said(hpcstage, "run", "--data", make_tree(), "--", "python t.py", code=127)
    assert line.endswith("No such file or directory (leave the quotes around the command out: -- python t.py)")


@pytest.mark.parametrize("key", ["foo", "bucket", "data_dir"])
def test_a_key_that_is_like_none(hpcstage: Hpcstage, make_tree: Tree, key: str) -> None:
    (hpcstage.cwd / "hpcstage.yaml").write_text(f"{key}: 3\n")
    (line,) = said(hpcstage, "run", "--data", make_tree(), "--", "true", code=2)
    assert line == f"hpcstage: ./hpcstage.yaml:1: unknown key '{key}' (`hpcstage config show` lists all keys)"


@pytest.mark.parametrize(("words", "code"), [(["sh", "-c", "exit 3"], 3), (["tar", "cf", "/dev/null", "."], 0)])
def test_a_command_that_is_not_python_is_told_so(
    hpcstage: Hpcstage, make_tree: Tree, words: list[str], code: int
) -> None:
    lines = said(hpcstage, "run", "--data", make_tree(), "--", *words, code=code)
    at_the_start, verdict = (line for line in lines if "Python" in line)
    assert at_the_start.startswith(f"hpcstage: {words[0]} is not Python: ")
    assert verdict.startswith(f"hpcstage: hpcstage cannot serve {words[0]}, ")
    assert not any("error:" in line for line in lines), lines


def test_a_dataset_that_is_local(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    """It is read there, told once, and a reason to refuse with --strict."""
    (tmp_path / "local").mkdir()
    data = make_tree()
    words = ("--local-dir", tmp_path / "local", "--data", data, "--", sys.executable, "-c", "")
    lines = said(hpcstage, "run", *words, code=0)
    (line,) = (line for line in lines if "on the node-local disk" in line)
    assert line.endswith(
        "is already on the node-local disk: staging it saves nothing; leave it out of --data; if that is not the "
        "node's own disk, name the disk with --local-dir"
    )
    run = json.loads(hpcstage.records()[-1].read_text())["run"]
    assert (run["mode"], run["mode_asked"]) == ("direct", "runtime")
    assert "already on the node-local disk" in run["mode_why"]
    lines = said(hpcstage, "run", "-v", *words, code=0)
    assert f"hpcstage: mode direct: the dataset {data} is already on the node-local disk" in lines
    assert not any(line.startswith(("hpcstage: budget ", "hpcstage: order ")) for line in lines), lines
    (line,) = said(hpcstage, "run", "--strict", *words, code=125)
    assert "already" in line


def test_one_dataset_of_several_that_is_local(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    """It is left where it is, and the others are staged."""
    far, near = make_tree(), local_dir / "near"
    near.mkdir()
    (near / "file").write_bytes(b"near")
    code = (
        "import pathlib, sys\n[p.read_bytes() for d in sys.argv[1:] for p in pathlib.Path(d).rglob('*') if p.is_file()]"
    )
    reads = [sys.executable, "-c", code, near, far]
    words = ("--mode", "upfront", "--data", near, "--data", far, "--", *reads)
    lines = said(hpcstage, "run", "-v", *words, code=0)
    assert any(line.startswith(f"hpcstage: datasets: {far} (") for line in lines), lines
    left = f"the dataset {near} is already on the node-local disk, is read there, and is not counted here"
    assert f"hpcstage: left alone: {left}" in lines
    record = json.loads(hpcstage.records()[-1].read_text())
    assert (record["run"]["mode"], record["run"]["mode_why"]) == ("upfront", None)
    assert [(one["root"], one["staged_files"]) for one in record["datasets"]] == [(str(far), 20)]
    assert (record["coverage"]["opens"], record["coverage"]["swapped"]) == (20, 20)
    assert [note["text"] for note in record["notes"] if note["id"] == "already-local"] == [left]
    assert left in " ".join(hpcstage("report").stdout.decode().split())
    said(hpcstage, "run", "--strict", *words, code=0)
    planned = json.loads(hpcstage("plan", "--json", "--data", near, "--data", far).stdout)
    assert ([one["root"] for one in planned["datasets"]], planned["files"]) == ([str(far)], 20)
    assert any(note.startswith(f"the dataset {near} is already on the node-local disk") for note in planned["notes"])


def test_a_local_directory_that_is_missing(hpcstage: Hpcstage, make_tree: Tree) -> None:
    env = {"HPCSTAGE_LOCAL_DIR": "auto", "TMPDIR": "/nowhere"}
    lines = said(hpcstage, "run", "--data", make_tree(), "--", "true", code=0, env=env)
    assert lines[0] == "hpcstage: $TMPDIR=/nowhere does not exist: using /tmp instead; --local-dir names another"


@pytest.mark.parametrize(
    ("job", "front", "behind"),
    [
        pytest.param("", "", ": using /tmp instead; --local-dir names another", marks=NEEDS),
        pytest.param("4711", f"{HOST}: no node-local directory: ", " (ask the scheduler for local disk", marks=NEEDS),
    ],
)
def test_a_local_directory_on_a_network(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, job: str, front: str, behind: str
) -> None:
    with slow_source(tmp_path / "behind", Settings()) as slow:
        env = {"HPCSTAGE_LOCAL_DIR": "auto", "TMPDIR": str(slow.path), "SLURM_JOB_ID": job}
        line, *_ = said(hpcstage, "run", "--data", make_tree(), "--", "true", code=0, env=env)
        why = f"$TMPDIR={slow.path} is on fuse.slowfs, a network file system"
        assert line.startswith(f"hpcstage: {front}{why}{behind}")


@pytest.mark.parametrize(
    ("tmpdir", "why"),
    [
        ("/nowhere", "does not exist ("),
        (
            "/tmp",
            "was not made for this job and may be memory or shared; if it is the node's own disk, --local-dir /tmp (",
        ),
    ],
)
def test_a_job_without_a_local_directory_names_the_host_first(
    hpcstage: Hpcstage, make_tree: Tree, tmpdir: str, why: str
) -> None:
    env = {"HPCSTAGE_LOCAL_DIR": "auto", "TMPDIR": tmpdir, "SLURM_JOB_ID": "4711"}
    (line,) = said(hpcstage, "run", "--data", make_tree(), "--", "true", code=0, env=env)
    assert line.startswith(f"hpcstage: {HOST}: no node-local directory: $TMPDIR={tmpdir} {why}")


def test_files_that_the_list_misses(hpcstage: Hpcstage, make_tree: Tree) -> None:
    root = make_tree(files=6)
    files = sorted(root.rglob("*.bin"))
    (hpcstage.cwd / "list.txt").write_text(f"{files[0]}\n{files[-1]}\n")
    read = "import sys\nfor path in sys.argv[1:]: open(path, 'rb').read()"
    options = ["--data", "@list.txt", "--mode", "upfront"]
    lines = said(hpcstage, "run", *options, "--", sys.executable, "-c", read, *files, code=0)
    (told,) = [line for line in lines if "@list.txt" in line]
    assert "opens" in told
    assert "were of files that are not in @list.txt" in told
