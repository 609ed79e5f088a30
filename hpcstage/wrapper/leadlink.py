"""Owns the wrapper's side of the lead: starts it, reads what it says, ends it. Nothing here may hold up the command.

The lead takes lines on its standard input (`dead`, `drain`, `end`; the end of the input means the same as `end`) and
writes lines: `joined`, `outputs REASON-WHY-NOT` and `checkpoints REASON-WHY-NOT` of directories that are watched,
`staged`, `drained`, `ended`, `notice TEXT`, and `problem ID<TAB>TEXT<TAB>REMEDY`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcstage.node import childenv, control
from hpcstage.node.kept import KeptKind
from hpcstage.node.keptdirectory import NodeResult
from hpcstage.problem import Problem
from hpcstage.protocol import leadspec
from hpcstage.protocol.rundir import result_path
from hpcstage.reading import readable
from hpcstage.wrapper import messages
from hpcstage.writing import replace_copy

KILLED_S = 5.0
READY_S = 20.0
"""The wrapper waits at most so many seconds for the nodes; the lead gives up earlier on nodes that do not come."""


class LeadLink:
    """A lead that was started. Owns its process and the lines that it has said."""

    def __init__(self, spec: Path, log: Path, env: Mapping[str, str]) -> None:
        self.failed = False
        self._said: dict[str, str] = {}
        """The messages, with what followed them."""
        self._problems: list[Problem] = []
        self._buffer = b""
        self._directory = spec.parent
        self._started = time.monotonic()
        self._is_drain_asked = False
        self._ending = False
        self._log = os.open(log, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        """Stays open, since the daemon removes the file with the node's directory."""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-m", "hpcstage.lead", os.fspath(spec)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=childenv.for_daemon(env, control.package_parent()),
                cwd="/",  # Python looks for modules in the working directory first, where the user's code may lie
                start_new_session=True,
            )
        except BaseException:
            os.close(self._log)
            raise

    def ready(self, timeout_s: float) -> bool:
        """Returns whether all nodes are up and know the files, or are given up."""
        return self._hear("joined", timeout_s) or time.monotonic() - self._started > READY_S

    def staged(self, timeout_s: float) -> bool:
        """Returns whether the other nodes hold what they will hold."""
        return self._hear("staged", timeout_s)

    def unwatched_why(self, kind: KeptKind, timeout_s: float) -> str | None:
        """Returns why not all other nodes watch a directory for a kind of files; empty if they do, None if it is not
        known yet."""
        if not self._hear(kind.key, timeout_s):
            return None
        return self._said.get(kind.key, "what connects the nodes ended early")

    def drained(self, timeout_s: float) -> bool:
        """Returns whether no other node still drains output files and checkpoints; to be asked after `ask_drain`."""
        return self._hear("drained", timeout_s)

    def ask_drain(self) -> None:
        """Has the other nodes drain what is left; they remove the directory of a command that did not run, too."""
        if not self._is_drain_asked:
            self._is_drain_asked = True
            self.tell("drain")

    def ended(self, timeout_s: float) -> bool:
        """Returns whether the lead has said that the other nodes have written their parts; to be asked after `end`. A
        lead that dies before it says so leaves that open."""
        deadline = time.monotonic() + timeout_s
        while "ended" not in self._said and (left := deadline - time.monotonic()) > 0:
            if not self._take(left):
                break
        return "ended" in self._said

    def problems(self) -> list[Problem]:
        """Returns what went wrong since the last call, for the record; each problem is also printed once."""
        is_gone = not self._take(0.0)
        if is_gone and not self.failed and "ended" not in self._said:
            self.failed = True
            text = "what connects the nodes ended early; "
            text += "parts of other nodes may be missing" if self._ending else "each node stages for itself"
            self._problems.append(Problem("group-lost", text, "see nodes/lead.log in the run directory"))
        found, self._problems = self._problems, []
        for problem in found:
            messages.warn(problem.text)
        return found

    def tell(self, line: str) -> None:
        """Writes a line to the lead."""
        stdin = self._process.stdin
        with suppress(OSError, ValueError):
            if stdin is not None:
                stdin.write(line.encode() + b"\n")
                stdin.flush()

    def end(self) -> None:
        """Tells the lead that the command has ended. Does not wait."""
        self.problems()
        self._ending = True
        self.tell("end")
        with suppress(OSError, ValueError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def close(self, timeout_s: float) -> None:
        """Ends the lead, and makes sure that it is gone. Removes the group's directory if nothing failed."""
        if not self._ending:
            self.end()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_S)
        self._take(0.0)
        if "done" in self._said:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._process.stdout is not None:
            self._process.stdout.close()
        os.close(self._log)

    def keep_log(self, path: Path) -> None:
        """Copies the lead's log to where it is found later."""
        with suppress(OSError):
            replace_copy(Path(f"/proc/self/fd/{self._log}"), path)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _hear(self, message: str, timeout_s: float) -> bool:
        """Returns whether the lead has sent the message, or never will."""
        if message in self._said:
            return True
        return not self._take(timeout_s) or message in self._said

    def _take(self, timeout_s: float) -> bool:
        """Reads what the lead has written; returns False if the lead is gone."""
        pipe = self._process.stdout
        if pipe is None or pipe.closed:
            return False
        while readable([pipe.fileno()], timeout_s):
            data = os.read(pipe.fileno(), 65536)
            if not data:
                return False
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            for line in lines:
                self._line(line.decode(errors="replace"))
            timeout_s = 0.0
        return True

    def _line(self, line: str) -> None:
        message, _, rest = line.partition(" ")
        self._said[message] = rest
        if message == "notice":
            messages.warn(rest)
        if message == "problem":
            self._problems.append(Problem.from_line(rest))


@dataclass(frozen=True)
class OtherNodes:
    """The other nodes of a run, and what they say of their output files and checkpoints."""

    suffixes: Mapping[str, str]
    """By host: what the names of the node's directories end in, where that is another end than the first node's."""
    machine: str | None
    """The machine on which all nodes are, where they are virtual."""
    lead: LeadLink
    run_id: str
    group_dir: Path

    def result_of(self, host: str, kind: KeptKind) -> NodeResult | None:
        """Returns what a node said in this run at the end of its drain; None if it did not. The user may have named the
        directory of an earlier run."""
        try:
            found = leadspec.read_json(result_path(self.group_dir, host, kind.key))
        except (OSError, ValueError):
            return None
        return NodeResult(**found) if found.pop("run_id", None) == self.run_id else None

    def forget(self, kind: KeptKind) -> None:
        """Removes what the nodes said from the group's directory; the record has it by then."""
        for host in self.suffixes:
            with suppress(OSError):
                result_path(self.group_dir, host, kind.key).unlink()
