"""Begins a giver or a receiver: a process of its own, so that nothing that hangs in it holds up the agent that started
it. The module owns what both do first, and how the agent talks to them: lines of JSON on standard input, whose end ends
the process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NICE = 10


def start(module: str, **first: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401 - plain data
    """Starts such a process and tells it something. Raises OSError."""
    parent = os.fspath(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, (parent, os.environ.get("PYTHONPATH"))))
    process = subprocess.Popen(
        [sys.executable, "-s", "-m", f"hpcstage.elastic.passing.{module}"],
        env={**os.environ, "HPCSTAGE_DISABLE": "1", "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    tell(process, **first)
    return process


def tell(process: subprocess.Popen[bytes], **what: Any) -> None:  # noqa: ANN401 - plain data
    """Tells a process something. Raises OSError if it is gone."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(what).encode() + b"\n")
    process.stdin.flush()


def end(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Ends a process; one that hangs in the kernel is left to it."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(limit_s)
    for stream in filter(None, (process.stdin, process.stdout)):
        with contextlib.suppress(OSError):
            stream.close()


def first_told() -> dict[str, Any]:
    """Returns what this process is told first."""
    first: dict[str, Any] = json.loads(sys.stdin.readline())
    return first


def give_way() -> None:
    """Has this thread, and those that it starts from now on, compute less than the training. PyTorch is imported
    before: on a busy node that would take minutes, in which the other side gives up."""
    os.nice(_NICE)


def follow(take: Callable[[dict[str, Any]], object] = bool) -> None:
    """Has a thread pass on what this process is told from now on, and end it with its agent."""

    def run() -> None:
        for line in sys.stdin:
            take(json.loads(line))
        os._exit(0)

    threading.Thread(target=run, daemon=True).start()
