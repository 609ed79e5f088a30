"""What every test gets: a place on another file system, the real command line, and a hunt for what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy machine makes any example slow
hypothesis.settings.load_profile("any machine")
REPO = Path(__file__).resolve().parent.parent
SHM = Path("/dev/shm")
GONE_S = 90.0
MARK = "HPCSTAGE_TEST_SESSION"
SESSION = f"{os.getpid()}-{time.monotonic_ns()}"
OF_BENCHMARK = re.compile(rf"/(?:hpcstage-bench-{os.getuid()}|netns/hpcstage)-(\d+)-")
OF_EMULATOR = re.compile(r"hpcstage-slowfs-(\d+)-")
OF_FIGURES = re.compile(
    r"nothing-|processes-missed|shim-|uncounted|python-layer|direct-|slow-|dropped|idle-nodes|preprocessing"
)
OF_TESTS = re.compile(r"/pytest-of-[^/]+/pytest-\d+/")
GLOO = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
"""For programs of several ranks: they meet on loopback, whatever this machine's name leads to."""


def pytest_configure(config: pytest.Config) -> None:
    """Has what tests start end by SIGINT, SIGQUIT and SIGHUP, as in a terminal: nohup, and a shell for its background
    jobs, has programs ignore some of them, which hpcstage keeps to. A handler of this process is none of theirs. What
    libraries and killed programs leave in TMPDIR goes with the session."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number is signal.SIGINT else lambda *_: None)
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    own = tempfile.mkdtemp(prefix="ht-")
    config.add_cleanup(lambda: shutil.rmtree(own, ignore_errors=True))
    os.environ["TMPDIR"] = os.environ["XDG_RUNTIME_DIR"] = tempfile.tempdir = own


def problems(record: dict[str, Any]) -> list[dict[str, str]]:
    """The notes of a record that a program told, without those that follow from the record's figures."""
    return [note for note in record["notes"] if not OF_FIGURES.match(note["id"])]


@contextlib.contextmanager
def shim_modules() -> Iterator[None]:
    """The shim's Python modules can be imported, as they can in a program."""
    before = sys.path[:]
    sys.path[:0] = [os.fspath(REPO / "hpcstage" / "shim" / name) for name in ("python", "torch")]
    try:
        yield
    finally:
        sys.path[:] = before


def torchrun(ranks: int, program: Path, *words: object) -> list[str]:
    """Starts the ranks of a program on this machine, without asking anyone for its name."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    return [*launcher, f"--nproc-per-node={ranks}", os.fspath(program), *map(str, words)]


def wait_for(condition: Callable[[], bool], timeout_s: float = 120.0, what: str = "condition") -> None:
    """Polls until the condition holds; fails the test after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in {timeout_s} s"
        time.sleep(0.01)


def below(pid: int) -> list[tuple[psutil.Process, list[str]]]:
    """The live processes below one, wherever in the tree, each with its command line; parents before children."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie, too
            found.append((process, process.cmdline()))
    return found


def kill_all(wrapper: subprocess.Popen[bytes]) -> None:
    """Kills a run at once, as a node's death would: wrapper, daemon, the daemon's processes and the command."""
    family = [psutil.Process(wrapper.pid), *psutil.Process(wrapper.pid).children(recursive=True)]
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)
    wrapper.wait()
    psutil.wait_procs(family, timeout=300)


@contextlib.contextmanager
def small_tmpfs(path: Path, options: str) -> Iterator[Path]:
    """A file system in memory at a new directory; needs root."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def _mounts() -> set[tuple[str, str]]:
    """Names and paths, but for the one that `ip netns` makes once on a machine."""
    lines = Path("/proc/self/mounts").read_text(errors="replace").splitlines()
    return {(name, path) for name, path in (line.split()[:2] for line in lines) if path != "/run/netns"}


def _is_of_others(name: str, path: str, own: Path) -> bool:
    """A mount of a benchmark, or of other tests, that run beside these; `own` is the directory of these. The names tell
    who made it."""
    if OF_TESTS.search(path) and not Path(path).is_relative_to(own):
        return True
    maker = OF_BENCHMARK.search(path) or OF_EMULATOR.match(name)
    if maker is None or int(maker[1]) == os.getpid():
        return False
    try:
        return psutil.Process(int(maker[1])).environ().get(MARK) != SESSION
    except psutil.Error:
        return False


def _marked() -> list[psutil.Process]:
    """Live processes that descend from this test session, wherever they were re-parented to."""
    mark, found = f"{MARK}={SESSION}\0".encode(), []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if pid != os.getpid() and mark in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(psutil.Process(pid))
    return found


