"""Owns the run directory, which holds a run's results: the wrapper's part of the record and, at the end, the record.

The run directory is on the source, at `./hpcstage-runs/<run id>` or where the user wants it. If the default place
cannot be written, the results go to the user's state directory: a read-only working directory is no reason to fail.
"""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

from hpcstage.errors import UsageError
from hpcstage.job import file_name
from hpcstage.protocol.rundir import NODES, PART, RUNS
from hpcstage.record import index
from hpcstage.record.parts.run import RunPart
from hpcstage.writing import replace_text


def unique_id(now_s: float, job_id: str | None) -> str:
    """Returns a run id that sorts by time: `20261121-031422-1f3a5b7c`, followed by the job's id if there is one. It
    names directories, so what may be no part of a name is replaced: Flux's ids begin with the letter ƒ."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    name = f"{stamp}-{os.urandom(4).hex()}"
    return f"{name}-{file_name(job_id)}" if job_id else name


def make(wanted: str | None, cwd: Path, run_id: str, env: dict[str, str]) -> Path:
    """Makes the run directory; falls back to the state directory if the user named none. Raises UsageError if the named
    one cannot be made, OSError if nothing can be written."""
    if wanted:
        path = _below(cwd) / wanted if not os.path.isabs(wanted) else Path(wanted)
        try:
            _make(path)
        except OSError as error:
            what = f"--run-dir {wanted} cannot be made: {error.strerror}"
            raise UsageError(what, "name a directory that you may write to, on the shared file system") from None
        return path
    try:
        path = _below(cwd) / RUNS / run_id
        _make(path)
    except OSError:
        path = index.state_dir(env) / "runs" / run_id
        _make(path)
    return path


def _make(path: Path) -> None:
    """Makes what is missing so that only this user may enter it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for place in (path, path / NODES):
        place.mkdir(mode=0o700, exist_ok=True)
    if (path / NODES).is_symlink():
        raise OSError(errno.ELOOP, f"{path / NODES} is a symbolic link")


def _below(cwd: Path) -> Path:
    if not cwd.is_dir():
        raise FileNotFoundError(f"the working directory {cwd} is not there")
    return cwd


def save_part(run_dir: Path, part: RunPart) -> None:
    """Writes what the wrapper knows so far, so that a killed job still has a report."""
    replace_text(run_dir / PART, json.dumps(part.to_json()))
