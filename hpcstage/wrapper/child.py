"""Runs the user's command: starts it with the caller's signal mask, passes each signal on once, waits for its end.

The module owns signals and the exit status. It does not know what the command is for.

Signals that the wrapper forwards are blocked in this process from before the command starts and are taken with
sigtimedwait, so none can be lost or interrupt anything. Under Slurm's cgroup tracking only the direct process of a step
is told about scancel or a time limit, so the wrapper passes them on. PBS, Grid Engine and terminals signal the command
as well; a second signal would end a program that is saving its state, so the wrapper passes on only what the witness
beside the command did not get.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from hpcstage.errors import CommandNotExecutable, CommandNotFound

IGNORED_BY_PYTHON = [signal.SIGPIPE, signal.SIGXFSZ]
"""The interpreter ignores these, and commands do not: `yes | head` would report an error."""
MOMENT_S = 0.2
"""A sender that signals one process after the other has reached the witness within so many seconds."""
_POLL_S = 0.005
_PENDING = ("SigPnd:", "ShdPnd:")
FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCONT,
    signal.SIGWINCH,
    signal.SIGALRM,
    signal.SIGXCPU,
)
FATAL = frozenset(FORWARDED) - {signal.SIGCONT, signal.SIGWINCH}
SI_KERNEL_FROM = 1
"""An si_code above 0 means that the kernel sent the signal, for a terminal or because of a limit of this process
alone."""
OF_TERMINALS = frozenset({signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGCONT, signal.SIGWINCH})
_SETTLES_S = 0.05
"""A command that makes a process group of its own has made it by then."""


class Witness:
    """Keeps a witness beside a process for as long as the context lasts: a `cat` in the same process group, with all
    signals blocked, so that /proc shows which came. It reads a pipe that only the wrapper holds, and ends with it."""

    def __init__(self, pid: int) -> None:
        self._of = pid
        self._place: int | None = None
        self._pid: int | None = None
        self._seen: set[int] = set()
        """Signals that an earlier witness got and that `got` has not been asked about."""
        self._stdin, self._held = os.pipe()

    def __enter__(self) -> Witness:
        self.follow()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._dismiss(self._pid)
        os.close(self._stdin)
        os.close(self._held)

    @property
    def is_there(self) -> bool:
        """Whether the witness can tell: it is in the process group in which the process is now."""
        return self._pid is not None and self._place == self._group()

    def follow(self) -> None:
        """Moves the witness to the process's group: `timeout` and shells with job control make a process group of their
        own."""
        group = self._group()
        if group != self._place:
            self._place = group
            self._renew()
            self._seen.clear()  # what its group of before got reaches it no more

    def got(self, number: int, pause: Callable[[float], object]) -> bool:
        """Returns whether the signal came to the witness as well; waits a moment for it by calling `pause`."""
        deadline = time.monotonic() + MOMENT_S
        while self.is_there:
            pending = _pending(self._pid)
            if number in pending | self._seen:
                if number in pending:
                    self._renew()
                self._seen.discard(number)
                return True
            if time.monotonic() > deadline:
                break
            pause(_POLL_S)
        return False

    def _group(self) -> int | None:
        """Returns the process group beside which a witness can stand; None if the process is in another session: a
        sender that signals a session or a group does not reach both."""
        with contextlib.suppress(OSError):
            if os.getsid(self._of) == os.getsid(0):
                return os.getpgid(self._of)
        return None

    def _renew(self) -> None:
        """Replaces the witness, since a pending signal can be seen only once. The new witness starts before the old one
        is looked at and ended, so that no signal is missed."""
        old, self._pid = self._pid, None
        if self._place is not None:
            with contextlib.suppress(OSError):
                self._pid = self._spawn(self._place)
        self._seen |= _pending(old)
        self._dismiss(old)

    def _spawn(self, group: int) -> int:
        quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_WRONLY, 0) for fd in (1, 2)]
        env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        return os.posix_spawnp(
            "cat",
            ["cat"],
            env,
            file_actions=[(os.POSIX_SPAWN_DUP2, self._stdin, 0), *quiet],
            setpgroup=group,
            setsigmask=signal.valid_signals(),
        )

    @staticmethod
    def _dismiss(pid: int | None) -> None:
        if pid is not None:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _pending(pid: int | None) -> set[int]:
    """Returns the numbers of the signals that are pending for a process."""
    if pid is None:
        return set()
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return set()
    mask = 0
    for line in lines:
        if line.startswith(_PENDING):
            mask |= int(line.split()[1], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}


def is_fatal_pending() -> bool:
    """Tells whether a blocked signal waits that will end this process."""
    return any(signal.getsignal(number) != signal.SIG_IGN for number in signal.sigpending() & FATAL)


class Signals:
    """Blocks the forwarded signals until `release`."""

    def __init__(self) -> None:
        self.waited = {*FORWARDED, signal.SIGCHLD}
        self._ignored = {number for number in self.waited if signal.getsignal(number) is signal.SIG_IGN}
        """Signals that the caller had this process ignore, as nohup does: they are passed on, and end nothing."""
        if signal.SIGCHLD in self._ignored:  # else the kernel would throw the command's exit code away
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, self.waited)
        self._came: deque[signal.struct_siginfo] = deque()

    def take(self, timeout_s: float) -> signal.struct_siginfo | None:
        """Returns the next signal, or None after the timeout."""
        return self._came.popleft() if self._came else signal.sigtimedwait(self.waited, timeout_s)

    def keep(self, timeout_s: float) -> None:
        """Waits for a signal and keeps it for a later `take`. Two equal signals that stay pending would become one."""
        info = signal.sigtimedwait(self.waited, timeout_s)
        if info is not None:
            self._came.append(info)

    def ends(self, info: signal.struct_siginfo) -> bool:
        """Whether a signal ends hpcstage while no command runs."""
        return info.si_signo in FATAL and info.si_signo not in self._ignored

    def release(self) -> None:
        """Puts the caller's mask back; the kernel then delivers the pending signals."""
        if signal.SIGCHLD in self._ignored:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.before)


