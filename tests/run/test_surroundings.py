"""A command runs as without hpcstage whatever it is started from: closed streams, a working directory that is gone,
modules of other versions on PYTHONPATH, a job whose id is no plain text."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Hpcstage, problems

Tree = Callable[..., Path]
OPEN = """
import os, sys
def name(number):
    try: return os.readlink(f"/proc/self/fd/{number}")
    except OSError as error: return error.strerror
names = [name(number) for number in range(10)]
made = [os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND) for _ in range(4)]
os.write(made[-1], repr((names, made, sys.stdin is None, sys.stdout is None, sys.stderr is None)).encode())
open(sys.argv[1]).read()
sys.exit(7)
"""
CLOSED = ["2>&-", "1>&-", "0<&- 2>&-", "0<&- 1>&- 2>&-"]


def run_in(hpcstage: Hpcstage, script: str, *words: str | bytes | os.PathLike[str], **more: str) -> int:
    """Runs words by a script of the shell's."""
    command = ["sh", "-c", script, "sh", *map(os.fsdecode, words)]
    return subprocess.run(
        command, cwd=hpcstage.cwd, env={**hpcstage.env, **more}, stdin=subprocess.DEVNULL, timeout=300, check=False
    ).returncode


WAYS = [
    *((closed, []) for closed in CLOSED),
    (CLOSED[-1], ["--mode", "direct"]),
    (CLOSED[-1], ["--local-dir", "/nonexistent"]),
]


@pytest.mark.parametrize(("closed", "options"), WAYS)
def test_closed_streams(hpcstage: Hpcstage, make_tree: Tree, closed: str, options: list[str]) -> None:
    data = make_tree(files=1)
    plain, ours = hpcstage.cwd / "plain", hpcstage.cwd / "ours"
    file = data / "class0/file00000.bin"
    script = f'exec "$@" {closed}'
    code = run_in(hpcstage, script, sys.executable, "-c", OPEN, file, plain)
    wrapped = hpcstage.command("run", *options, "--data", data, "--")
    assert run_in(hpcstage, script, *wrapped, sys.executable, "-c", OPEN, file, ours) == code == 7
    assert ours.read_text().replace("ours", "plain") == plain.read_text()


@pytest.mark.parametrize("closed", CLOSED[:1] + CLOSED[-1:])
def test_closed_streams_of_a_command_that_is_not_there(hpcstage: Hpcstage, make_tree: Tree, closed: str) -> None:
    wrapped = hpcstage.command("run", "--data", make_tree(files=1), "--", "/nonexistent/command")
    assert run_in(hpcstage, f'exec "$@" {closed}', *wrapped) == 127
    assert run_in(hpcstage, f'exec "$@" {closed}', *hpcstage.command("run", "--mode", "bad")) == 2


@pytest.mark.parametrize("options", [[], ["--mode", "upfront"], ["--run-dir", "below"]], ids=["", "upfront", "run-dir"])
def test_the_working_directory_was_deleted(hpcstage: Hpcstage, make_tree: Tree, options: list[str]) -> None:
    data = make_tree(files=2)
    out = hpcstage.cwd / "out"
    code = "import sys; open(sys.argv[2], 'w').write(str(len(open(sys.argv[1]).read()))); sys.exit(7)"
    wrapped = hpcstage.command("run", *options, "--data", data, "--")
    file = data / "class0/file00000.bin"
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$@"'
    assert run_in(hpcstage, script, *wrapped, sys.executable, "-c", code, file, out) == 7
    assert out.read_text() == "10000"
    assert not list(hpcstage.cwd.glob("gone*"))
    if not options:
        assert list((hpcstage.cwd / "state").rglob("run.json"))


@pytest.mark.root
def test_the_working_directory_cannot_be_read(hpcstage: Hpcstage, make_tree: Tree) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    data = make_tree(files=2)
    closed = hpcstage.cwd / "closed"
    closed.mkdir(mode=0o700)
    for directory in (hpcstage.cwd, *hpcstage.cwd.parents[:-2]):
        directory.chmod(0o755)
    hpcstage.local_dir.chmod(0o777)
    wrapped = hpcstage.command("run", "--data", data, "--")
    become = 'cd closed && exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"'
    state = Path(f"/dev/shm/state-{hpcstage.cwd.name}")
    try:
        code = run_in(hpcstage, become, *wrapped, "sh", "-c", "exit 7", XDG_STATE_HOME=os.fspath(state), HOME="/tmp")
    finally:
        subprocess.run(["rm", "-rf", os.fspath(state)], check=True)
    assert code == 7


