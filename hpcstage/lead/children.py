"""Starts processes for the lead: reads their output line by line, sees their end, and lets none outlive the lead."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from hpcstage.forked import die_with_parent
from hpcstage.protocol.exchangespec import OURS

_LINE_CHARS = 300
_MOST_LINES = 200
_CAUSE = re.compile(
    r"refused|denied|not found|no such|cannot|can't|could not|unable|fail|error|fatal|timed out|unreachable|no route"
    r"|not permitted|not enough|not installed|unknown|unrecognized|invalid|resolve|mismatch|did not|unsupported",
    re.IGNORECASE,
)
_NO_CAUSE = re.compile(
    r"^[-=*\s|]*$|^\[(mpiexec|proxy)|Traceback|^File \"|^raise |Other MPI error|^WARNING|: warning:"
    r"|^(= +)?(BAD TERMINATION|EXIT CODE|RANK|KILLED BY)",
)
_KILL_S = 2.0
"""A child has so long to end after SIGTERM, and after SIGKILL."""


class Output:
    """A child whose output is read. `heard` is given each line and returns whether it was meant for the lead; the first
    of the other lines are kept, for the reason of a failure."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        heard: Callable[[str], bool],
        *,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self._lines: list[str] = []
        self._heard = heard
        self._buffer = b""
        self._process = subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            cwd="/",
            start_new_session=True,
            preexec_fn=partial(_as_child, os.getpid()),  # noqa: PLW1509  the lead has one thread
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def reason(self) -> str:
        """Returns the line that tells best why the child failed; empty if it has said nothing."""
        return cause(self._lines)

    @property
    def tells(self) -> bool:
        """Whether that line names an error; otherwise it is only the last line that was said."""
        return any(_tells(line) for line in self._lines)

    @property
    def fd(self) -> int:
        """Returns the file descriptor to wait for; -1 once the output has ended."""
        return -1 if self._pipe.closed else self._pipe.fileno()

    @property
    def pid(self) -> int:
        """Returns the id of the process that was started."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    @property
    def returncode(self) -> int | None:
        """Returns the return code as subprocess does; None while the process runs."""
        return self._process.poll()

    def read(self) -> None:
        """Reads what the child has written."""
        while not self._pipe.closed:
            try:
                data = os.read(self._pipe.fileno(), 65536)
            except OSError:
                return
            if not data:
                self._pipe.close()
            *lines, self._buffer = (self._buffer + data).split(b"\n")
            if not data and self._buffer:
                lines.append(self._buffer)
            for line in lines:
                self._line(line.decode(errors="replace").strip())

    def _line(self, line: str) -> None:
        if line and not self._heard(line):
            if len(self._lines) == _MOST_LINES:
                self._lines.pop()
            self._lines.append(line[:_LINE_CHARS])

    def tell(self, line: str) -> None:
        """Writes a line to the child's standard input."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()

    def close_stdin(self) -> None:
        """Closes the child's standard input, so that its reader sees the end."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the child; returns whether it ended in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return True
        return False

    def kill(self) -> None:
        """Ends the child with all that it started in its session: by SIGTERM first, after a while by SIGKILL."""
        self.close_stdin()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.ended:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            self.wait(_KILL_S)
        with contextlib.suppress(OSError):
            self._pipe.close()


def cause(lines: Sequence[str]) -> str:
    """Returns the line that tells most: a line of hpcstage; else the first that names an error, since the next ones are
    its consequences and advice; else the last."""
    own = [line for line in lines if line.startswith(OURS)]
    return next(iter([*own, *filter(_tells, lines), *lines[-1:]]), "")


def _tells(line: str) -> bool:
    return bool(_CAUSE.search(line)) and not _NO_CAUSE.search(line)


def wait_some(outputs: Iterable[Output], timeout_s: float) -> None:
    """Waits until one of the children writes something, then reads it."""
    by_fd = {output.fd: output for output in outputs if output.fd >= 0}
    for fd in select.select(list(by_fd), [], [], timeout_s)[0]:
        by_fd[fd].read()


def _as_child(lead: int) -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)  # a child must not ignore what the lead ignores
    die_with_parent(lead, signal.SIGTERM)
