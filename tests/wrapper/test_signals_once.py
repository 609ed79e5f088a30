"""Every signal reaches the command once, whoever sends it: the scheduler to every process of the job, to the process
group or to the wrapper alone, or a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest
from conftest import Hpcstage, wait_for

from hpcstage.wrapper.child import Witness

Tree = Callable[..., Path]

COUNTER = """
import signal, sys
wanted = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
open(sys.argv[1], "w").close()
wait_s = 30
with open(sys.argv[2], "w", buffering=1) as seen:
    while (info := signal.sigtimedwait(wanted, wait_s)) is not None:
        print(int(info.si_signo), file=seen)
        wait_s = 0.7
"""
"""Notes all signals until none has come for a while: longer than a wrapper takes to pass one on."""
PBS = {"PBS_JOBID": "7.server", "PBS_ENVIRONMENT": "PBS_BATCH"}
GRIDENGINE = {"JOB_ID": "7", "SGE_ROOT": "/opt/sge", "SGE_TASK_ID": "undefined"}
SLURM = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node1", "SLURM_JOB_NODELIST": "node1"}


class Job:
    """A job's script: hpcstage as the first process of a session, and a command that counts signals."""

    def __init__(self, hpcstage: Hpcstage, data: Path, env: Mapping[str, str], prefix: tuple[str, ...] = ()) -> None:
        ready, self.noted = hpcstage.cwd / "ready", hpcstage.cwd / "seen"
        program = [sys.executable, "-c", COUNTER, os.fspath(ready), os.fspath(self.noted)]
        words = ["run", "-q", "--data", os.fspath(data), "--", *prefix, *program]
        self.wrapper = hpcstage.start(*words, env=env, start_new_session=True)
        wait_for(ready.exists, 120, "the command's start")
        wait_for(lambda: len(self.processes()) == 3, 120, "the command's witness")

    def processes(self) -> list[int]:
        """Those of its session, parents before children."""
        tree = [self.wrapper.pid, *(child.pid for child in psutil.Process(self.wrapper.pid).children(recursive=True))]
        return [pid for pid in tree if _session(pid) == self.wrapper.pid]

    def seen(self) -> list[int]:
        """The signals that the command got, once it has ended."""
        self.wrapper.communicate(timeout=300)
        assert self.wrapper.returncode == 0
        return self.seen_so_far()

    def seen_so_far(self) -> list[int]:
        """The signals that the command has noted."""
        return [int(word) for word in self.noted.read_text().split()]


