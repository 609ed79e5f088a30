"""Decides whether a run without an end in its record still goes on: by its process on this host, else by its files."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from hpcstage.protocol.rundir import NODES, PART
from hpcstage.record.parts.run import RunPart
from hpcstage.units import format_duration

QUIET_S = 45.0
"""Daemons write their parts every ten seconds: a run that wrote nothing for this long is taken to have ended."""
START_OFF_S = 10.0
"""The kernel's start time of a process may differ from the wrapper's by up to this."""


@dataclass(frozen=True)
class Life:
    """Says that a run goes on, or may go on, and why."""

    is_certain: bool
    """False: the run may have been killed a moment ago."""
    why: str


def pid_space() -> str:
    """Names the PID namespace of this process; empty where the kernel does not say."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def evidence(run: RunPart, run_dir: Path) -> Life | None:
    """Says why the run is taken to be running; None: it is not.

    On the host of the wrapper its child's process decides. On other hosts the age of the last file decides: there a run
    that was killed less than QUIET_S ago cannot be told from one that runs.
    """
    if run.aside or run.exit_code is not None or run.signal is not None:
        return None
    if _is_here(run):
        return Life(True, "its process is running on this host") if _lives(run) else None
    quiet_s = time.time() - _written_s(run_dir)
    if quiet_s >= QUIET_S:
        return None
    return Life(False, f"its last sign of life is {format_duration(max(0.0, quiet_s))} old")


def _is_here(run: RunPart) -> bool:
    return bool(run.pid_space) and run.pid_space == pid_space() and run.host == socket.gethostname()


def _lives(run: RunPart) -> bool:
    if run.child_pid is None or run.child_started_s is None:
        return False
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(run.child_pid)
        started_s = run.started_unix_s + run.child_started_s
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started_s) < START_OFF_S
    return False


def _written_s(run_dir: Path) -> float:
    times = [0.0]
    for path in (run_dir / PART, *(run_dir / NODES).glob("*.json")):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)
