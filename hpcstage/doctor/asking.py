"""Asks what may not answer: file systems that hang, and programs that are started. Nothing waits without a limit."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcstage.forked import fork, reap
from hpcstage.lead.children import Output, wait_some
from hpcstage.reading import readable

ANSWER_S = 5.0
"""A file system hangs if a process that asks it has not run for so many seconds."""
_LOOK_S = 0.25


def hangs(work: Callable[[], object]) -> bool:
    """Does some work in a child. Returns whether it hangs, and not whether it fails. A child that cannot be killed is
    left to the kernel."""
    out, into = os.pipe()  # it ends with the child
    pid = fork(work, {into}, says_why=False)
    os.close(into)
    ran, since = b"", time.monotonic()
    while not (has_ended := readable([out], _LOOK_S)) and time.monotonic() - since < ANSWER_S:
        if (now := _run_time(pid)) != ran:
            ran, since = now, time.monotonic()
    os.close(out)
    reap(pid, ANSWER_S if has_ended else 0.0)
    return not has_ended


def _run_time(pid: int) -> bytes:
    """Returns a value that changes when a process runs; empty where the kernel does not say."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/schedstat").read_bytes()
    return b""


def heard(command: Sequence[str], env: dict[str, str], mark: str, limit_s: float) -> tuple[str, str]:
    """Starts a program and returns the rest of its line that begins with `mark`, else why there is none."""
    said: list[str] = []

    def hear(line: str) -> bool:
        said.extend([line.removeprefix(mark)] * line.startswith(mark))
        return line.startswith(mark)

    try:
        output = Output(command, env, hear)
    except OSError as error:
        return "", str(error.strerror)
    deadline = time.monotonic() + limit_s
    while not said and output.fd >= 0 and (left := deadline - time.monotonic()) > 0:
        wait_some([output], left)
    is_over = bool(said) or output.fd < 0
    output.wait(1.0 if is_over else 0.0)
    code = output.returncode
    output.kill()
    return "".join(said[:1]), output.reason or (f"exit code {code}" if is_over else f"no answer in {limit_s:g} s")
