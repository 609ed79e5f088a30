"""Processes that the lead starts: their output line by line, their end, and that none outlives the lead."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence

from hpcstage.protocol.exchangespec import OURS

_PR_SET_PDEATHSIG = 1
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
_LIBC = ctypes.CDLL(None)


class Output:
    """A child whose output is read. `heard` is given each line and says whether it was meant for us; the first of the
    others are kept, for the reason of a failure."""

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
            preexec_fn=_die_with_parent,  # noqa: PLW1509  the lead has one thread
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def reason(self) -> str:
        """The line that tells why it failed, as well as can be seen; empty if it has said nothing."""
        return cause(self._lines)

    @property
    def tells(self) -> bool:
        """Whether that line names an error, or is only the last that was said."""
        return any(_tells(line) for line in self._lines)

    @property
    def fd(self) -> int:
        """To wait for; -1 once the output has ended."""
        return -1 if self._pipe.closed else self._pipe.fileno()

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """The process is gone."""
        return self._process.poll() is not None

    @property
    def returncode(self) -> int | None:
        """As of subprocess."""
        return self._process.poll()

    def read(self) -> None:
        """Takes what there is."""
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

    def close_stdin(self) -> None:
        """Whoever reads it sees its end."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
            return True
        return False

    def kill(self, patience_s: float) -> None:
        """Ends it with what it started in its session: asks first, then does."""
        self.close_stdin()
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.ended:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            self.wait(patience_s)
        with contextlib.suppress(OSError):
            self._pipe.close()


def cause(lines: Sequence[str]) -> str:
    """The line that tells most: our own, else the first that names an error, since what follows are its consequences
    and advice; else the last."""
    own = [line for line in lines if line.startswith(OURS)]
    return next(iter([*own, *filter(_tells, lines), *lines[-1:]]), "")


def _tells(line: str) -> bool:
    return bool(_CAUSE.search(line)) and not _NO_CAUSE.search(line)


def wait_some(outputs: Iterable[Output], timeout_s: float) -> None:
    """Waits until one of them says something, then takes it."""
    by_fd = {output.fd: output for output in outputs if output.fd >= 0}
    for fd in select.select(list(by_fd), [], [], timeout_s)[0]:
        by_fd[fd].read()


def _die_with_parent() -> None:
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)  # what the lead ignores its children must not
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
