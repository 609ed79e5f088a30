"""Keeps the index of a user's runs: one JSON line for each in `$XDG_STATE_HOME/hpcstage/runs.jsonl`.

The index makes `hpcstage report` without an argument possible and finds earlier runs of a command. It is a convenience:
where it cannot be written (a read-only home) nothing fails, and a line that cannot be read is skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcstage.record.parts.part import RunPart

NAME = "runs.jsonl"
KEPT = 1000
"""The index is cut to this many last lines when it has more than twice as many."""


def state_dir(env: Mapping[str, str]) -> Path:
    """Returns the directory of the user's index and runs: `$XDG_STATE_HOME/hpcstage`."""
    base = env.get("XDG_STATE_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return Path(base) / "hpcstage"


def path_of(env: Mapping[str, str]) -> Path:
    """Returns the path of the index."""
    return state_dir(env) / NAME


def begin(part: RunPart, run_dir: Path, env: Mapping[str, str] = os.environ) -> None:
    """Appends a run that has just started, so that its report can be found even if it is killed. Never fails."""
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(part.started_unix_s))
    run = {"id": part.run_id, "command": part.command, "cwd": part.cwd, "started_utc": started}
    datasets = [{"root": root} for root in part.roots]
    add({"run": {**run, "exit_code": None, "mode": None}, "datasets": datasets}, run_dir, env)


def add(record: Mapping[str, Any], run_dir: Path, env: Mapping[str, str] = os.environ) -> None:
    """Appends a run that has ended. Never fails."""
    with contextlib.suppress(OSError):
        path = path_of(env)
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path) as locked:
            with path.open("ab") as file:
                file.write(json.dumps(_line(record, run_dir)).encode() + b"\n")
            if locked:
                _compact(path)


def last(env: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the last run directory of the index that still exists."""
    return next(known(env), None)


def known(env: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yields the run directories of the index that still exist, the last first."""
    return (_run_dir(entry) for entry in _newest(env) if _run_dir(entry).is_dir())


def find(command: Sequence[str] | None, roots: Sequence[str], env: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the run directory of the last successful run of this command (None: any) on these datasets."""
    for entry in _newest(env):
        if command is not None and entry.get("command") != list(command):
            continue
        fits = sorted(entry.get("roots") or []) == sorted(roots) and entry.get("exit_code") == 0
        if fits and _run_dir(entry).is_dir():
            return _run_dir(entry)
    return None


def _line(record: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    run = record["run"]
    return {
        "run_id": run["id"],
        "run_dir": os.path.abspath(run_dir),
        "command": run["command"],
        "cwd": run["cwd"],
        "roots": [dataset["root"] for dataset in record["datasets"]],
        "started_utc": run["started_utc"],
        "exit_code": run["exit_code"],
        "mode": run["mode"],
    }


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yields whether the lock was free. Without it the caller only appends, as a line of one write stays whole."""
    with path.with_suffix(".lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _compact(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) <= 2 * KEPT:
        return
    temporary = path.with_name(f".{NAME}.{os.getpid()}")
    temporary.write_bytes(b"".join(lines[-KEPT:]))
    temporary.replace(path)


def _newest(env: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    try:
        lines = path_of(env).read_bytes().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("run_dir"), str):
                yield entry


def _run_dir(entry: Mapping[str, Any]) -> Path:
    return Path(entry["run_dir"])
