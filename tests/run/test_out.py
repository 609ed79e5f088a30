"""`hpcstage run --out DIR`: what the command writes to `{out}` is in DIR, and nothing is lost or removed otherwise."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import Hpcstage, below, kill_all, python_command, small_tmpfs, wait_for

from hpcstage.node.kept import KeptPlace
from hpcstage.owner import OWNER, Owner

Tree = Callable[..., Path]
WRITE = """
import os, sys
out = sys.argv[1]
assert os.environ["HPCSTAGE_OUT"] == out
os.mkdir(f"{out}/epoch1")
with open(f"{out}/epoch1/model.bin", "wb") as file:
    file.write(b"weights" * 1000)
with open(f"{out}/log", "w") as file:
    file.write("done")
print(out)
"""
WAIT = """
import os, sys, time
out, flag = sys.argv[1:]
for name in ("first", "other"):  # with --drain-rate 1 the second is not copied for seconds
    with open(f"{out}/{name}", "w") as file:
        file.write(name)
open(f"{flag}.up", "w").close()
end = time.monotonic() + 60  # a test that fails leaves no program for ever
while not os.path.exists(flag) and time.monotonic() < end:
    time.sleep(0.01)
with open(f"{out}/last", "w") as file:
    file.write("last")
"""
NOT_DRAINED = 74


def kept(local_dir: Path) -> list[Path]:
    """The output directories that are still on the local disk."""
    return list(local_dir.glob("hpcstage-out-*/*"))


def run(hpcstage: Hpcstage, data: Path, *more: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    return hpcstage("run", "--data", data, *map(str, more), **options)


def record(hpcstage: Hpcstage) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(hpcstage.records()[-1].read_bytes())
    return found


def refused(hpcstage: Hpcstage, data: Path, *more: object, command: Sequence[str] = ("echo", "started")) -> str:
    done = run(hpcstage, data, *more, "--", *command)
    assert done.returncode == 2, done.stderr
    assert done.stdout == b""
    (line,) = done.stderr.decode().splitlines()
    return line


def is_written(out: Path) -> bool:
    return (out / "log").read_text() == "done" and (out / "epoch1/model.bin").read_bytes() == b"weights" * 1000


def test_what_the_command_writes_is_in_the_directory(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path
) -> None:
    done = run(hpcstage, make_tree(), "--out", "results/r7", "--", *python_command(WRITE, "{out}"))
    assert done.returncode == 0, done.stderr
    assert b"hpcstage: outputs: " in done.stderr
    assert done.stdout.decode().startswith(os.fspath(local_dir)), "a directory on the local disk"
    assert is_written(tmp_path / "results/r7")
    assert sorted(os.listdir(tmp_path / "results/r7")) == ["epoch1", "log"], "no lock and no temporary file stays"
    assert kept(local_dir) == []
    part = record(hpcstage)["drains"]["out"]
    assert (part["undrained"], part["directory"]) == ({}, os.fspath(tmp_path / "results/r7"))
    assert part["files"] == 2
    assert "Outputs: " in hpcstage("report").stdout.decode()


def test_no_dataset_is_needed(hpcstage: Hpcstage, tmp_path: Path, local_dir: Path) -> None:
    for strict in ([], ["--strict"]):
        done = hpcstage("run", *strict, "--out", "results", "--", *python_command(WRITE, "{out}"))
        assert done.returncode == 0, done.stderr
        assert done.stdout.decode().startswith(os.fspath(local_dir))
        assert is_written(tmp_path / "results")
        shutil.rmtree(tmp_path / "results")


def test_entries_that_are_never_copied_are_named(hpcstage: Hpcstage) -> None:
    script = "import os\nfor name in 'dbeca': os.mkfifo(os.path.join(os.environ['HPCSTAGE_OUT'], name))"
    done = hpcstage("run", "--out", "results", "--", *python_command(script))
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.decode().splitlines() if "not copied" in line]
    assert "not copied: a (FIFO), b (FIFO), c (FIFO) and 2 more, which the record lists" in line
    assert [one["name"] for one in record(hpcstage)["drains"]["out"]["names"] if one["fate"] == "skipped"] == list(
        "abcde"
    )


def test_what_was_there_is_shown_and_stays(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "old").write_text("old")
    (results / "other").write_text("other")
    script = 'cat "$HPCSTAGE_OUT/old" && rm "$HPCSTAGE_OUT/old" && echo ${out}'
    done = run(hpcstage, make_tree(), "--out", results, "--", "sh", "-c", script)
    assert (done.returncode, done.stdout) == (0, b"old\n"), done.stderr
    assert sorted(os.listdir(results)) == ["old", "other"]
    assert (
        f"old of the command stays in {results}, under that name: it was there before this run" in done.stderr.decode()
    )


def test_what_cannot_be_copied_is_named_and_kept_and_copied_later(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path
) -> None:
    results = tmp_path / "results"
    script = f'mv {shlex.quote(os.fspath(results))} "$HOLD" && echo new > "$HPCSTAGE_OUT/kept.txt"; exit 3'
    env = {"HOLD": os.fspath(tmp_path / "elsewhere")}
    done = run(hpcstage, make_tree(), "--out", results, "--", "sh", "-c", script, env=env)
    assert done.returncode == 3, "only 0 is replaced"
    said = done.stderr.decode()
    (place,) = kept(local_dir)
    assert "kept.txt" in said
    assert os.fspath(place) in said
    assert f"hpcstage clean --drain --local-dir {local_dir}" in said
    assert [one["name"] for one in record(hpcstage)["drains"]["out"]["names"] if one["fate"] == "undrained"] == [
        "kept.txt"
    ]
    assert hpcstage("clean").returncode == NOT_DRAINED
    assert kept(local_dir) == [place], "clean deletes nothing that is not copied"
    (tmp_path / "elsewhere").rename(results)
    done = hpcstage("clean", "--drain")
    assert done.returncode == 0, done.stderr
    assert (results / "kept.txt").read_text() == "new\n"
    assert kept(local_dir) == []


def has_both(results: Path) -> bool:
    return all((results / name).read_text() == name for name in ("first", "other"))


def killed(hpcstage: Hpcstage, data: Path, results: Path, flag: Path) -> None:
    """A run of which wrapper, daemon and command were killed after the command wrote a file that was not drained."""
    command = python_command(WAIT, "{out}", flag)
    wrapper = hpcstage.start("run", "--data", data, "--out", results, "--drain-rate", "1", "--", *command)
    wait_for(Path(f"{flag}.up").exists, 120, "the command")
    assert refused(hpcstage, data, "--out", results).count("in use") == 1
    kill_all(wrapper)


@pytest.mark.parametrize("how", ["clean", "start"])
def test_after_a_kill_of_everything_the_files_are_copied_late(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path, how: str
) -> None:
    data, results = make_tree(), tmp_path / "results"
    results.mkdir()
    for name in "abc":
        (results / name).write_text("was there")
    killed(hpcstage, data, results, tmp_path / "flag")
    assert kept(local_dir) != []
    done = hpcstage("clean", "--drain") if how == "clean" else run(hpcstage, data, "--", "true")
    assert done.returncode == 0
    copied = re.search(rf"left to {results}: (\d+) B", done.stderr.decode())
    assert copied is not None
    assert 1 <= int(copied[1]) <= len("first" + "other"), "what was there already is not copied"
    assert has_both(results)
    assert kept(local_dir) == []


STORES = """
import os, sys, time
import numpy as np
out, results, flag = sys.argv[1:]
array = np.lib.format.open_memmap(f"{out}/array.npy", mode="w+", shape=(100,), dtype="int64")
array[:] = -1
end = time.monotonic() + 60  # a test that fails leaves no program for ever
while not os.path.exists(f"{results}/array.npy") and time.monotonic() < end:
    time.sleep(0.01)
