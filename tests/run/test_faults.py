"""What breaks must not break training: processes of ours killed, disks full or gone, sources that change."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import Hpcstage, below, content, problems, small_tmpfs, wait_for
from test_modes import DIGEST, digest

Tree = Callable[..., Path]
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount small disks")

SLOW_DIGEST = """
import hashlib, os, sys, time
total = hashlib.sha256()
names = sorted(os.path.join(d, f) for d, _, files in os.walk(sys.argv[1]) for f in files)
print("started", flush=True)
end = time.monotonic() + 60  # a test that fails leaves no program for ever
for epoch in range(2):
    for name in names:
        with open(name, "rb") as file:
            total.update(file.read())
        time.sleep(0.002)
    while not os.path.exists(sys.argv[2]) and time.monotonic() < end:
        time.sleep(0.01)
print(total.hexdigest())
"""
"""Reads all, waits until what the test does to it is done, and reads all again."""


def go(data: Path) -> Path:
    """The file for which the command waits."""
    return data.with_name("go")


def start_slow(hpcstage: Hpcstage, data: Path, *options: str) -> subprocess.Popen[bytes]:
    process = hpcstage.start("run", *options, "--data", data, "--", sys.executable, "-c", SLOW_DIGEST, data, go(data))
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    return process


def daemons_of(wrapper: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The daemon first, then its copiers."""
    found = [child for child, words in below(wrapper.pid) if "hpcstage.daemon" in words]
    return sorted(found, key=lambda process: process.create_time())


TOLD_FIRST = """
import os, sys
from hpcstage.node.control import DaemonControl
from hpcstage.wrapper import session
class OnceTheCommandHasEnded:
    def __radd__(self, begun_s):
        ended = os.path.exists("pid") and not os.path.exists("/proc/" + open("pid").read().strip())
        return 0.0 if ended else float("inf")
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "hpcstage.report.terminal.short":
            open("order", "a").write("imported ")
def told(*args):
    open("order", "a").write("told ")
    tell_end(*args)
tell_end, DaemonControl.tell_end = DaemonControl.tell_end, told
session.READY_AFTER_S = OnceTheCommandHasEnded()
sys.meta_path.insert(0, Finder())
from hpcstage.__main__ import main
main()
"""


