"""Keeps the index of a user's runs: one JSON line for each in `$XDG_STATE_HOME/hpcstage/runs.jsonl`.

The index makes `hpcstage report` without an argument possible and finds earlier runs of a command. It is a convenience:
where it cannot be written (a read-only home) nothing fails, and a line that cannot be read is skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.writing import replacing

if TYPE_CHECKING:
    from hpcstage.record.parts.run import RunPart
    from hpcstage.record.schema import Record

NAME = "runs.jsonl"
MOST_RUNS = 1000
"""The index is cut to this many last lines when it has more than twice as many."""
LOCKED_S = 2.0
"""Others hold the lock for milliseconds: where it stays taken for this long, locks do not work on the file system."""
RETRY_S = 0.01


@dataclass(frozen=True)
class IndexLine:
    """One run of the index."""

    run_id: str
    run_dir: str
    command: Sequence[str]
    roots: Sequence[str]
    started_unix_s: float
    exit_code: int | None = None
    mode: str | None = None
    nodes: int = 1
    total_s: float | None = None
    """The seconds of the command, and of the staging before it."""


@dataclass(frozen=True)
class Earlier:
    """How long successful runs of a command took in one mode."""

    mode: str
    runs: int
    median_s: float


def state_dir(env: Mapping[str, str]) -> Path:
    """Returns the directory of the user's index and runs: `$XDG_STATE_HOME/hpcstage`."""
    base = env.get("XDG_STATE_HOME") or os.path.join(env.get("HOME") or _home(), ".local", "state")
    return Path(base) / "hpcstage"


def _home() -> str:
    """Returns the home of a user whose environment names none. In containers users may have no entry: below their home
    nothing can be made."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return os.devnull


def path_of(env: Mapping[str, str]) -> Path:
    """Returns the path of the index."""
    return state_dir(env) / NAME


def begin(part: RunPart, run_dir: Path, env: Mapping[str, str] = os.environ) -> None:
    """Appends a run that has just started, so that its report can be found even if it is killed. Never fails."""
    _append(IndexLine(part.run_id, os.path.abspath(run_dir), part.command, part.roots, part.started_unix_s), env)


def add(record: Record, run_dir: Path, env: Mapping[str, str] = os.environ) -> None:
    """Appends a run that has ended. Never fails."""
    run, path = record.run, os.path.abspath(run_dir)
    began = IndexLine(run.id, path, run.command, _roots(record), run.started_unix_s)
    nodes, total_s = len(record.environment.nodes), record.time_split.total_s
    _append(replace(began, exit_code=run.exit_code, mode=run.mode, nodes=nodes, total_s=total_s), env)


def _roots(record: Record) -> list[str]:
    return [dataset.root for dataset in record.datasets]


def last(env: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the last run directory of the index that still exists."""
    return next(known(env), None)


def known(env: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yields the run directories of the index that still exist, the last first."""
    return (path for line in _newest(env) if (path := Path(line["run_dir"])).is_dir())


def find(roots: Sequence[str], env: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the run directory of the last successful run on these datasets."""
    found = (Path(line["run_dir"]) for line in _successful(roots, env))
    return next((path for path in found if path.is_dir()), None)


def earlier(record: Record, env: Mapping[str, str] = os.environ) -> list[Earlier]:
    """Returns by mode how long the successful runs before this one took, of its command on its datasets and on as many
    nodes."""
    from statistics import median

    run, nodes, took_s = record.run, len(record.environment.nodes), dict[str, list[float]]()
    for line in _successful(_roots(record), env):
        mode, total_s, started_s = (line.get(key) for key in ("mode", "total_s", "started_unix_s"))
        is_like = (line.get("command"), line.get("nodes")) == (list(run.command), nodes)
        if is_like and mode and total_s is not None and started_s is not None and started_s < run.started_unix_s:
            took_s.setdefault(mode, []).append(total_s)
    return [Earlier(mode, len(values), median(values)) for mode, values in sorted(took_s.items())]


def _successful(roots: Sequence[str], env: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yields the successful runs on these datasets, the last first."""
    known = sorted(roots)
    return (line for line in _newest(env) if line.get("exit_code") == 0 and sorted(line.get("roots") or []) == known)


def _append(line: IndexLine, env: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):
        path = path_of(env)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path) as locked:
            with open(path, "ab", opener=_private) as file:
                file.write(json.dumps(asdict(line)).encode() + b"\n")
            if locked:
                _compact(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yields whether the lock was got. Without it the caller only appends, as a line of one write stays whole; a line
    that is appended while another process compacts the file is lost."""
    with path.with_suffix(".lock").open("ab") as lock:
        yield _lock(lock.fileno())


def _lock(fd: int) -> bool:
    end = time.monotonic() + LOCKED_S
    while time.monotonic() < end:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(RETRY_S)
        except OSError:
            return False
        else:
            return True
    return False


def _compact(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) <= 2 * MOST_RUNS:
        return
    with replacing(path) as file:
        file.write(b"".join(lines[-MOST_RUNS:]))


def _newest(env: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yields the lines that can be read as data, the last first."""
    try:
        lines = path_of(env).read_bytes().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("run_dir"), str):
                yield entry