for sample in range(100):
    array[sample] = sample
array.flush()
open(f"{flag}.up", "w").close()
while not os.path.exists(flag) and time.monotonic() < end:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_is_stored_through_a_memory_map_arrives(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path, is_killed: bool
) -> None:
    """On a local disk a second store into a page changes no time of the file until the page is on the disk."""
    results, flag, disk = local_dir / "results", tmp_path / "flag", tmp_path / "disk"
    disk.mkdir()
    hpcstage.env["HPCSTAGE_LOCAL_DIR"] = os.fspath(disk)
    wrapper = hpcstage.start("run", "--out", results, "--", *python_command(STORES, "{out}", results, flag))
    wait_for(Path(f"{flag}.up").exists, 120, "the program's stores")
    if is_killed:
        kill_all(wrapper)
        assert hpcstage("clean", "--drain").returncode == 0
    else:
        flag.touch()
        _, errors = wrapper.communicate(timeout=300)
        assert wrapper.returncode == 0, errors
    assert np.load(results / "array.npy").tolist() == list(range(100))
    assert kept(disk) == []


JOB = {"JOB_ID": "7", "SGE_TASK_ID": "undefined", "SGE_O_WORKDIR": "/"}


@pytest.fixture
def earlier_start(tmp_path: Path) -> Iterator[Path]:
    """The file that says that an earlier start of a job, on another host, owns DIR, and is renewed."""
    (tmp_path / "results").mkdir()
    path, is_over = tmp_path / "results" / OWNER, threading.Event()
    path.write_bytes(Owner("run r1 on elsewhere, gridengine job 7", "another boot", "1").data())

    def renew() -> None:
        while not is_over.wait(0.1):
            with contextlib.suppress(FileNotFoundError):
                os.utime(path)

    thread = threading.Thread(target=renew)
    thread.start()
    yield path
    is_over.set()
    thread.join()


