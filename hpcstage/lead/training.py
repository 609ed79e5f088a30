"""Runs as `python -m hpcstage.lead.training SPEC`, in the place of the command of `hpcstage run --elastic`: starts one
agent of `torchrun` on each node, passes signals on, and ends with what the agents agreed on.

The module owns the processes that it starts. A node that is lost is none of its business: the agents that are left
decide. What may never return, such as a launcher for a lost node, is ended when the others have.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports look for their modules
    from hpcstage.inherited import own_packages_first

    own_packages_first()

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hpcstage import stderr
from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.errors import HpcstageError
from hpcstage.job import launchers
from hpcstage.lead import world
from hpcstage.lead.trainer import PASSED_ON, as_child
from hpcstage.lead.world import find_mpiexec, mpi_of
from hpcstage.protocol.trainingspec import NODE_PROGRAM, SCRIPT, TrainingSpec

_LOOK_S = 0.5
ENDING_S = 60.0
"""After a signal that ends the training, or after its end, agents have so long to end before they are killed."""
SILENT_S = 60.0
"""When some agents have ended and nobody leads the training for so long, the launchers that are left are for lost
nodes."""
_ENDS = frozenset(PASSED_ON)


class Training:
    """The agents of one training."""

    def __init__(self, spec: TrainingSpec, path: Path) -> None:
        self._spec = spec
        self._path = path
        self._started: list[subprocess.Popen[bytes]] = []
        self._deadline_s: float | None = None
        self._told: int | None = None
        """The signal that ends the training here."""
        self._beat: tuple[object, float] = (None, time.monotonic())

    def run(self) -> int:
        """Runs to the end of all agents, and returns the exit code."""
        self._start_all()
        while any(process.poll() is None for process in self._started):
            info = signal.sigtimedwait({*PASSED_ON, signal.SIGCHLD}, _LOOK_S)
            if info is not None and info.si_signo in PASSED_ON:  # what a stop interrupted may name no signal
                self._pass_on(info.si_signo)
            self._look(time.monotonic())
        return self._code()

    def _start_all(self) -> None:
        words = [sys.executable, "-s", "-m", NODE_PROGRAM, os.fspath(self._path), "0"]
        self._start(words, os.environ, subprocess.DEVNULL)
        script = ("/bin/sh", os.fspath(self._path.parent / SCRIPT))
        env = launchers.scrubbed(os.environ)
        for command, takes_stdin in _elsewhere(self._spec, script):
            self._start(command, env, subprocess.PIPE if takes_stdin else subprocess.DEVNULL)

    def _start(self, words: Sequence[str], env: Mapping[str, str], stdin: int) -> None:
        try:
            process = subprocess.Popen(
                list(words),
                stdin=stdin,
                env=dict(env),
                start_new_session=True,
                preexec_fn=partial(as_child, os.getpid()),  # noqa: PLW1509  this process has one thread
            )
        except OSError as error:
            stderr.say(f"elastic: {words[0]} cannot be started: {error.strerror} (choose another --launcher)")
            return
        self._started.append(process)

    def _pass_on(self, number: int) -> None:
        for process in self._started:
            if process.poll() is None:
                process.send_signal(number)
        if self._deadline_s is None and number in _ENDS and number not in (signal.SIGUSR1, signal.SIGUSR2):
            self._deadline_s, self._told = time.monotonic() + ENDING_S, number
            self._say_of_lost_nodes()

    def _say_of_lost_nodes(self) -> None:
        """Says which option of Slurm would have kept a job that has lost a node."""
        if lost := world.lost(self._spec.hosts, os.environ):
            names = ", ".join(lost)
            what = f"elastic: told to end, while Slurm takes {names} for lost"
            stderr.say(f"{what} (it ends such a job, unless that was submitted with sbatch --no-kill)")

    def _look(self, now_s: float) -> None:
        """Kills what will not end by itself."""
        if self._deadline_s is None and self._is_over(now_s):
            self._deadline_s = now_s + ENDING_S
        if self._deadline_s is None or now_s < self._deadline_s:
            return
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _is_over(self, now_s: float) -> bool:
        """Returns whether no agent that lives has anything more to do."""
        if all(process.poll() is None for process in self._started):
            return False
        with contextlib.suppress(HpcstageError, OSError, ValueError):
            arbiter = Arbiter(self._spec.agreed)
            if arbiter.newest_term() is None:
                return False  # those that are left have yet to begin; they bound that themselves
            if arbiter.end() is not None:
                return True
            beat = arbiter.last_beat()
            if beat != self._beat[0]:
                self._beat = beat, now_s
        return now_s - self._beat[1] > SILENT_S

    def _code(self) -> int:
        codes = [process.returncode for process in self._started]
        with contextlib.suppress(HpcstageError, OSError, ValueError):
            arbiter = Arbiter(self._spec.agreed)
            end = arbiter.end()
            if self._spec.joins:
                line = "it goes on without this job" if end is None else end.line
                stderr.say(f"training {self._spec.joins}: {line}")
            if end is not None:
                return end.exit_code
        if self._told is not None and any(codes):
            return 128 + self._told
        failed = [code if code >= 0 else 128 - code for code in codes if code != 0]
        return failed[0] if failed else 0 if codes else 1


def _elsewhere(spec: TrainingSpec, script: Sequence[str]) -> list[tuple[Sequence[str], bool]]:
    """Returns the command lines that start the agents of the other nodes, each by itself where the launcher can do
    that, and whether the end of their input reaches the agents."""
    mpi = mpi_of(find_mpiexec()) if spec.launcher == "mpiexec" else launchers.Mpi.UNKNOWN
    found: list[tuple[Sequence[str], bool]] = []
    for hosts in [spec.hosts[1:]] if spec.virtual else [[host] for host in spec.hosts[1:]]:
        plan = launchers.per_node(spec.launcher, script, hosts, mpi, spec.parts)
        found += [(command, plan.takes_stdin) for command in plan.commands]
        if not plan.exact:
            break
    return found


def main(arguments: list[str]) -> int:
    """Runs the training; see the module."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    path = Path(arguments[0])
    try:
        return Training(TrainingSpec.load(path), path).run()
    finally:
        for left in (path, path.with_name(SCRIPT)):  # the specification has the user's whole environment
            left.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