def test_the_daemon_is_told_of_the_end_before_the_report_is_loaded(hpcstage: Hpcstage, make_tree: Tree) -> None:
    """It ends meanwhile, also where the report would have been loaded beside a command that took longer."""
    command = ["sh", "-c", "echo $$ > written; mv written pid; sleep 0.2"]
    words = [sys.executable, "-c", TOLD_FIRST, "run", "--data", os.fspath(make_tree(files=1)), "--", *command]
    run = subprocess.run(words, cwd=hpcstage.cwd, env=hpcstage.env, capture_output=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    assert (hpcstage.cwd / "order").read_text() == "told imported "


MISTAKES = {
    "in preparing the node": ("from hpcstage.node import control; control.prepare = mistake", ["sh", "-c", "exit 7"]),
    "in reaching other nodes": (
        "from hpcstage.wrapper import grouping; grouping.begin = mistake",
        ["sh", "-c", "exit 7"],
    ),
    "in an import while the command runs": (
        "from hpcstage.wrapper import closing; closing.READY_AFTER_S = 0; sys.meta_path.insert(0, Finder())",
        ["sh", "-c", "until [ -s tried ]; do :; done; exit 7"],
    ),
}


@pytest.mark.parametrize("where", MISTAKES)
def test_a_mistake_of_ours_costs_no_run_and_leaves_nothing(hpcstage: Hpcstage, make_tree: Tree, where: str) -> None:
    """A mistake raises something else than the errors that are expected there."""
    place, command = MISTAKES[where]
    code = f"""
import sys
def mistake(*args): raise RuntimeError("a mistake")
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "hpcstage.report.terminal.short":
            open("tried", "a").write("x")
            mistake()
{place}
from hpcstage.__main__ import main
main()
"""
    words = [sys.executable, "-c", code, "run", "--nodes", "2", "--data", os.fspath(make_tree(files=1)), "--", *command]
    run = subprocess.run(words, cwd=hpcstage.cwd, env=hpcstage.env, capture_output=True, timeout=300, check=False)
    assert run.returncode == 7, run.stderr
    assert b"a mistake" in run.stderr, run.stderr
    assert not list(hpcstage.local_dir.glob("hpcstage-*/*/"))
    if "import" in where:
        assert (hpcstage.cwd / "tried").read_text() == "xx", "once beside the command, once where it is needed"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("victim", ["daemon", "copier"])
def test_kill_a_process_of_ours_at_a_random_moment(hpcstage: Hpcstage, make_tree: Tree, victim: str, seed: int) -> None:
    data = make_tree(files=150, size_bytes=40_000)
    process = start_slow(hpcstage, data, "--max-rate", "4MB")
    index = ("daemon", "copier").index(victim)
    wait_for(lambda: len(daemons_of(process)) > index, what=f"the {victim}")
    time.sleep(random.Random(seed).uniform(0, 0.5))  # the moment is the point, nothing waits for it
    target = daemons_of(process)[index]
    target.kill()
    wait_for(lambda: not target.is_running() or target.status() == psutil.STATUS_ZOMBIE, what="the death of the victim")
    go(data).touch()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.decode().strip() == digest(data, 2)
    record = json.loads(hpcstage.records()[-1].read_text())
    assert record["complete"] is (victim == "copier"), "a copier is replaced"
    assert ("daemon-died" in {problem["id"] for problem in record["notes"]}) is (victim == "daemon")


@pytest.mark.parametrize("seed", range(2))
def test_kill_the_wrapper_at_a_random_moment(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path, seed: int) -> None:
    data = make_tree(files=100, size_bytes=40_000)
    process = start_slow(hpcstage, data)
    children = psutil.Process(process.pid).children()
    time.sleep(random.Random(seed).uniform(0, 0.4))
    process.kill()
    go(data).touch()
    assert process.stdout is not None
    out = process.stdout.read()
    process.communicate(timeout=300)
    assert out.decode().strip() == digest(data, 2)
    psutil.wait_procs(children, timeout=300)
    wait_for(lambda: not list(local_dir.glob("hpcstage-*/*/store")), 120, "the removal of the node directory")


def test_the_next_run_cleans_up_after_everything_was_killed(
    hpcstage: Hpcstage, make_tree: Tree, local_dir: Path
) -> None:
    data = make_tree(files=100, size_bytes=40_000)
    process = start_slow(hpcstage, data)
    victims = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for victim in victims:
        victim.suspend()
    for victim in victims:
        victim.kill()
    process.communicate(timeout=300)
    psutil.wait_procs(victims, timeout=300)
    assert list(local_dir.glob("hpcstage-*/*/store"))
    done = hpcstage("run", "--data", data, "--", sys.executable, "-c", DIGEST, data, "1")
    assert done.returncode == 0, done.stderr
    assert not list(local_dir.glob("hpcstage-*/*/store"))
    assert not list(local_dir.glob("hpcstage-*/dead-*"))


@pytest.mark.root
@root_only
@pytest.mark.parametrize("options", ["size=11m", "size=100m,nr_inodes=120"])
def test_a_full_local_disk(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, options: str) -> None:
    data = make_tree(files=150, size_bytes=60_000)
    with small_tmpfs(tmp_path / "small", options) as small:
        done = hpcstage(
            "run", "--mode", "upfront", "--local-dir", small, "--budget", "100GB,1000000",
            "--data", data, "--", sys.executable, "-c", DIGEST, data, "2",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode().strip() == digest(data, 2)
        assert not list(small.glob("hpcstage-*/*/"))
    record = json.loads(hpcstage.records()[-1].read_text())
    assert [p["id"] for p in problems(record)] == ["disk-full"]
    assert not any("raise --budget" in note["remedy"] for note in record["notes"])


@pytest.mark.root
@root_only
def test_a_local_disk_that_others_fill_while_the_command_runs(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path
) -> None:
    data = make_tree(files=150, size_bytes=40_000)
    with small_tmpfs(tmp_path / "small", "size=20m") as small:
        process = start_slow(hpcstage, data, "--local-dir", str(small), "--max-rate", "3MB")
        with contextlib.suppress(OSError), (small / "filler").open("wb") as filler:
            while True:
                filler.write(bytes(65536))
        go(data).touch()
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert out.decode().strip() == digest(data, 2)


@pytest.mark.root
@root_only
def test_a_read_only_local_disk(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    data = make_tree(files=10)
    with small_tmpfs(tmp_path / "small", "size=10m,ro") as small:
        arguments = ["run", "--local-dir", small, "--data", data, "--", sys.executable, "-c", DIGEST, data, "1"]
        done = hpcstage(*arguments)
        assert done.returncode == 0
        assert done.stdout.decode().strip() == digest(data)
        assert len(done.stderr.decode().splitlines()) == 1
        assert str(small) in done.stderr.decode()
        strict = hpcstage(arguments[0], "--strict", *arguments[1:])
        assert strict.returncode == 125
        assert strict.stdout == b""


def test_the_node_directory_vanishes_while_the_command_runs(
    hpcstage: Hpcstage, make_tree: Tree, local_dir: Path
) -> None:
    data = make_tree(files=100, size_bytes=40_000)
    process = start_slow(hpcstage, data)
    for path in local_dir.glob("hpcstage-*/*"):
        shutil.rmtree(path, ignore_errors=True)
    go(data).touch()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert out.decode().strip() == digest(data, 2)


def test_a_tree_with_everything_in_it(hpcstage: Hpcstage, tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "deep" / "er").mkdir(parents=True)
    outside = tmp_path / "outside.bin"
    outside.write_bytes(content(99, 3000))
    names = [
        b"plain",
        b"with space",
        b"new\nline",
        b"\xff\xfe invalid",
        b"tab\there",
        b"100%25",
        b"quote'\"",
        b".hidden",
    ]
    for index, name in enumerate(names):
        Path(os.fsdecode(os.fsencode(root / "deep") + b"/" + name)).write_bytes(content(index, 5000 + index))
    (root / "empty").write_bytes(b"")
    (root / "link-in").symlink_to("deep/plain")
    (root / "link-out").symlink_to(outside)
    (root / "dangling").symlink_to("nowhere")
    (root / "loop").symlink_to(".")
    os.mkfifo(root / "fifo")
    code = """
import hashlib, os, stat, sys
total = hashlib.sha256()
for directory, folders, files in os.walk(os.fsencode(sys.argv[1])):
    folders.sort()
    for name in sorted(files):
        path = os.path.join(directory, name)
        links = os.lstat(path)
        if stat.S_ISFIFO(links.st_mode) or not os.path.exists(path):
            continue
        total.update(path + bytes([stat.S_ISLNK(links.st_mode)]))
        with open(path, "rb") as file:
            status = os.stat(path)
            assert (status.st_size, status.st_mtime_ns) == ((f := os.fstat(file.fileno())).st_size, f.st_mtime_ns)
            total.update(file.read())
print(total.hexdigest())
"""
    plain = subprocess.run([sys.executable, "-c", code, root], capture_output=True, check=True, timeout=300).stdout
    for mode in ("upfront", "runtime"):
        done = hpcstage("run", "--mode", mode, "--data", root, "--", sys.executable, "-c", code, root)
        assert done.returncode == 0, done.stderr
        assert done.stdout == plain
    coverage = json.loads(hpcstage.records()[0].read_text())["coverage"]
    assert coverage["opens"] == coverage["swapped"] == len(names) + 3


def test_files_that_change_shrink_and_vanish_while_they_are_copied(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=80, size_bytes=400_000)
    names = sorted(data.rglob("*.bin"))
    check = """
import os, pathlib, sys
names = sorted(pathlib.Path(sys.argv[1]).rglob("*.bin"))
print("started", flush=True)
sys.stdin.readline()
for name in names:
    try:
        seen = name.read_bytes()
    except FileNotFoundError:
        continue
    print(name.name, len(seen), seen[-4:].hex())
"""
    arguments = ["run", "--max-rate", "20MB", "--data", str(data), "--", sys.executable, "-c", check, str(data)]
    with subprocess.Popen(
        hpcstage.command(*arguments),
        cwd=hpcstage.cwd,
        env=hpcstage.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as running:
        assert running.stdout is not None
        running.stdout.readline()
        for index, name in enumerate(names[40:]):
            if index % 3 == 0:
                name.write_bytes(content(1000 + index, 300_000))
            elif index % 3 == 1:
                os.truncate(name, 1000)
            else:
                name.unlink()
        out, err = running.communicate(b"go\n", timeout=300)
    assert running.returncode == 0, err
    sizes = {line.split()[0]: int(line.split()[1]) for line in out.decode().splitlines()}
    for name in names[:40]:
        assert sizes[name.name] == 400_000
    allowed = {300_000, 1000, 400_000}
    assert set(sizes.values()) <= allowed, "a size that the file never had: a partial copy was visible"


def test_writes_below_a_dataset_are_seen(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=30)
    code = """
import os, pathlib, sys
root = pathlib.Path(sys.argv[1])
names = sorted(root.rglob("*.bin"))
for name in names:
    name.read_bytes()
names[0].write_bytes(b"new")
with open(names[1], "r+b") as file:
    file.write(b"XY")
os.replace(names[2], names[3])
names[4].unlink()
os.truncate(names[5], 3)
with open(names[6], "ab") as file:
    file.write(b"tail")
(root / "fresh.bin").write_bytes(b"fresh")
assert names[0].read_bytes() == b"new"
assert names[1].read_bytes()[:2] == b"XY"
assert not names[2].exists()
assert not names[4].exists()
assert names[5].stat().st_size == 3
assert names[6].read_bytes().endswith(b"tail")
assert (root / "fresh.bin").read_bytes() == b"fresh"
os.rename(root / "class0", root / "renamed")
assert not (root / "class0").exists()
assert all(p.read_bytes() is not None for p in (root / "renamed").iterdir())
os.mkdir(root / "class0")
(root / "class0" / names[0].name).write_bytes(b"second life")
assert (root / "class0" / names[0].name).read_bytes() == b"second life"
print("ok")
"""
    done = hpcstage("run", "--mode", "upfront", "--data", data, "--", sys.executable, "-c", code, data)
    assert done.stdout.decode().strip() == "ok", done.stderr.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_everything_is_copied_upfront(
    hpcstage: Hpcstage, make_tree: Tree, local_dir: Path, number: signal.Signals
) -> None:
    data = make_tree(files=50, size_bytes=100_000)
    process = hpcstage.start("run", "--mode", "upfront", "--max-rate", "500kB", "--data", data, "--", "echo", "never")
    wait_for(lambda: bool(list(local_dir.glob("hpcstage-*/*/store/*/*/*"))), 120, "the first staged file")
    process.send_signal(number)
    out, _ = process.communicate(timeout=300)
    assert out == b""
    assert process.returncode in (-number, 128 + number)
    wait_for(lambda: not list(local_dir.glob("hpcstage-*/*/store")), 120, "the removal of the node directory")