def _session(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getsid(pid)
    return 0


def to_all(job: Job, number: int) -> None:
    """As PBS: one after the other, to every process of the session, its leader first."""
    for pid in job.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def to_all_slowly(job: Job, number: int) -> None:
    """The same, but the wrapper last and once the command has noted it: a second one cannot hide behind the first."""
    before = len(job.seen_so_far())
    wrapper, *others = job.processes()
    for pid in others:
        with contextlib.suppress(ProcessLookupError):  # the witness of the signal before may just be going
            os.kill(pid, number)
    wait_for(lambda: len(job.seen_so_far()) > before, 120, "the command's note")
    os.kill(wrapper, number)


def to_group(job: Job, number: int) -> None:
    """As Grid Engine with -notify."""
    os.killpg(job.wrapper.pid, number)


def to_wrapper(job: Job, number: int) -> None:
    """As Slurm with cgroups, or a person."""
    os.kill(job.wrapper.pid, number)


@pytest.mark.parametrize(
    ("env", "send", "number"),
    [
        (PBS, to_all, signal.SIGTERM),
        (PBS, to_all_slowly, signal.SIGTERM),
        (PBS, to_wrapper, signal.SIGTERM),
        (GRIDENGINE, to_group, signal.SIGUSR2),
        (GRIDENGINE, to_wrapper, signal.SIGUSR1),
        (SLURM, to_wrapper, signal.SIGTERM),
        (SLURM, to_group, signal.SIGTERM),
        ({}, to_all, signal.SIGHUP),
    ],
)
def test_a_signal_reaches_the_command_once(
    hpcstage: Hpcstage,
    make_tree: Tree,
    env: Mapping[str, str],
    send: Callable[[Job, int], None],
    number: signal.Signals,
) -> None:
    job = Job(hpcstage, make_tree(files=1), env)
    send(job, number)
    assert job.seen() == [number]


def test_several_signals_in_turn_are_told_apart(hpcstage: Hpcstage, make_tree: Tree) -> None:
    job = Job(hpcstage, make_tree(files=1), PBS)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        before = set(job.processes())
        to_all_slowly(job, number)
        wait_for(lambda found=before: len(set(job.processes()) - found) == 1, 120, "another witness")  # type: ignore[misc]
    to_wrapper(job, signal.SIGUSR2)
    assert sorted(job.seen()) == sorted([signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2])


def test_equal_signals_in_quick_succession_all_reach_the_command(hpcstage: Hpcstage, make_tree: Tree) -> None:
    job = Job(hpcstage, make_tree(files=1), SLURM)
    for _ in range(3):
        to_wrapper(job, signal.SIGUSR1)
        with contextlib.suppress(AssertionError, TimeoutError):  # a wrapper that takes longer than this loses the next
            wait_for(lambda: not _is_pending(job.wrapper.pid, signal.SIGUSR1), 0.1, "that the wrapper takes it")
    assert job.seen() == [signal.SIGUSR1] * 3


def _is_pending(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    masks = [int(line.split()[1], 16) for line in status if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (number - 1) & 1 for mask in masks)


@pytest.mark.parametrize("send", [to_all, to_all_slowly, to_group, to_wrapper])
def test_a_command_with_a_process_group_of_its_own(
    hpcstage: Hpcstage, make_tree: Tree, send: Callable[[Job, int], None]
) -> None:
    """As `timeout` and shells with job control: signals to the wrapper's process group do not reach it."""
    group = "import os, sys; os.setpgid(0, 0); os.execv(sys.argv[1], sys.argv[1:])"
    job = Job(hpcstage, make_tree(files=1), PBS, (sys.executable, "-c", group))
    (command,) = [pid for pid in job.processes() if pid != job.wrapper.pid and os.getpgid(pid) == pid]
    wait_for(lambda: sum(_group(pid) == command for pid in job.processes()) == 2, 120, "a witness beside the command")
    send(job, signal.SIGTERM)
    assert job.seen() == [signal.SIGTERM]


def _group(pid: int) -> int:
    with contextlib.suppress(OSError):
        return os.getpgid(pid)
    return 0


ONE_SENDER = """
import os, signal, sys, time
import psutil
from hpcstage.wrapper.child import Child, Signals
from hpcstage.wrapper.child import Witness

def next_of(number):
    while (info := signals.take(5)) is not None and info.si_signo != number:
        pass  # those of ended children come in between
    assert info is not None
    return info

def to_both():
    for pid in (os.getpid(), beside):
        os.kill(pid, signal.SIGUSR2)

counter, ready, noted = sys.argv[1:]
signals = Signals()
child = Child([sys.executable, "-c", counter, ready, noted], os.environ, signals)
while not os.path.exists(ready):
    time.sleep(0.005)
with Witness(child.pid) as witness:
    (beside,) = [one.pid for one in psutil.Process().children() if one.name() == "cat"]
    to_both()
    first = next_of(signal.SIGUSR2)
    to_both()
    child.forward(first, witness)
    child.forward(next_of(signal.SIGUSR2), witness)
os.kill(child.pid, signal.SIGTERM)
sys.exit(child.wait(lambda: None, 0.1))
"""
"""In a process of its own: a signal to a process whose threads do not all block it would end it."""


def test_a_sender_that_signals_all_twice_before_the_wrapper_looks_is_one_sender(tmp_path: Path) -> None:
    """The witness shows a pending signal once, however often it came."""
    ready, noted = tmp_path / "ready", tmp_path / "seen"
    words = [sys.executable, "-c", ONE_SENDER, COUNTER, os.fspath(ready), os.fspath(noted)]
    done = subprocess.run(words, timeout=300, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert noted.read_text().split() == [str(int(signal.SIGTERM))]


GROUP_LATER = "import os, sys; sys.stdin.read(1); os.setpgid(0, 0); print(flush=True); sys.stdin.read()"


def test_what_the_group_got_that_a_command_has_left_did_not_reach_it() -> None:
    words = [sys.executable, "-c", GROUP_LATER]
    with (
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as command,
        Witness(command.pid) as witness,
    ):
        assert command.stdin is not None
        assert command.stdout is not None
        (beside,) = [one.pid for one in psutil.Process().children() if one.name() == "cat"]
        os.write(command.stdin.fileno(), b"x")
        assert command.stdout.read(1) == b"\n"
        os.kill(beside, signal.SIGTERM)
        witness.follow()
        assert not witness.got(signal.SIGTERM, time.sleep)
        command.stdin.close()


def test_a_terminal_interrupts_the_command_once(hpcstage: Hpcstage, make_tree: Tree) -> None:
    master, slave = pty.openpty()
    ready, seen = hpcstage.cwd / "ready", hpcstage.cwd / "seen"
    words = [sys.executable, "-c", COUNTER, os.fspath(ready), os.fspath(seen)]
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *hpcstage.command("run", "-q", "--data", make_tree(files=1), "--", *words)],
        cwd=hpcstage.cwd, env=hpcstage.env, stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    try:
        os.close(slave)
        wait_for(ready.exists, 120, "the command's start")
        os.write(master, b"\x03")
        assert process.wait(300) == 0
    finally:
        os.close(master)
    assert seen.read_text().split() == [str(int(signal.SIGINT))]


def test_nothing_stays_of_a_wrapper_that_is_killed(hpcstage: Hpcstage, make_tree: Tree) -> None:
    job = Job(hpcstage, make_tree(files=1), PBS)
    others = [psutil.Process(pid) for pid in job.processes()[1:]]
    (witness,) = [process for process in others if process.name() == "cat"]
    job.wrapper.kill()
    job.wrapper.wait(300)
    wait_for(lambda: not witness.is_running(), 120, "the end of the witness")
    for process in others:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    job.wrapper.communicate(timeout=300)
    wait_for(lambda: not list(hpcstage.local_dir.glob("hpcstage-*/*/")), 120, "the daemon's end")