class Child:
    """The running command. Owns its process id and its wait status."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], signals: Signals) -> None:
        self.signals = signals
        self._shared_at: dict[int, float] = {}
        """When the witness last got each signal."""
        self.status: int | None = None
        try:
            self.pid = os.posix_spawnp(
                command[0], list(command), dict(env), setsigmask=signals.before, setsigdef=IGNORED_BY_PYTHON
            )
        except (OSError, ValueError) as error:
            raise exec_error(command, error) from None

    def wait(self, watch: Callable[[], None], interval_s: float = 1.0) -> int:
        """Forwards signals until the command ends, and returns its wait status. Calls `watch` now and then while it
        runs."""
        pause_s = _SETTLES_S
        self._reap()
        if self.status is not None:  # the command was shorter than it takes to find a witness
            return self.status
        with Witness(self.pid) as witness:
            while self.status is None:
                info = self.signals.take(pause_s)
                pause_s = interval_s
                if info is not None and info.si_signo != signal.SIGCHLD:
                    self.forward(info, witness)
                witness.follow()
                self._reap()
                if self.status is None:
                    watch()
        return self.status

    def forward(self, info: signal.struct_siginfo, witness: Witness) -> None:
        """Passes a signal on, unless its sender has reached the command as well. A scheduler that signals everybody
        twice may reach the witness twice before it is replaced, where the second signal is not seen: an equal signal
        within a moment is the same sender's."""
        number = info.si_signo
        if info.si_code >= SI_KERNEL_FROM and not (number in OF_TERMINALS and witness.is_there):
            return
        is_again = time.monotonic() - self._shared_at.get(number, -MOMENT_S) < MOMENT_S
        if witness.got(number, self.signals.keep):
            self._shared_at[number] = time.monotonic()
        elif not is_again and self._is_running():
            os.kill(self.pid, number)

    def _is_running(self) -> bool:
        self._reap()
        return self.status is None

    def _reap(self) -> None:
        if self.status is not None:
            return
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        _, self.status = os.waitpid(self.pid, 0)


def exec_error(command: Sequence[str], error: OSError | ValueError) -> CommandNotFound | CommandNotExecutable:
    """Returns the error for a command that could not be started, with the exit code that shells use."""
    if isinstance(error, ValueError):  # an empty name, which Python does not pass on
        error = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    what = f"cannot run {command[0]!r}: {error.strerror}"
    if isinstance(error, FileNotFoundError) and os.path.lexists(command[0]):
        return CommandNotFound(what, "it is there: check the interpreter in its first line, or where its link leads")
    if len(command) == 1 and " " in command[0]:
        return CommandNotFound(what, f"leave the quotes around the command out: -- {command[0]}")
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return CommandNotFound(what, "check the command after `--`")
    return CommandNotExecutable(what, "check its permissions and its first line")


def finish(status: int) -> int:
    """Returns the exit code for a wait status; if a signal ended the command, this process ends by the same signal."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return code
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has its core file; the wrapper leaves no second one
    number = -code
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
