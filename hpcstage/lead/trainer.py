"""Runs as `python -m hpcstage.lead.trainer SPEC [INDEX]`: `torchrun` on one node of an elastic training.

The module owns this node's agent of `torchrun` and all that it starts: what an agent that was killed leaves behind is
killed, too. It ends the agent when a signal says so, or when whoever started it is gone.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports look for their modules
    from hpcstage.inherited import own_packages_first

    own_packages_first()

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hpcstage import job as jobs
from hpcstage import procio, stderr
from hpcstage.forked import die_with_parent
from hpcstage.job.ranks import without_rank
from hpcstage.lead.agent import index_of
from hpcstage.protocol.trainingspec import NODE, TrainingSpec

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGXCPU,
)
RESTARTS = 100
SHUTDOWN_S = 10
"""The time that the processes may take to end after SIGTERM; then `torchrun` kills them. Its own default is 30 s."""
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 0.2
_OF_NODE = frozenset({"HOSTNAME", "HOST", "TMPDIR", "PWD", "OLDPWD", "SHLVL", "_"})
_OF_SCHEDULER = ("SLURM", "PBS_", "SGE_", "PE_", "JOB_", "PJM_", "LSB_", "FLUX_")
"""Variables that are this node's own, and not those of the first node."""


def main(arguments: list[str]) -> int:
    """Runs the agent of this node to its end, and returns its exit code, as a shell would."""
    spec = TrainingSpec.load(Path(arguments[0]))
    host = jobs.here().hostname
    index = int(arguments[1]) if len(arguments) > 1 else index_of(spec.hosts, host)
    if index is None or (index == 0 and len(arguments) == 1):
        return 0  # some launchers start this on all nodes; the first node has the one of the wrapper
    signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="hpcstage-torchrun-", ignore_cleanup_errors=True) as logs:
        code = _agent(spec, index, logs)
    return code if code >= 0 else 128 - code


def _agent(spec: TrainingSpec, index: int, logs: str) -> int:
    """Runs the agent, ends all that it leaves, and returns its exit code, negative for a signal."""
    try:
        agent = subprocess.Popen(
            command(spec, index, logs),
            stdin=subprocess.DEVNULL,
            env=environment(spec, index, os.environ),
            cwd=spec.cwd,
            preexec_fn=partial(as_child, os.getpid()),  # noqa: PLW1509  this process has one thread
        )
    except OSError as error:
        stderr.say(f"elastic: {spec.hosts[index]}: {spec.torchrun[0]} cannot be started: {error.strerror}")
        return 127
    try:
        return _followed(agent)
    finally:
        _kill_left()


def command(spec: TrainingSpec, index: int, logs: str) -> list[str]:
    """Returns the command line of `torchrun` on a node. It makes a directory below `logs`, and leaves it."""
    return [
        *spec.torchrun,
        f"--nnodes={spec.least}:{spec.most}",
        "--rdzv-backend=hpcstage",
        f"--rdzv-id={spec.run_id}",
        f"--local-addr={spec.address or spec.hosts[index]}",
        f"--log-dir={logs}",
        f"--max-restarts={RESTARTS}",  # unless the user gives another number: the last counts
        *spec.arguments,
    ]


def environment(spec: TrainingSpec, index: int, own: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of `torchrun` on a node: that of the command, with what is this node's own."""
    given = dict(spec.env)
    if not spec.virtual and index:
        node = without_rank(own)
        given = {name: value for name, value in given.items() if not _is_of_node(name)}
        given |= {name: value for name, value in node.items() if _is_of_node(name)}
    ours = {
        "HPCSTAGE_ELASTIC_HOST": spec.hosts[index],
        "HPCSTAGE_ELASTIC_PROCESSES": _processes(spec.arguments, given),
        "HPCSTAGE_ELASTIC_DIR": spec.run_dir,
        "HPCSTAGE_ELASTIC_POLICY": spec.policy,
        "HPCSTAGE_ELASTIC_SURVIVORS": spec.survivors,
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SHUTDOWN_S),
    }
    if spec.joins:
        ours["HPCSTAGE_ELASTIC_JOINS"] = "true"
    if spec.ends_unix_s is not None:
        ours["HPCSTAGE_ELASTIC_ENDS"] = str(spec.ends_unix_s)
    if spec.drained is not None:
        ours["HPCSTAGE_ELASTIC_DRAINED"] = spec.drained
    if spec.virtual:
        ours[NODE] = str(index)
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # PyTorch's store writes a page for each connection that breaks
    return {**quiet, **given, **ours}


def _processes(arguments: Sequence[str], env: Mapping[str, str]) -> str:
    """Returns how many processes `torchrun` starts on a node, as the user has written it."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, has_value, value = word.partition("=")
        if name in ("--nproc-per-node", "--nproc_per_node"):
            return value if has_value else following
    return env.get("PET_NPROC_PER_NODE", "1")


def _is_of_node(name: str) -> bool:
    return name in _OF_NODE or name.startswith(_OF_SCHEDULER)


def as_child(parent: int) -> None:
    """Makes a process that is about to run a program ready: signals are as they were, and it ends with its parent."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for number in (*PASSED_ON, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    die_with_parent(parent, signal.SIGTERM)


def _followed(agent: subprocess.Popen[bytes]) -> int:
    """Passes signals on until the agent ends; the end of this process's input counts as SIGTERM."""
    has_input = True
    while (code := agent.poll()) is None:
        info = signal.sigtimedwait({*PASSED_ON, signal.SIGCHLD}, _LOOK_S)
        if info is not None and info.si_signo in PASSED_ON:  # what a stop interrupted may name no signal
            agent.send_signal(info.si_signo)
        if has_input and select.select([0], [], [], 0)[0] and not os.read(0, 4096):
            has_input = False
            if not _is_nothing(0):
                agent.send_signal(signal.SIGTERM)
        _reap_others(agent.pid)
    return code


def _is_nothing(fd: int) -> bool:
    """Whether a descriptor is /dev/null or a file, whose end says nothing."""
    return not os.path.exists(f"/proc/self/fd/{fd}") or not os.readlink(f"/proc/self/fd/{fd}").startswith(
        ("pipe:", "socket:")
    )


def _reap_others(agent: int) -> None:
    """Reaps processes that the agent's processes left; the agent is left to its own object."""
    for pid in procio.children(os.getpid()):
        if pid != agent:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _kill_left() -> None:
    """Kills what the agent has left behind, and what appears while that dies."""
    while pids := procio.children(os.getpid()):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