def test_an_earlier_start_of_the_same_job_on_another_host_is_waited_for(
    hpcstage: Hpcstage, tmp_path: Path, earlier_start: Path
) -> None:
    process = hpcstage.start("run", "--out", tmp_path / "results", "--", "echo", "started", env=JOB)
    assert process.stderr is not None
    line = next(line for line in process.stderr if b"in use" in line)
    assert b"an earlier start of this job, run r1 on elsewhere, gridengine job 7: waiting for its end" in line
    earlier_start.unlink()
    assert process.communicate(timeout=300)[0] == b"started\n"
    assert process.returncode == 0


def test_a_signal_ends_a_start_that_waits_for_an_earlier_one(
    hpcstage: Hpcstage, tmp_path: Path, earlier_start: Path
) -> None:
    process = hpcstage.start("run", "--out", tmp_path / "results", "--", "echo", "started", env=JOB)
    assert process.stderr is not None
    next(line for line in process.stderr if b"in use" in line)
    process.terminate()
    assert process.communicate(timeout=300)[0] == b""
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("env", [{**JOB, "JOB_ID": "8"}, {**JOB, "SGE_TASK_ID": "3"}, {}])
def test_another_job_is_not_waited_for(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, earlier_start: Path, env: dict[str, str]
) -> None:
    hpcstage.env |= env
    done = run(hpcstage, make_tree(), "--out", tmp_path / "results", "--", "echo", "started")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.count(b"in use by run r1 on elsewhere") == 1


def test_a_directory_that_is_gone_costs_no_tries_and_its_files_can_be_forgotten(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path
) -> None:
    data, results = make_tree(), tmp_path / "results"
    killed(hpcstage, data, results, tmp_path / "flag")
    shutil.rmtree(results)
    done = run(hpcstage, data, "--", "echo", "started")
    assert (done.returncode, done.stdout) == (0, b"started\n")
    (place,) = kept(local_dir)
    assert place.name == KeptPlace(place).run_id, "it is out of the way of the next run with this DIR"
    assert f"hpcstage clean --forget {place.name}" in done.stderr.decode()
    assert f"not in {results}: its files" in done.stderr.decode(), "no file was tried"
    done = run(hpcstage, data, "--", "echo", "started")
    assert (done.returncode, done.stdout) == (0, b"started\n")
    assert "copying" not in done.stderr.decode(), "it is not tried again so soon"
    assert kept(local_dir) == [place]
    assert not results.exists()
    assert hpcstage("clean", "--forget", "another").returncode == 2
    assert kept(local_dir) == [place]
    assert hpcstage("clean", "--forget", place.name).returncode == 0
    assert kept(local_dir) == []


def test_a_signal_ends_a_start_that_copies_what_a_killed_run_left(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path
) -> None:
    data, results = make_tree(), tmp_path / "results"
    killed(hpcstage, data, results, tmp_path / "flag")

    def cannot_write_a_file() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2, 2))

    start = hpcstage.start("run", "--data", data, "--", "echo", "started", preexec_fn=cannot_write_a_file)
    assert start.stderr is not None
    assert start.stdout is not None
    assert b"copying the output files" in start.stderr.readline()
    start.terminate()
    assert start.wait(300) == -signal.SIGTERM
    assert start.stdout.read() == b""
    assert kept(local_dir) != []
    assert hpcstage("clean", "--drain").returncode == 0
    assert has_both(results)


