"""Decides whether a run without an end in its record still goes on: by its process on this host, else by its files."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcstage.protocol.rundir import NODES, PART, RECORD
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
    silent_s: Mapping[str, float] = field(default_factory=dict)
    """The hosts whose parts were not written for longer than QUIET_S, and for how long."""


def pid_space() -> str:
    """Names the PID namespace of this process; empty where the kernel does not say."""
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def evidence(run: RunPart, run_dir: Path) -> Life | None:
    """Says why the run is taken to be running; None: it is not.

    On the host of the wrapper its process and its child's decide. On other hosts the age of the last file decides:
    there a run that was killed less than QUIET_S ago cannot be told from one that runs.
    """
    if run.aside or run.exit_code is not None or run.signal is not None:
        return None
    here = _seen_here(run) if _is_here(run) else None
    if here == "":
        return None
    quiet_s = {path: max(0.0, time.time() - at_s) for path, at_s in _written(run_dir).items()}
    silent_s = {path.stem: age_s for path, age_s in quiet_s.items() if path.parent.name == NODES and age_s >= QUIET_S}
    if here is not None:
        return Life(True, here, silent_s)
    least_s = min(quiet_s.values(), default=QUIET_S)
    if least_s >= QUIET_S:
        return None
    return Life(False, f"its last sign of life is {format_duration(least_s)} old", silent_s)


def last_sign_s(run_dir: Path) -> float:
    """Returns when anything was last written of a run; 0 if nothing was, or the path is no run directory."""
    return max(_written(run_dir).values(), default=0.0)


def _is_here(run: RunPart) -> bool:
    return bool(run.pid_space) and run.pid_space == pid_space() and run.host == socket.gethostname()


def _seen_here(run: RunPart) -> str:
    """Says what of the run is running on this host; empty: nothing."""
    if run.child_started_s is not None and _lives(run.child_pid, run.started_unix_s + run.child_started_s):
        return "its command is running on this host"
    return "hpcstage is running on this host" if _lives(run.pid, run.started_unix_s) else ""


def _lives(pid: int | None, started_unix_s: float) -> bool:
    if pid is None:
        return False
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - started_unix_s) < START_OFF_S
    return False


def _written(run_dir: Path) -> dict[Path, float]:
    """Returns when the parts of a run and its record were written."""
    times = {}
    for path in (run_dir / RECORD, run_dir / PART, *(run_dir / NODES).glob("*.json")):
        with contextlib.suppress(OSError):
            times[path] = path.stat().st_mtime
    return times
