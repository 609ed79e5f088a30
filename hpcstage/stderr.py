"""Writes to standard error without waiting for whoever reads it.

A pipe that nobody reads is full after some 64 KiB, and a terminal can be stopped: a write would then wait for ever, and
the run with it. The command writes to the same open file and expects it as it was, so it cannot be made non-blocking.
The module opens the same pipe or terminal once more, for this process only, and owns what it writes there. A program
whose standard error is its log, a file, writes to that (`log`).
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
import time
from functools import cache
from typing import TextIO

_STDERR = 2
PATIENCE_S = 1.0
"""A reader that is slow gets so many seconds once; after that nothing waits for it before it has read something."""


class UnwaitingStream(io.TextIOBase):
    """A text stream to a descriptor. What cannot be written in time is dropped."""

    def __init__(self, fd: int, encoding: str) -> None:
        self._fd = _opened_again(fd)
        self._encoding = encoding
        self._is_stuck = False
        """Whether the last write was dropped."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream that this one takes the place of."""
        return self._encoding

    def isatty(self) -> bool:
        """Returns whether a terminal shows the text."""
        return os.isatty(self._fd)

    def write(self, text: str) -> int:
        """Writes the text, or drops what is not taken in time. Raises OSError if nobody can read it any more."""
        left = text.encode(self._encoding, "backslashreplace")
        deadline = time.monotonic() + (0.0 if self._is_stuck else PATIENCE_S)
        while left and self._is_writable(deadline - time.monotonic()):
            try:
                left = left[os.write(self._fd, left[: select.PIPE_BUF]) :]
            except BlockingIOError:  # another process was faster, or a terminal has not room for a whole line end
                if time.monotonic() >= deadline:
                    break
        self._is_stuck = bool(left)
        return len(text)

    def _is_writable(self, timeout_s: float) -> bool:
        """Returns whether PIPE_BUF bytes can be written."""
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(max(0.0, 1000 * timeout_s)))


def stream() -> TextIO:
    """Returns the stream for all that is said on standard error; what has taken the place of sys.stderr keeps it, such
    as rich while it shows a live line."""
    return _unwaiting() if sys.stderr is sys.__stderr__ else sys.stderr


def say(line: str) -> None:
    """Writes a line. What cannot be written must not change an exit code."""
    with contextlib.suppress(OSError, ValueError):
        out = stream()
        out.write(f"hpcstage: {line}\n")
        out.flush()


def log(text: str) -> None:
    """Writes a line with the time of day, in a program whose standard error is its log."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)  # noqa: T201


@cache
def _unwaiting() -> TextIO:
    return UnwaitingStream(_STDERR, sys.stderr.encoding)  # type: ignore[return-value]


def _opened_again(fd: int) -> int:
    """Returns a descriptor of the same pipe or terminal that does not wait; `fd` itself where there is none, such as of
    a file, which takes everything at once, or of a socket."""
    if not (stat.S_ISFIFO(os.fstat(fd).st_mode) or os.isatty(fd)):
        return fd
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return fd