@pytest.fixture(autouse=True)
def leaks(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails a test that leaves a process or a mount behind."""
    own = tmp_path_factory.getbasetemp()
    mounts = _mounts()
    monkeypatch.setenv(MARK, SESSION)
    yield
    deadline = time.monotonic() + GONE_S
    while (left := _marked()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left, f"processes left behind: {left}"
    mounted = {path for name, path in _mounts() - mounts if not _is_of_others(name, path, own)}
    assert not mounted, f"mounts left behind: {mounted}"


@pytest.fixture
def local_dir() -> Iterator[Path]:
    """A node-local directory on another file system than tmp_path."""
    if not os.access(SHM, os.W_OK):
        pytest.skip("needs a writable /dev/shm as a second file system")
    path = Path(tempfile.mkdtemp(prefix="test-hpcstage-", dir=SHM))
    yield path
    left = [p for p in path.glob("hpcstage-*/*") if p.is_dir()]
    shutil.rmtree(path, ignore_errors=True)
    assert not left, f"node directories left behind: {left}"


class Hpcstage:
    """Runs the real command line in a clean environment."""

    def __init__(self, cwd: Path, local_dir: Path) -> None:
        self.cwd = cwd
        self.local_dir = local_dir
        self.python = sys.executable
        self._started: list[subprocess.Popen[bytes]] = []
        scheduler = ("SLURM", "PBS", "SGE", "PE_", "JOB_ID", "HPCSTAGE", "XDG_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(scheduler)}
        self.env = {
            **kept,
            "PYTHONPATH": os.fspath(REPO),
            "HPCSTAGE_LOCAL_DIR": os.fspath(local_dir),
            "XDG_RUNTIME_DIR": tempfile.gettempdir(),
            "XDG_STATE_HOME": os.fspath(cwd / "state"),
            "XDG_CONFIG_HOME": os.fspath(cwd / "config"),
        }

    def command(self, *arguments: str | bytes | os.PathLike[str]) -> list[str | bytes]:
        """The command line for some arguments."""
        return [self.python, "-m", "hpcstage", *(os.fspath(a) for a in arguments)]

    def __call__(
        self,
        *arguments: str | bytes | os.PathLike[str],
        env: Mapping[str, str] | None = None,
        timeout_s: float = 400,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[bytes]:
        """Runs it to its end."""
        return subprocess.run(
            self.command(*arguments),
            cwd=cwd or self.cwd,
            env={**self.env, **(env or {})},
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )

    def start(
        self, *arguments: str | bytes | os.PathLike[str], env: Mapping[str, str] | None = None, **popen: object
    ) -> subprocess.Popen[bytes]:
        """Starts it and returns at once."""
        started: subprocess.Popen[bytes] = subprocess.Popen(
            self.command(*arguments),
            cwd=self.cwd,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **popen,  # type: ignore[call-overload]
        )
        self._started.append(started)
        return started

    def end(self) -> None:
        """Waits for what a test has started and not waited for; what does not end is killed and fails the test."""
        running = []
        for process in self._started:
            try:
                process.wait(GONE_S)
            except subprocess.TimeoutExpired:
                running.append(process.args)
                process.kill()
                process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        assert not running, f"started and left running: {running}"

    def records(self) -> list[Path]:
        """The records of all runs below the working directory, oldest first."""
        return sorted(self.cwd.glob("hpcstage-runs/*/run.json"), key=lambda p: p.stat().st_mtime_ns)


@pytest.fixture
def hpcstage(tmp_path: Path, local_dir: Path) -> Iterator[Hpcstage]:
    """The command line, with a working directory, state and configuration of its own."""
    made = Hpcstage(tmp_path, local_dir)
    yield made
    made.end()


@pytest.fixture
def make_tree(tmp_path: Path) -> Callable[..., Path]:
    """Makes a dataset of files with contents that follow from their names."""

    def make(name: str = "data", files: int = 20, size_bytes: int = 10_000) -> Path:
        root = tmp_path / name
        for index in range(files):
            path = root / f"class{index % 3}" / f"file{index:05d}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content(index, size_bytes))
        return root

    return make


def content(index: int, size_bytes: int) -> bytes:
    """Bytes that differ from file to file."""
    block = index.to_bytes(4, "little") * 64
    return (block * (size_bytes // len(block) + 1))[:size_bytes]


def python_command(code: str, *arguments: str | os.PathLike[str]) -> Sequence[str]:
    """A command that runs Python code."""
    return [sys.executable, "-c", code, *(os.fspath(a) for a in arguments)]
