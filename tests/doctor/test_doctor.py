"""`hpcstage doctor` on a sound machine, and with a fault of each kind: it is found in bounded time, with what to do."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pty
import shlex
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import REPO, Hpcstage, small_tmpfs
from slowsource import slow_source

from hpcstage.emulator import Settings, unavailable
from hpcstage.node import shimdir

Tree = Callable[..., Path]
Words = str | bytes | os.PathLike[str]
OTHER = 65534
"""More than all that has to be waited for: two file systems that hang, on a busy machine."""
needs_emulator = pytest.mark.skipif(unavailable() is not None, reason=f"emulator: {unavailable()}")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount or to own as another")


class Doctor:
    """Runs `hpcstage doctor --json`, and knows its findings."""

    def __init__(self, hpcstage: Hpcstage) -> None:
        self.hpcstage = hpcstage
        self.findings: list[dict[str, str]] = []

    def __call__(self, *words: Words, before: tuple[str, ...] = (), **env: str) -> int:
        """Runs it, behind the words of another program; returns its exit code."""
        command = [*before, *self.hpcstage.command("doctor", "--json", *words)]
        env = {**self.hpcstage.env, **env}
        done = subprocess.run(command, cwd=self.hpcstage.cwd, env=env, capture_output=True, timeout=300, check=False)
        assert not done.stderr, done.stderr.decode()
        found = json.loads(done.stdout)
        assert found["host"] == socket.gethostname()
        assert found["works"] == (done.returncode == 0)
        self.findings = found["findings"]
        return done.returncode

    def found(self, check: str, level: str) -> dict[str, str]:
        """The only finding of a check at a level."""
        (one,) = [item for item in self.findings if (item["check"], item["level"]) == (check, level)]
        return one

    @property
    def wrong(self) -> list[dict[str, str]]:
        """All that is not right, but for the local directory of tests, which is memory."""
        return [item for item in self.findings if item["level"] != "ok" and " is memory (" not in item["text"]]

    @property
    def worst(self) -> set[tuple[str, str]]:
        """Check and level of all that is not right."""
        return {(item["check"], item["level"]) for item in self.wrong}


@pytest.fixture
def doctor(hpcstage: Hpcstage) -> Doctor:
    """The command on this machine, for one node: no MPI is tried."""
    hpcstage.env["HPCSTAGE_NODES"] = "1"
    return Doctor(hpcstage)


@pytest.fixture
def several(hpcstage: Hpcstage) -> Doctor:
    """The same for as many nodes as there may be."""
    return Doctor(hpcstage)


@pytest.fixture
def other_python(tmp_path: Path) -> Path:
    """A Python of an environment of its own, without any package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    return tmp_path / "venv" / "bin" / "python"


@pytest.fixture
def lack(hpcstage: Hpcstage, other_python: Path, tmp_path: Path) -> Callable[..., None]:
    """Has hpcstage run by a Python that has all packages but those whose names begin so."""

    def make(*names: str) -> None:
        packages = tmp_path / "packages"
        packages.mkdir()
        for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
            if not path.name.startswith(names):
                (packages / path.name).symlink_to(path)
        hpcstage.python = os.fspath(other_python)
        hpcstage.env |= {"PYTHONPATH": f"{REPO}{os.pathsep}{packages}"}

    return make


@contextlib.contextmanager
def hung(path: Path) -> Iterator[Path]:
    """A file system that never answers."""
    path.mkdir()
    try:
        device = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("no FUSE")
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    if ctypes.CDLL(None).mount(b"hung", os.fsencode(path), b"fuse", 0, options):
        os.close(device)
        pytest.skip("mounting is not permitted")
    try:
        yield path
    finally:
        os.close(device)
        subprocess.run(["umount", "-l", path], check=True)


def silence(path: object) -> str:
    return f"{path} does not answer (waited 5 s)"


# ---- nothing is wrong


def test_a_sound_machine(several: Doctor, make_tree: Tree) -> None:
    data = make_tree()
    assert several("--data", data, "--", sys.executable, "train.py") == 0, several.findings
    if find_spec("mpi4py"):
        assert "connects two processes on this host" in several.found("nodes", "ok")["text"]
    assert several.found("scheduler", "ok")["text"].startswith(f"none on {socket.gethostname()}")
    assert several.found("local directory", "ok")["text"].startswith(str(several.hpcstage.local_dir))
    assert several.found(f"dataset {data}", "ok")["text"].startswith(f"{data} can be read, on ")
    if shimdir.native_available():
        assert several.found("python", "ok")["text"].endswith("the native layer attaches")
    assert not list((several.hpcstage.cwd).glob("hpcstage-runs*"))
    assert ("python", "error") not in several.worst