def test_a_directory_that_the_command_makes_anew(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "old").write_text("old")
    code = """
import os, shutil, sys
out = sys.argv[1]
shutil.rmtree(out)
os.makedirs(out)
open(f"{out}/new", "w").close()
"""
    done = run(hpcstage, make_tree(), "--out", results, "--", *python_command(code, "{out}"))
    assert done.returncode == 0, done.stderr
    assert sorted(os.listdir(results)) == ["new", "old"], "nothing is removed that was not seen to be removed alone"
    assert kept(local_dir) == []


ANEW = """
import os, shutil, sys, time
out, flag = sys.argv[1:]
open(f"{flag}.up", "w").close()
end = time.monotonic() + 60  # a test that fails leaves no program for ever
while not os.path.exists(flag) and time.monotonic() < end:
    time.sleep(0.01)
shutil.rmtree(out)
os.makedirs(out)
open(f"{out}/new", "w").close()
"""


def test_a_directory_that_is_made_anew_stays_while_somebody_else_works_on_it(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path
) -> None:
    results, flag = tmp_path / "results", tmp_path / "flag"
    command = python_command(ANEW, "{out}", flag)
    wrapper = hpcstage.start("run", "--data", make_tree(), "--out", results, "--", *command)
    wait_for(Path(f"{flag}.up").exists, 120, "the command")
    (place,) = kept(local_dir)
    held = KeptPlace(place).hold()
    try:
        flag.touch()
        _, said = wrapper.communicate(timeout=300)
    finally:
        held.let_go()
    assert wrapper.returncode == NOT_DRAINED
    assert b"another process is working on them" in said
    assert hpcstage("clean", "--drain").returncode == 0
    assert os.listdir(results) == ["new"]
    assert kept(local_dir) == []


def test_a_directory_that_is_removed_is_told_of(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path
) -> None:
    results = tmp_path / "results"
    results.mkdir()
    (results / "old").write_text("old")
    done = run(hpcstage, make_tree(), "--out", results, "--", "sh", "-c", 'rm -r "$HPCSTAGE_OUT"')
    assert done.returncode == NOT_DRAINED, done.stderr
    assert os.listdir(results) == ["old"]
    assert kept(local_dir) == []


CHANGE = """
import os, sys, time
os.chdir(sys.argv[1])
flag = sys.argv[2]
open("mine", "w").close()
with open("old", "a") as file:
    file.write(" and more")
open(f"{flag}.up", "w").close()
end = time.monotonic() + 60  # a test that fails leaves no program for ever
while not os.path.exists(flag) and time.monotonic() < end:
    time.sleep(0.01)
os.unlink("mine")
with open("new", "w") as file:
    file.write("new")
os.rename("new", "old")
os.rename("earlier", "moved")
"""


@pytest.mark.parametrize("which", ["daemon", "both"])
def test_all_that_is_another_after_a_kill_is_named(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path, which: str
) -> None:
    results, flag = tmp_path / "results", tmp_path / "flag"
    results.mkdir()
    for name in ("old", "earlier"):
        (results / name).write_text(name)
    command = python_command(CHANGE, "{out}", flag)
    wrapper = hpcstage.start("run", "--data", make_tree(), "--out", results, "--", *command)
    wait_for(lambda: Path(f"{flag}.up").exists() and (results / "mine").exists(), 120, "the first file in DIR")
    family = [(psutil.Process(wrapper.pid), ["hpcstage"]), *below(wrapper.pid)]
    ours = [one for one, words in family if {"hpcstage", "hpcstage.daemon"} & set(words)]
    for process in ours[which == "daemon" :]:
        process.kill()
    flag.touch()
    said = wrapper.communicate(timeout=300)[1].decode()
    if which == "both":
        psutil.wait_procs([one for one, _ in family], timeout=300)
        done = hpcstage("clean", "--drain")
        assert done.returncode == 0, done.stderr
        said = done.stderr.decode()
    run_id = run_id_beside(results)
    for line in (
        f"is old.{run_id} in {results}: that had been changed since",
        f"stays in {results}, under that name: it is not in the local directory, and nobody saw it go",
    ):
        assert said.count(line) == 1, said
    assert {path.name: path.read_text() for path in results.iterdir()} == {
        "mine": "", "old": "old and more", f"old.{run_id}": "new", "moved": "earlier"
    }  # fmt: skip
    if which == "daemon":
        part = record(hpcstage)["drains"]["out"]
        assert [one["name"] for one in part["names"] if one["fate"] == "stayed"] == ["mine"]
        assert [one["name"] for one in part["names"] if one["fate"] == "beside"] == ["old"]
        told = {problem["id"] for problem in record(hpcstage)["notes"]}
        assert {"outputs-stayed", "outputs-beside"} <= told
    assert kept(local_dir) == []