OPENS_MANY = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
while (number := os.dup(0)) < 1100:
    os.set_inheritable(number, True)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize("options", [["--mode", "upfront"], ["--nodes", "2"]], ids=["upfront", "nodes"])
def test_more_descriptors_are_open_than_select_takes(hpcstage: Hpcstage, make_tree: Tree, options: list[str]) -> None:
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("needs a limit of 2048 descriptors")
    words = hpcstage.command("run", *options, "--data", make_tree(files=2), "--", "sh", "-c", "exit 7")
    run = subprocess.run(
        [sys.executable, "-c", OPENS_MANY, *words],
        cwd=hpcstage.cwd, env=hpcstage.env, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 7, run.stderr
    assert json.loads(hpcstage.records()[-1].read_text())["complete"] is True, run.stderr


@pytest.mark.root
def test_a_umask_that_hides_what_its_user_makes(hpcstage: Hpcstage, make_tree: Tree) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    data = make_tree(files=2)
    for directory in (hpcstage.cwd, *hpcstage.cwd.parents[:-2]):
        directory.chmod(0o755)
    open_to_all = hpcstage.cwd / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    hpcstage.local_dir.chmod(0o777)
    become = 'umask 0777; exec setpriv --reuid=65534 --regid=65534 --clear-groups "$@"'
    wrapped = hpcstage.command("run", "--data", data, "--", "sh", "-c", "exit 7")
    done = subprocess.run(
        ["sh", "-c", become, "sh", *wrapped], cwd=open_to_all, capture_output=True, text=True, timeout=300, check=False,
        env={**hpcstage.env, "XDG_STATE_HOME": os.fspath(open_to_all), "HOME": os.fspath(open_to_all)},
    )  # fmt: skip
    assert done.returncode == 7
    (line,) = done.stderr.splitlines()
    assert "the umask 0777 takes this user's own rights to new files and directories away" in line
    assert line.endswith("(umask 022); the command runs without staging")
    assert not list(open_to_all.iterdir()), "no directory that its user could not use later"


def test_modules_of_others_on_the_commands_pythonpath(hpcstage: Hpcstage, make_tree: Tree) -> None:
    """Modules of a site put packages for other Pythons there."""
    theirs = hpcstage.cwd / "theirs"
    theirs.mkdir()
    for module in ("click", "rich", "yaml", "selectors", "psutil", "typing_extensions"):
        (theirs / f"{module}.py").write_text("raise ImportError('built for another Python')\n")
    (hpcstage.cwd / "hpcstage.yaml").write_text("mode: runtime\n")
    path = f"{theirs}:{hpcstage.env['PYTHONPATH']}"
    done = hpcstage("run", "--data", make_tree(files=1), "--", "sh", "-c", "exit 7", env={"PYTHONPATH": path})
    assert done.returncode == 7, done.stderr
    assert b"Error" not in done.stderr, done.stderr
    (record,) = hpcstage.records()
    assert problems(json.loads(record.read_text())) == [], "the daemon lived"
    assert hpcstage("report", env={"PYTHONPATH": path}).returncode == 0


SHORT_OF_MEMORY = """
import os, sys
def fails(event, arguments):
    reads = event != "open" or arguments[2] & os.O_ACCMODE == os.O_RDONLY
    if event == os.environ["FAILS"] and str(arguments[0]).rstrip("'").endswith(os.environ["AT"]) and reads:
        raise MemoryError("none left")
if sys.orig_argv[3:4] == ["run"]:
    sys.addaudithook(fails)
"""
"""Lets a wrapper fail at a system call as nobody expects it."""


def short_of_memory(hpcstage: Hpcstage, event: str, at: str) -> dict[str, str]:
    (hpcstage.cwd / "sitecustomize.py").write_text(SHORT_OF_MEMORY)
    return {"PYTHONPATH": f"{hpcstage.cwd}:{hpcstage.env['PYTHONPATH']}", "FAILS": event, "AT": at}


@pytest.mark.parametrize("mode", ["runtime", "upfront"])
def test_a_wrapper_that_fails_while_it_waits_or_looks_on(hpcstage: Hpcstage, make_tree: Tree, mode: str) -> None:
    env = short_of_memory(hpcstage, "open", "/page")
    words = ("run", "--mode", mode, "--data", make_tree(files=3), "--", "sh", "-c", "sleep 0.2; exit 7")
    done = hpcstage(*words, env=env)
    assert done.returncode == 7, done.stderr
    assert b"Traceback" not in done.stderr
    said = done.stderr.decode()
    assert "MemoryError: none left; the command runs now" in said
    assert "hpcstage: cannot look after the staging daemon: MemoryError: none left\n" in said
    record = json.loads(hpcstage.records()[0].read_text())
    assert record["run"]["exit_code"] == 7
    assert [problem["id"] for problem in problems(record)] == ["not-awaited"]
    strict = hpcstage(words[0], "--strict", *words[1:], env=env)
    assert strict.returncode == 125, strict.stderr


@pytest.mark.parametrize(("event", "at"), [("open", "/list.txt"), ("os.mkdir", "/nodes")])
def test_a_wrapper_that_fails_before_there_is_a_run(hpcstage: Hpcstage, make_tree: Tree, event: str, at: str) -> None:
    """In one case neither the results of the run nor those of its failure find a directory."""
    names = hpcstage.cwd / "list.txt"
    names.write_text(f"{make_tree(files=1)}/class0/file00000.bin\n")
    words = ("run", "--data", f"@{names}", "--", "sh", "-c", "exit 7")
    done = hpcstage(*words, env=short_of_memory(hpcstage, event, at))
    assert done.returncode == 7, done.stderr
    (line,) = done.stderr.decode().splitlines()
    assert line.endswith("MemoryError: none left; the command runs without staging")


@pytest.mark.parametrize("job", ["ƒ2fGdTv5Z", "a b/c", "7" * 200])
def test_the_id_of_a_job_is_no_plain_text(hpcstage: Hpcstage, make_tree: Tree, job: str) -> None:
    env = {"FLUX_JOB_ID": job, "FLUX_JOB_TMPDIR": os.fspath(hpcstage.local_dir)}
    done = hpcstage("run", "--data", make_tree(files=1), "--", "sh", "-c", "exit 7", env=env)
    assert done.returncode == 7, done.stderr
    assert len(hpcstage.records()) == 1
    shown = hpcstage("report", job)
    assert shown.returncode == 0, shown.stderr


def test_a_local_directory_that_takes_no_file_is_named(hpcstage: Hpcstage, make_tree: Tree) -> None:
    wrapped = hpcstage.command("run", "--data", make_tree(files=1), "--", "sh", "-c", "exit 7")
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 100; exec "$@"', "sh", *wrapped],
        cwd=hpcstage.cwd, env=hpcstage.env, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 7
    (line,) = [one for one in done.stderr.splitlines() if "without staging" in one]
    assert f"cannot write to the local directory {hpcstage.local_dir}: File too large" in line
    assert "ulimit -f" in line


def test_somebody_removes_the_copies(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=2)
    code = (
        "import os, shutil, sys; shutil.rmtree(os.environ['HPCSTAGE_NODE_DIR']); print(len(open(sys.argv[1]).read()))"
    )
    command = [sys.executable, "-c", code, os.fspath(data / "class0" / "file00000.bin")]
    done = hpcstage("run", "--mode", "upfront", "--data", data, "--", *command)
    assert (done.returncode, done.stdout) == (0, b"10000\n")
    assert b"was removed while the command ran" in done.stderr, done.stderr


FILE_SYSTEM = """
import os, sys
file = open(sys.argv[1], "rb")
file.seek(4)
told = [os.fstatvfs(file.fileno()).f_blocks, os.statvfs(file.fileno()).f_blocks]
assert told == 2 * [os.statvfs(sys.argv[1]).f_blocks], told
assert file.tell() == 4
assert os.readlink("/proc/self/fd/%d" % file.fileno()) != sys.argv[1], "it is still the copy"
"""


def test_the_file_system_of_a_copy_is_that_of_the_source(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree(files=1)
    assert os.statvfs(data).f_blocks != os.statvfs(hpcstage.local_dir).f_blocks
    file = next(path for path in data.rglob("*") if path.is_file())
    done = hpcstage("run", "--mode", "upfront", "--data", data, "--", sys.executable, "-c", FILE_SYSTEM, file)
    assert done.returncode == 0, done.stderr