def test_one_line_for_each_check(hpcstage: Hpcstage, make_tree: Tree) -> None:
    data = make_tree()
    done = hpcstage("doctor", "--data", data, "--data", hpcstage.cwd / "nowhere\n", "--", sys.executable, "train.py")
    assert (done.returncode, done.stderr) == (1, b"")
    *lines, last = done.stdout.decode().splitlines()
    assert {line.split()[0] for line in lines} >= {"ok", "error"}
    assert len({line.split(":")[0] for line in lines}) == len(lines), lines
    assert last == "a run would not work here: see the errors above"
    quiet = hpcstage("doctor", "-q", "--data", data, "--data", hpcstage.cwd / "nowhere\n")
    assert not any(line.startswith("ok") for line in quiet.stdout.decode().splitlines())


def test_colours_are_for_a_terminal(hpcstage: Hpcstage) -> None:
    leader, follower = pty.openpty()
    try:
        done = subprocess.Popen(
            hpcstage.command("doctor"), cwd=hpcstage.cwd, env=hpcstage.env, stdin=follower, stdout=follower
        )
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # the terminal's last process has ended
            while piece := os.read(leader, 65536):
                shown += piece
        assert done.wait(300) == 0
        assert b"\x1b[32mok" in shown
    finally:
        os.close(leader)
    assert b"\x1b" not in hpcstage("doctor").stdout


def test_bad_usage(hpcstage: Hpcstage) -> None:
    for words in (["--bogus"], ["--mode", "fast"], ["--config", "nowhere.yaml"]):
        done = hpcstage("doctor", *words)
        assert (done.returncode, done.stdout, done.stderr.count(b"\n")) == (2, b"", 1), words


def test_what_a_launcher_starts(doctor: Doctor, other_python: Path, tmp_path: Path) -> None:
    """The Python is found behind other programs, and in the first line of a script."""
    script = tmp_path / "torchrun"
    script.write_text(f"#!{other_python} -E\n")
    script.chmod(0o755)
    for words in (["env", "A=b", other_python, "-u", "-Im", "x"], [other_python, "-X", "dev", "-I", "x"], [script]):
        assert doctor("--", *words) == 1
        assert str(other_python) in doctor.found("python", "error")["text"]


def test_a_python_in_a_container_is_not_that_of_this_machine(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "apptainer").write_text("#!/bin/sh\n")
    (tmp_path / "apptainer").chmod(0o755)
    assert doctor("--", tmp_path / "apptainer", "exec", "image.sif", "python", "train.py") == 0
    assert "was not tried" in doctor.found("python", "warning")["text"]


# ---- the Python and the shim


def test_fault_no_extension(doctor: Doctor, tmp_path: Path) -> None:
    shutil.copytree(REPO / "hpcstage", tmp_path / "clone" / "hpcstage", ignore=shutil.ignore_patterns("*.so"))
    assert doctor("--", sys.executable, "train.py", PYTHONPATH=os.fspath(tmp_path / "clone")) == 0
    assert doctor.worst == {("extensions", "warning"), ("python", "warning")}
    assert "Python layer" in doctor.found("python", "warning")["text"]
    assert "C compiler" in doctor.found("extensions", "warning")["remedy"]


@pytest.mark.parametrize("options", [["-I"], ["-E"], ["-S"], ["-W", "error", "-uIc", "pass"]])
def test_fault_a_python_that_ignores_the_environment(doctor: Doctor, other_python: Path, options: list[str]) -> None:
    assert doctor("--", other_python, *options, "train.py") == 1
    found = doctor.found("python", "error")
    assert "does not attach" in found["text"]
    words = shlex.split(found["remedy"].partition(", or hpcstage ")[2])
    assert words[:2] == ["install-hook", "--python"]
    if options == ["-I"]:
        assert doctor.hpcstage(*words).returncode == 0
        assert doctor("--", other_python, *options, "train.py") == 0, doctor.findings


def test_fault_an_interpreter_that_cannot_be_read(doctor: Doctor, tmp_path: Path) -> None:
    python = tmp_path / "python3"
    shutil.copy(sys.executable, python)
    python.chmod(0)
    assert doctor("--", python, "train.py") == 1
    assert doctor.worst == {("python", "error")}
    assert "Permission denied" in doctor.found("python", "error")["text"]