def run_id_beside(results: Path) -> str:
    """The id of the run, from the one name beside."""
    (path,) = results.glob("old.*")
    return path.name.removeprefix("old.")


LIVES_ON = """
import mmap, os, sys, time
out, flag, held = sys.argv[1:]
if os.fork():
    while not os.path.exists(f"{flag}.up"):
        time.sleep(0.01)
    sys.exit()
os.setsid()
for number in (1, 2):
    os.dup2(os.open("/dev/null", os.O_WRONLY), number)
file = open(f"{out}/log", "w+")
file.write("early")
file.flush()
if held == "mapped":
    view = mmap.mmap(file.fileno(), 0)
if held != "open":
    file.close()
os.closerange(3, 64 if held == "mapped" else 3)  # Python's map keeps a descriptor
open(f"{flag}.up", "w").close()
end = time.monotonic() + 60  # a test that fails leaves no program for ever
while not os.path.exists(flag) and time.monotonic() < end:
    time.sleep(0.01)
if held != "open":
    file = open(f"{out}/log", "a")
file.write(" late")
file.close()
"""


@pytest.mark.parametrize("held", ["open", "mapped", ""])
def test_a_program_that_lives_on_keeps_its_files(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path, held: str
) -> None:
    data, results, flag = make_tree(), tmp_path / "results", tmp_path / "flag"
    done = run(hpcstage, data, "--out", results, "--", *python_command(LIVES_ON, "{out}", flag, held))
    try:
        assert done.returncode == (NOT_DRAINED if held else 0), done.stderr
        assert ("still writes" if held else "live on") in done.stderr.decode()
        assert (results / "log").read_text() == "early"
        (place,) = kept(local_dir)
        for words in (["clean"], ["clean", "--drain"]):
            cleaned = hpcstage(*words)
            assert f"run {KeptPlace(place).run_id} is left alone" in cleaned.stderr.decode()
            assert cleaned.returncode == NOT_DRAINED
        assert kept(local_dir) == [place]
    finally:
        flag.touch()
    wait_for(lambda: hpcstage("clean", "--drain").returncode == 0 and not kept(local_dir), 120, "the program's end")
    assert (results / "log").read_text() == "early late"


def test_a_signal_limits_the_wait_at_the_end(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path
) -> None:
    results, script = tmp_path / "results", 'for name in 1 2 3; do echo "a long $name" > "$HPCSTAGE_OUT/$name"; done'
    options = ("--data", make_tree(), "--out", results, "--drain-rate", "1", "--drain", "1s")
    wrapper = hpcstage.start("run", *options, "--", "sh", "-c", script)
    assert wrapper.stderr is not None
    said = iter(wrapper.stderr.readline, b"")
    assert any(b"its output files are being copied" in line for line in said)
    wrapper.terminate()
    assert wrapper.wait(300) == NOT_DRAINED
    assert b"there was no time left" in b"".join(said)
    assert hpcstage("clean", "--drain").returncode == 0
    assert [(results / name).read_text() for name in "123"] == ["a long 1\n", "a long 2\n", "a long 3\n"]
    assert kept(local_dir) == []


@pytest.mark.parametrize("ends", ["kill -TERM $$", "sh -c 'kill -HUP $$'; exit $?"])
def test_a_signal_that_ended_the_command_limits_the_wait(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, local_dir: Path, ends: str
) -> None:
    results, script = tmp_path / "results", 'for name in 1 2 3; do echo "a long $name" > "$HPCSTAGE_OUT/$name"; done; '
    options = ("--out", results, "--drain-rate", "1", "--drain", "1s")
    done = run(hpcstage, make_tree(), *options, "--", "sh", "-c", script + ends)
    assert done.returncode in (-signal.SIGTERM, 128 + signal.SIGHUP)
    assert b"there was no time left" in done.stderr
    assert hpcstage("clean", "--drain").returncode == 0
    assert [(results / name).read_text() for name in "123"] == ["a long 1\n", "a long 2\n", "a long 3\n"]
    assert kept(local_dir) == []


