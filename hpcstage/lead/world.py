"""Owns the MPI program of exchanges: starts it on the nodes that are up, and anew, a bounded number of times, when it
dies.

An MPI program dies as a whole. The daemons outlive it, and tell the next one again what they hold.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage import extras
from hpcstage.extras import Extra
from hpcstage.job import launchers
from hpcstage.lead import children
from hpcstage.node import mpifiles
from hpcstage.protocol.exchangespec import STANDS, GroupSpec
from hpcstage.protocol.membership import Membership

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hpcstage.protocol.membership import GroupNode

MOST_PROGRAMS = 6
"""The first program, and five more."""
FIRST_PAUSE_S = 1.0
SOON_S = 3.0
"""A program that fails within so many seconds was started in the wrong way: the next way is tried."""
CONNECT_S = 90.0
"""A program whose processes have not come together within so many seconds is ended."""
LATE_S = 20.0
"""If the processes have not come together within so many seconds, the lead says so."""
APART_S = 5.0
"""A launcher that has said that a process failed ends within so many seconds, or waits for a node that is lost."""
LEAST_GOODBYE_S = 0.2
UNCONNECTED = "the nodes are not connected, each stages for itself"
"""What is said where no program connects them, before the reason."""
_VERSION_S = 10.0
_FAILED = re.compile(r"srun: error: \S+: tasks? ")
"""What srun says when a process has failed; other launchers do not outlive that."""
ASK_S = 3.0
_LOST = ("down", "fail")
_SILENT = "*"
"""Stands behind the state of a node that does not answer."""


class World:
    """The exchanges of a run, one MPI program after the other."""

    def __init__(self, launcher: str, directory: Path, parts: Sequence[Sequence[str]] = ()) -> None:
        self._launcher = launcher
        self._parts = parts
        self._directory = directory
        self._way, self._ways = 0, 1
        self._failed_soon = 0
        """The number of programs in a row that failed at once."""
        self._output: children.Output | None = None
        self._began = 0.0
        self._apart_since: float | None = None
        self.connected = False
        """Whether the processes of the latest program have come together."""
        self.programs = 0
        """The number of programs that were started."""
        self.generation = 0
        """The latest generation of the membership."""
        self.next_at = 0.0
        self.why = ""
        """Why the latest program ended, if it said why, or why there is none."""
        self.tells = False
        """Whether a line of its output names an error."""
        self.over = False
        """Whether no more program will be started."""
        self.mpiexec = find_mpiexec()
        self.mpi = mpi_of(self.mpiexec)
        if (why := why_none(launcher, self.mpiexec)) is not None:
            self.over, self.why = True, why

    @property
    def is_hopeless(self) -> bool:
        """Whether to wait for the nodes to be connected is in vain, as far as can be known: no more program will be
        started, or each way to start one has failed at once, and the last one twice."""
        return self.over or self._failed_soon > self._ways

    @property
    def running(self) -> bool:
        """Whether an MPI program runs."""
        return self._output is not None

    @property
    def output(self) -> children.Output | None:
        """Returns the running program's output; None if none runs."""
        return self._output

    def start(self, nodes: Sequence[GroupNode], now: float) -> bool:
        """Starts a program on the nodes that are there. Returns False if it could not be started; `why` then says
        why."""
        self.programs += 1
        self.generation += 1
        spec = GroupSpec(Membership(self.generation, tuple(nodes)))
        path = self._directory / f"world-{self.generation}.json"
        program = (sys.executable, "-s", "-m", "hpcstage.exchange", os.fspath(path))
        hosts = [node.host for node in spec.started]
        ways = launchers.mpi_world(self._launcher, program, hosts, self.mpi, self.mpiexec, self._parts)
        try:
            spec.save(path)
            env = launchers.scrubbed(os.environ)
            command = ways[self._way % len(ways)]
            self._output = children.Output(command, env, self._heard)
        except (OSError, IndexError) as error:
            self.over, self.why = True, f"the MPI program cannot be started: {error}"
            return False
        self._ways = len(ways)
        self._began = now
        self._apart_since = None
        self.connected = False
        return True

    def _heard(self, line: str) -> bool:
        generation = line.removeprefix(STANDS)
        if generation == line or not generation.isdecimal():
            if self._apart_since is None and _FAILED.match(line):
                self._apart_since = time.monotonic()
            return False
        self.connected, self.tells = True, False
        self.generation = max(self.generation, int(generation))
        return True

    def is_late(self, now: float) -> bool:
        """Returns whether the program runs and should have connected the nodes by now; `why` says what is known."""
        if self._output is None or self.connected or now - self._began < LATE_S:
            return False
        said = self._output.reason
        self.why = f"the MPI program has not connected them in {LATE_S:g} s" + (f": {said}" if said else "")
        return True

    def look(self, now: float) -> bool:
        """Looks after the program; returns True if it has just ended."""
        output = self._output
        if output is None:
            return False
        is_stuck = not self.connected and now - self._began > CONNECT_S
        is_apart = self._apart_since is not None and now - self._apart_since > APART_S
        if not output.ended and not is_stuck and not is_apart:
            return False
        output.read()
        code = output.returncode or 0
        how = f"ended with exit code {code}" if code >= 0 else f"ended with signal {-code}"
        if is_stuck:
            how = f"has not connected them in {CONNECT_S:g} s"
        elif not output.ended:
            how = "fell apart"
        if output.tells or not self.tells:  # a launcher that ends in a hurry does not always pass the reason on
            self.tells = output.tells
            self.why = f"the MPI program {how}" + (f": {output.reason}" if output.reason else "")
        output.kill()
        self._output = None
        # One that connected the nodes was started in the right way: it ended because a node was lost.
        is_soon = not is_stuck and not self.connected and code != 0 and now - self._began < SOON_S
        self._failed_soon = self._failed_soon + 1 if is_soon else 0
        if is_stuck or is_soon:
            self._way = (self._way + 1) % self._ways
        if self.programs >= MOST_PROGRAMS:
            self.over = True
        self.next_at = now + FIRST_PAUSE_S * self.programs
        return True

    def end(self, timeout_s: float) -> None:
        """Lets the exchanges say goodbye within the timeout, then ends them."""
        self.over = True
        if self._output is not None:
            # A program that began a moment ago is still looking for daemons that have gone.
            if not self._output.wait(min(timeout_s, max(LEAST_GOODBYE_S, (time.monotonic() - self._began) / 2))):
                left = mpifiles.of_tree(self._output.pid)
                self._output.kill()
                mpifiles.unlink(left)
            self._output.kill()
            self._output = None