@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_fault_a_static_program_in_the_place_of_python(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text("int main(void) { return 7; }\n")
    subprocess.run(["cc", "-static", "-o", tmp_path / "python3", tmp_path / "main.c"], check=True)
    assert doctor("--", tmp_path / "python3", "train.py") == 1
    assert doctor.found("python", "error")["text"].endswith("does not run as Python does: exit code 7")


def test_fault_a_command_that_is_not_there(doctor: Doctor) -> None:
    assert doctor("--", "/nonexistent/python", "train.py") == 1
    assert "No such file" in doctor.found("python", "error")["text"]


def test_fault_a_command_that_is_not_python(doctor: Doctor) -> None:
    assert doctor("--", "tar", "cf", "-") == 0
    assert "tar is not Python" in doctor.found("python", "warning")["text"]


def test_fault_no_torch(doctor: Doctor, other_python: Path) -> None:
    assert doctor("--", other_python, "train.py") == 0
    assert "has no PyTorch" in doctor.found("torch", "ok")["text"]
    assert doctor("--elastic", "1:2", "--", other_python, "train.py") == 1
    assert "has no PyTorch" in doctor.found("options", "error")["text"]


def test_fault_switched_off(doctor: Doctor) -> None:
    assert doctor(HPCSTAGE_DISABLE="1") == 1
    assert doctor.found("hpcstage", "error")["remedy"] == "unset HPCSTAGE_DISABLE"
    assert doctor("--intercept", "off", "--", sys.executable, "x") == 1
    assert "--intercept off" in doctor.found("python", "error")["text"]


# ---- the local directory


@needs_emulator
def test_fault_tmpdir_on_a_network_file_system(doctor: Doctor, tmp_path: Path) -> None:
    with slow_source(tmp_path / "behind", Settings()) as slow:
        env = {"HPCSTAGE_LOCAL_DIR": "auto", "TMPDIR": os.fspath(slow.path)}
        assert doctor(**env) == 0
        assert "a network file system" in doctor.found("local directory", "warning")["text"]
        assert doctor(**env, SLURM_JOB_ID="1", SLURM_JOB_NODELIST=socket.gethostname()) == 1
        found = doctor.found("local directory", "error")
        assert "a network file system" in found["text"]
        assert "--local-dir" in found["remedy"]


@needs_root
@pytest.mark.parametrize(
    ("options", "fill", "said"),
    [
        ("size=64k", "bytes", "is full"),
        ("size=1m", "", "cannot write to the local directory"),
        ("nr_inodes=9", "inodes", "has no inodes left"),
        ("ro", "", "is not writable"),
    ],
)
def test_fault_a_local_disk_without_room(doctor: Doctor, tmp_path: Path, options: str, fill: str, said: str) -> None:
    with small_tmpfs(tmp_path / "small", options) as small:
        with contextlib.suppress(OSError):
            for number in range(100 if fill else 0):
                (small / str(number)).write_bytes(b"x" * 4096 * (fill == "bytes"))
        assert doctor("--local-dir", small) == 1
        found = doctor.found("local directory", "error")
        assert said in found["text"], found
        assert found["remedy"]
        assert not list(small.glob("hpcstage-*/*-*"))


@needs_root
@pytest.mark.parametrize("planted", ["another user's", "a link"])
def test_fault_a_node_directory_that_another_made(
    doctor: Doctor, local_dir: Path, tmp_path: Path, planted: str
) -> None:
    base = local_dir / f"hpcstage-{os.geteuid()}"
    if planted == "a link":
        base.symlink_to(tmp_path)
    else:
        base.mkdir()
        os.chown(base, OTHER, OTHER)
    assert doctor() == 1
    found = doctor.found("local directory", "error")
    assert (f"belongs to user {OTHER}" in found["text"]) or ("is a symbolic link" in found["text"])
    assert "another --local-dir" in found["remedy"]


def test_fault_a_scheduler_without_a_local_disk(doctor: Doctor) -> None:
    job = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": socket.gethostname(), "HPCSTAGE_LOCAL_DIR": "auto"}
    assert doctor(**job, TMPDIR="") == 1
    assert "no node-local directory" in doctor.found("local directory", "error")["text"]
    assert "ask the scheduler" in doctor.found("local directory", "error")["remedy"]
    assert doctor(**job, TMPDIR="/tmp") == 1
    assert "was not made for this job" in doctor.found("local directory", "error")["text"]
    assert doctor("--local-dir", "none") == 1
    assert doctor.found("local directory", "error")["remedy"] == "give --local-dir"


def test_fault_a_host_that_is_no_node_of_the_job(doctor: Doctor) -> None:
    assert doctor(SLURM_JOB_ID="1", SLURM_JOB_NODELIST="elsewhere[1-2]") == 1
    assert "is not a node of job 1 (its nodes: elsewhere[1-2])" in doctor.found("scheduler", "error")["text"]


@needs_root
def test_fault_a_local_directory_that_hangs(doctor: Doctor, tmp_path: Path) -> None:
    with hung(tmp_path / "hung") as path:
        assert doctor("--local-dir", path) == 1
        assert doctor.found("local directory", "error")["text"] == silence(path)
        assert doctor(HPCSTAGE_LOCAL_DIR="auto", TMPDIR=os.fspath(path)) == 1
        assert doctor.found("local directory", "error")["text"] == silence(path)


# ---- the nodes


def test_fault_no_mpi4py(several: Doctor, lack: Callable[..., None]) -> None:
    lack("mpi4py")
    assert several() == 0
    found = several.found("nodes", "warning")
    assert "each stages for itself: mpi4py is not installed" in found["text"]
    assert "pip install mpi4py mpich" in found["text"]
    assert several("--nodes", "1") == 0
    assert not several.worst


def test_fault_no_mpi_library(several: Doctor, lack: Callable[..., None], other_python: Path) -> None:
    """mpi4py is there, and neither mpiexec nor a library that it could load; then only the library is missing."""
    pytest.importorskip("mpi4py")
    lack("mpich")
    env = {"PATH": "/usr/bin:/bin"}
    if shutil.which("mpiexec", path=env["PATH"]):
        pytest.skip("this machine has an MPI of its own")
    assert several(**env) == 0
    assert "each stages for itself: there is no mpiexec" in several.found("nodes", "warning")["text"]
    assert "pip install mpi4py mpich" in several.found("nodes", "warning")["remedy"]
    for name in ("mpiexec", "hydra_pmi_proxy"):
        (other_python.parent / name).symlink_to(Path(sys.executable).parent / name)
    assert several(**env) == 0
    assert "mpi4py cannot be used" in several.found("nodes", "warning")["text"]


def test_fault_a_run_directory_that_others_write_to(several: Doctor) -> None:
    shared, state = several.hpcstage.cwd / "shared", several.hpcstage.cwd / "state"
    for path in shared, state:
        path.mkdir()
        path.chmod(0o777)
        for above in path.parents:
            if above.stat().st_uid == os.geteuid() and not above.stat().st_mode & 0o001:
                above.chmod(0o711)
    assert several("--nodes", "2", "--run-dir", shared / "run") == 0
    assert "everybody may write to" in several.found("nodes", "warning")["text"]


def test_fault_no_packages_for_checkpoints(doctor: Doctor, lack: Callable[..., None]) -> None:
    lack("numpy", "xxhash")
    assert doctor() == 0
    assert "numpy, xxhash are not installed" in doctor.found("checkpoints", "ok")["text"]
    assert doctor("--checkpoint", "ckpt") == 1
    found = doctor.found("checkpoints", "error")
    assert found["remedy"].startswith("pip install ")
    done = doctor.hpcstage("run", "--checkpoint", "ckpt", "--", "true")
    assert done.returncode == 0
    assert f"numpy, xxhash are not installed ({found['remedy']})" in done.stderr.decode()
    assert "without staging" not in done.stderr.decode()


# ---- the datasets


def test_fault_a_dataset_that_is_not_there(doctor: Doctor, make_tree: Tree, tmp_path: Path) -> None:
    data = make_tree()
    assert doctor("--data", data, "--data", tmp_path / "nowhere") == 1
    assert doctor.found(f"dataset {tmp_path / 'nowhere'}", "error")["text"].endswith("does not exist")
    assert doctor.found(f"dataset {data}", "ok")


def test_fault_a_dataset_that_cannot_be_read(doctor: Doctor, make_tree: Tree) -> None:
    data = make_tree()
    drop = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") if os.geteuid() == 0 else ()
    if drop and shutil.which(drop[0]) is None:
        pytest.skip("needs setpriv, to be no root")
    data.chmod(0)
    try:
        assert doctor("--data", data, before=drop) == 1
    finally:
        data.chmod(0o700)
    found = doctor.found(f"dataset {data}", "error")
    assert (found["text"], found["remedy"]) == (
        f"--data {data} cannot be read: Permission denied",
        "check the permissions",
    )


def test_fault_a_dataset_that_is_already_local(doctor: Doctor, local_dir: Path) -> None:
    data = local_dir / "data"
    data.mkdir()
    (data / "a").write_text("b")
    assert doctor("--data", data) == 0
    assert "already on the node-local disk" in doctor.found(f"dataset {data}", "warning")["text"]


@needs_root
def test_fault_a_dataset_that_hangs(doctor: Doctor, make_tree: Tree, tmp_path: Path) -> None:
    data = make_tree()
    with hung(tmp_path / "hung") as path:
        assert doctor("--data", path / "train", "--data", data) == 1
        assert doctor.found(f"dataset {path / 'train'}", "error")["text"] == silence(path / "train")
        assert doctor.found(f"dataset {data}", "ok")
        assert doctor("--data", data, "--out", path / "out") == 1
        assert doctor.found("options", "error")["text"] == silence(path / "out")
        environment = {"PATH": f"{path}:{os.environ['PATH']}"}
        assert doctor("--", "python", "x", **environment) == 1
        assert "python, or a directory of PATH, does not answer" in doctor.found("python", "error")["text"]


@needs_emulator
def test_a_dataset_that_answers_slowly(doctor: Doctor, tmp_path: Path) -> None:
    """All answers together take longer than the time after which a file system counts as one that hangs."""
    with slow_source(tmp_path / "behind", Settings(metadata_latency_s=2.0), a=b"b") as slow:
        began = time.monotonic()
        assert doctor("--data", slow.path) == 0, doctor.findings
        assert time.monotonic() - began > 4 * 5
        assert "can be read, on fuse" in doctor.found(f"dataset {slow.path}", "ok")["text"]


@needs_root
def test_file_systems_below_a_dataset_are_counted(doctor: Doctor, make_tree: Tree) -> None:
    data = make_tree()
    with small_tmpfs(data / "more", "size=1m"):
        assert doctor("--data", data) == 0
        assert doctor.found(f"dataset {data}", "ok")["text"].endswith(", and 1 file system below it (tmpfs)")


def test_fault_options_that_do_not_go_together(doctor: Doctor, make_tree: Tree) -> None:
    data = make_tree()
    assert doctor("--data", data, "--data", data / "class0") == 1
    assert "overlap" in doctor.found("options", "error")["text"]
    assert doctor("--out", "results", "--checkpoint", "results") == 1
    assert "lie in each other" in doctor.found("options", "error")["text"]


def test_a_list_that_can_be_read_once_is_left_to_the_run(doctor: Doctor, make_tree: Tree) -> None:
    data = make_tree()
    listing = doctor.hpcstage.cwd / "list"
    os.mkfifo(listing)
    assert doctor("--data", f"@{listing}", "--data", data) == 0
    assert doctor.found(f"dataset @{listing}", "ok")["text"] == "a pipe, which only the run can read"


@pytest.mark.parametrize(("limit", "said"), [("watches", "max_user_watches"), ("instances", "max_user_instances")])
def test_fault_no_inotify(doctor: Doctor, make_tree: Tree, limit: str, said: str) -> None:
    script = f'echo 0 >/proc/sys/user/max_inotify_{limit} && exec "$@"'
    before = ("unshare", "--user", "--map-root-user", "sh", "-c", script, "sh")
    if subprocess.run([*before, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs user namespaces")
    assert doctor("--data", make_tree(), before=before) == 0
    found = doctor.found("inotify", "warning")
    assert said in found["text"]
    assert "--mode direct" in found["remedy"]


# ---- a run says the same


@needs_root
@pytest.mark.parametrize("fault", ["no dataset", "no room", "not Python", "already local", "no mpi4py", "no command"])
def test_a_run_says_the_same(
    doctor: Doctor, make_tree: Tree, tmp_path: Path, local_dir: Path, lack: Callable[..., None], fault: str
) -> None:
    words: list[Words] = ["--data", make_tree()]
    command: list[Words] = [sys.executable, "-c", "pass"]
    with contextlib.ExitStack() as undo:
        if fault == "no dataset":
            words = ["--data", tmp_path / "nowhere"]
        elif fault == "no room":
            words += ["--local-dir", undo.enter_context(small_tmpfs(tmp_path / "small", "size=1m"))]
        elif fault == "not Python":
            command = ["true"]
        elif fault == "already local":
            (local_dir / "data").mkdir()
            (local_dir / "data" / "a").write_text("b")
            words = ["--data", local_dir / "data"]
        elif fault == "no mpi4py":
            words += ["--nodes", "2"]
            lack("mpi4py")
        else:
            command = ["/nonexistent/program"]
        doctor(*words, "--", *command)
        done = doctor.hpcstage("run", *words, "--", *command)
    found = doctor.wrong[0]
    assert found["text"] in done.stderr.decode()
    if fault != "no mpi4py":  # the report has the remedy
        assert found["remedy"] in done.stderr.decode()