@pytest.mark.parametrize("env", [{"HPCSTAGE_DISABLE": "1"}, {"HPCSTAGE_LOCAL_DIR": "/nonexistent"}])
def test_without_a_local_disk_it_is_the_directory_itself(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, env: dict[str, str]
) -> None:
    done = run(hpcstage, make_tree(), "--out", "results", "--", *python_command(WRITE, "{out}"), env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.decode().strip() == os.fspath(tmp_path / "results")
    assert is_written(tmp_path / "results")


FILLS = """
import os, sys, time
out, data, local = sys.argv[1:]
def write(name, size_bytes):
    with open(f"{out}/{name}", "wb") as file:
        file.write(bytes(size_bytes))
def free():
    found = os.statvfs(local)
    return found.f_bavail * found.f_frsize
write("first", free() - (4 << 20))
end = time.monotonic() + 20
while free() < 25 << 20 and time.monotonic() < end:
    time.sleep(0.02)
write("second", 20 << 20)
print(sum(len(open(os.path.join(d, name), "rb").read()) for d, _, names in os.walk(data) for name in names))
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_copies_of_datasets_give_way_where_the_local_disk_fills(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path
) -> None:
    data = make_tree(files=30, size_bytes=1 << 20)
    with small_tmpfs(tmp_path / "small", "size=60m") as small:
        options = ("--local-dir", small, "--mode", "upfront", "--budget", "45MB", "--out", "results")
        done = run(hpcstage, data, *options, "--", *python_command(FILLS, "{out}", data, small))
    assert (done.returncode, done.stdout.split()) == (0, [b"%d" % (30 << 20)]), done.stderr
    assert (tmp_path / "results/second").stat().st_size == 20 << 20
    assert "store-closed" in [problem["id"] for problem in record(hpcstage)["notes"]]


FILLS_WITH_OUTPUTS = """
import os, sys, time
out, local = sys.argv[1:]
def free():
    found = os.statvfs(local)
    return found.f_bavail * found.f_frsize
held = open(f"{out}/held", "wb")
held.write(bytes(4 << 20))
held.flush()
for number in range(20):
    end = time.monotonic() + 20
    while free() < 5 << 20 and time.monotonic() < end:
        time.sleep(0.02)
    with open(f"{out}/{number}", "wb") as file:
        file.write(bytes([number]) * (4 << 20))
assert all(open(f"{out}/{number}", "rb").read() == bytes([number]) * (4 << 20) for number in range(20))
assert not os.path.islink(f"{out}/held"), "it is open"
held.write(b"end")
print(sum(os.path.islink(f"{out}/{number}") for number in range(20)))
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
@pytest.mark.parametrize("mode", ["runtime", "direct"])
def test_what_is_drained_gives_way_where_outputs_fill_the_local_disk(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path, mode: str
) -> None:
    results = tmp_path / "results"
    with small_tmpfs(tmp_path / "small", "size=60m") as small:
        options = ("--local-dir", small, "--mode", mode, "--budget", "10MB", "--out", results)
        done = run(hpcstage, make_tree(), *options, "--", *python_command(FILLS_WITH_OUTPUTS, "{out}", small))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 5, "84 MB were written to 60 MB"
    held = results / "held"
    assert (held.stat().st_size, held.read_bytes()[-3:]) == ((4 << 20) + 3, b"end")
    assert all((results / str(number)).read_bytes() == bytes([number]) * (4 << 20) for number in range(20))


ROTATES = """
import os, sys, time
out, results = sys.argv[1:]
for number in range(12):
    with open(f"{out}/{number}", "wb") as file:
        file.write(bytes([number]) * (4 << 20))
    if number > 1:
        os.unlink(f"{out}/{number - 2}")
    end = time.monotonic() + 60
    while not os.path.exists(f"{results}/{number}") and time.monotonic() < end:
        time.sleep(0.02)
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount a small disk")
def test_what_the_command_removed_makes_room_in_a_full_directory(
    hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path
) -> None:
    with small_tmpfs(tmp_path / "small", "size=20m") as small:
        results = small / "results"
        done = run(hpcstage, make_tree(), "--out", results, "--", *python_command(ROTATES, "{out}", results))
        assert done.returncode == 0, done.stderr
        assert sorted(os.listdir(results)) == ["10", "11"]


def test_a_directory_below_a_dataset(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree()
    line = refused(hpcstage, data, "--out", data / "results")
    assert os.fspath(data) in line
    assert not (data / "results").exists()


def test_a_directory_on_the_local_disk(hpcstage: Hpcstage, make_tree: Tree, local_dir: Path) -> None:
    assert "same disk" in refused(hpcstage, make_tree(), "--out", local_dir / "results")
    assert not (local_dir / "results").exists()


def test_a_directory_of_somebody_else(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    other = Path("/usr")
    if os.geteuid() == 0:
        other = tmp_path / "other"
        other.mkdir()
        os.chown(other, 12345, -1)
    assert "belongs to user" in refused(hpcstage, make_tree(), "--out", other)


def test_a_file_in_the_place_of_the_directory(hpcstage: Hpcstage, make_tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "not a directory" in refused(hpcstage, make_tree(), "--out", tmp_path / "file")


def test_the_placeholder_without_a_directory(hpcstage: Hpcstage, make_tree: Tree) -> None:
    assert "--out" in refused(hpcstage, make_tree(), command=("echo", "--output={out}"))


@pytest.mark.parametrize("named", ["auto", "$TMPDIR", "{elsewhere}"])
def test_a_local_directory_that_may_go_with_the_job(
    hpcstage: Hpcstage, tmp_path: Path, local_dir: Path, named: str
) -> None:
    """An ordinary directory that the scheduler, or its prolog, made and named."""
    results, of_job, elsewhere = tmp_path / "results", local_dir / "job.1", local_dir / "elsewhere"
    of_job.mkdir()
    elsewhere.mkdir()
    env = {
        "SLURM_JOB_ID": "1",
        "TMPDIR": os.fspath(of_job),
        "HPCSTAGE_LOCAL_DIR": named.format(elsewhere=elsewhere),
        "HOLD": os.fspath(tmp_path / "hold"),
    }
    script = f'mv {shlex.quote(os.fspath(results))} "$HOLD" && echo new > "$HPCSTAGE_OUT/kept.txt"; exit 3'
    done = hpcstage("run", "--out", results, "--", "sh", "-c", script, env=env)
    said = done.stderr.decode()
    assert done.returncode == 3, said
    (problem,) = (one for one in record(hpcstage)["notes"] if one["id"] == "not-drained")
    goes = "elsewhere" not in named
    assert (f"{of_job} may be deleted with the job" in said) == goes
    assert ("unless that was deleted with the job" in said) == goes
    assert ("unless that was deleted with the job" in problem["remedy"]) == goes
    assert len(kept(of_job if goes else elsewhere)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("option", ["--out", "--checkpoint"])
def test_a_full_file_system_is_named(hpcstage: Hpcstage, tmp_path: Path, option: str) -> None:
    full = tmp_path / "full"
    full.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", full], check=False).returncode:
        pytest.skip("mounting is not permitted")
    try:
        (full / "results").mkdir()
        with contextlib.suppress(OSError), (full / "other").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass
        done = hpcstage("run", option, full / "results", "--", "true")
        assert done.returncode == 2
        assert b"No space left on device" in done.stderr
        assert b"free space" in done.stderr
        assert done.stderr.count(b"\n") == 1
        assert not list((full / "results").iterdir())
    finally:
        subprocess.run(["umount", full], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
@pytest.mark.parametrize("below", ["", "results"])
def test_a_mount_whose_server_has_gone_is_named(hpcstage: Hpcstage, tmp_path: Path, below: str) -> None:
    dead = tmp_path / "dead"
    dead.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no FUSE")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    is_mounted = ctypes.CDLL(None).mount(b"dead", os.fsencode(dead), b"fuse", 0, options) == 0
    os.close(device)
    if not is_mounted:
        pytest.skip("mounting is not permitted")
    try:
        done = hpcstage("run", "--out", dead / below, "--", "true")
        assert done.returncode == 2
        assert b"not connected" in done.stderr
        assert b"mount its file system again" in done.stderr
        assert done.stderr.count(b"\n") == 1
    finally:
        subprocess.run(["umount", "-l", dead], check=True)