def why_none(launcher: str, mpiexec: str | None) -> str | None:
    """Returns why no MPI program can be started here; None if nothing is known to be in the way."""
    if (missing := extras.missing(Extra.MPI, "mpi4py")) is not None:
        return missing.line()
    return "there is no mpiexec" if mpiexec is None and launcher != "srun" else None


def find_mpiexec() -> str | None:
    """Returns the mpiexec that belongs to this Python (a wheel's), else the site's; None if there is none."""
    own = Path(sys.executable).parent / "mpiexec"
    return os.fspath(own) if os.access(own, os.X_OK) else shutil.which("mpiexec") or shutil.which("mpirun")


def mpi_of(mpiexec: str | None) -> launchers.Mpi:
    """Returns the kind of MPI that an mpiexec belongs to."""
    if mpiexec is None:
        return launchers.Mpi.UNKNOWN
    try:
        done = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, errors="replace", timeout=_VERSION_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return launchers.Mpi.UNKNOWN
    return launchers.kind_of_mpi(done.stdout + done.stderr)


def lost(hosts: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """Returns those of a job's nodes that are lost to Slurm; none where it does not say so in time."""
    if "SLURM_JOB_ID" not in env:
        return []
    words = ["sinfo", "--noheader", "--Node", f"--nodes={','.join(hosts)}", "--format=%N %t"]
    states = dict(words for line in _said(words) if len(words := line.split()) == 2)
    return [name for name, state in states.items() if state.startswith(_LOST) or state.endswith(_SILENT)]


def is_job_ending(env: Mapping[str, str]) -> bool:
    """Returns whether Slurm says that the job is over or about to be: no step of it starts any more."""
    job = env.get("SLURM_JOB_ID")
    return job is not None and "COMPLETING" in _said(["squeue", "--noheader", f"--jobs={job}", "--format=%T"])


def _said(words: Sequence[str]) -> list[str]:
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()
