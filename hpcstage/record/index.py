"""Keeps the index of a user's runs: JSON lines in `$XDG_STATE_HOME/hpcstage/runs.jsonl`, one when a run starts and one
when it ends, of which the last counts.

The index makes `hpcstage list` and `hpcstage report` without an argument possible and finds earlier runs of a command.
It is a convenience: where it cannot be written (a read-only home) nothing fails, and a line that cannot be read is
skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.jsonform import read, written
from hpcstage.writing import replacing

if TYPE_CHECKING:
    from hpcstage.record.parts.run import RunPart
    from hpcstage.record.schema import Record

NAME = "runs.jsonl"
MOST_RUNS = 1000
"""The index is cut to the last lines of this many runs when it has more than three times as many lines."""
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
    job_id: str | None = None
    waited_s: float | None = None
    """The seconds for which the program waited for data, with several nodes on the one that waited longest."""
    lost_nodes: int = 0
    state: str = "running"
    """The state of the run when the line was written, as in the record."""

    @classmethod
    def of_part(cls, part: RunPart, run_dir: Path) -> IndexLine:
        """Returns what the wrapper's part tells of a run, without an end."""
        own = {"run_dir": os.path.abspath(run_dir), "mode": part.mode_asked, "nodes": len(part.nodes) or 1}
        return read(cls, {**vars(part), **own, "exit_code": None})

    @classmethod
    def of_record(cls, record: Record, run_dir: Path) -> IndexLine:
        """Returns what the record tells of a run."""
        run = record.run
        own = {
            "run_id": run.id,
            "run_dir": os.path.abspath(run_dir),
            "roots": _roots(record),
            "mode": run.mode or run.mode_asked,
            "nodes": record.node_count,
            "total_s": record.time_split.total_s,
            "waited_s": record.headroom_s,
            "lost_nodes": record.lost_nodes,
        }
        return read(cls, {**vars(run), **own})

    def answers_to(self, asked: str) -> bool:
        """Returns whether the run has this id or directory, or its job this id, also without the name of the job's
        server (`123.pbs1`)."""
        job_id = self.job_id or self.run_id
        return asked in (self.run_id, os.path.basename(self.run_dir), job_id, job_id.partition(".")[0])

    @property
    def key(self) -> tuple[str, float]:
        """Returns what the lines of a run have in common: later runs may use the same directory, and the same id."""
        return self.run_dir, self.started_unix_s


@dataclass(frozen=True)
class Earlier:
    """How long successful runs of a command took in one mode."""

    mode: str
    took_s: Sequence[float]

    @property
    def median_s(self) -> float:
        """Returns the median; of an even number of runs the mean of the middle two."""
        from statistics import median

        return median(self.took_s)


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
    _append(IndexLine.of_part(part, run_dir), env)


def add(record: Record, run_dir: Path, env: Mapping[str, str] = os.environ) -> None:
    """Appends a run that has ended. Never fails."""
    _append(IndexLine.of_record(record, run_dir), env)


def _roots(record: Record) -> list[str]:
    return [dataset.root for dataset in record.datasets]


def last(env: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the last run directory of the index that still exists."""
    return next((path for line in newest(env) if (path := Path(line.run_dir)).is_dir()), None)


def newest(env: Mapping[str, str] = os.environ) -> Iterator[IndexLine]:
    """Yields the last line of each run, the last first."""
    try:
        lines = path_of(env).read_bytes().splitlines()
    except OSError:
        return
    seen = set[tuple[str, float]]()
    for line in map(_line, reversed(lines)):
        if line is not None and line.key not in seen:
            seen.add(line.key)
            yield line


def find(roots: Sequence[str], env: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the run directory of the last successful run on these datasets."""
    found = (Path(line.run_dir) for line in _successful(roots, env))
    return next((path for path in found if path.is_dir()), None)


def earlier(record: Record, env: Mapping[str, str] = os.environ) -> list[Earlier]:
    """Returns by mode how long the successful runs before this one took, of its command on its datasets and on as many
    nodes."""
    run, nodes, took_s = record.run, record.node_count, dict[str, list[float]]()
    for line in _successful(_roots(record), env):
        is_like = (tuple(line.command), line.nodes) == (run.command, nodes)
        if is_like and line.mode and line.total_s is not None and line.started_unix_s < run.started_unix_s:
            took_s.setdefault(line.mode, []).append(line.total_s)
    return [Earlier(mode, tuple(values)) for mode, values in sorted(took_s.items())]


def forget(run_dirs: Collection[str], env: Mapping[str, str] = os.environ) -> None:
    """Removes the lines of these run directories. Raises OSError. Where locks do not work they stay: another process
    may be appending a line."""
    path = path_of(env)
    if not run_dirs or not path.exists():
        return
    with _locked(path) as locked:
        if locked:
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [text for text in lines if (line := _line(text)) is None or line.run_dir not in run_dirs]
            with replacing(path) as file:
                file.write(b"".join(kept))


def _successful(roots: Sequence[str], env: Mapping[str, str]) -> Iterator[IndexLine]:
    """Yields the successful runs on these datasets, the last first."""
    known = sorted(roots)
    return (line for line in newest(env) if line.exit_code == 0 and sorted(map(str, line.roots)) == known)


def _append(line: IndexLine, env: Mapping[str, str]) -> None:
    with contextlib.suppress(OSError):
        path = path_of(env)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path) as locked:
            with open(path, "ab", opener=_private) as file:
                file.write(json.dumps(written(line)).encode() + b"\n")
            if locked:
                _compact(path)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Yields whether the lock was got. Without it the caller only appends, as a line of one write stays whole; a line
    that is appended while another process compacts the file is lost."""
    with path.with_suffix(".lock").open("ab") as lock:
        end, got = time.monotonic() + LOCKED_S, False
        with contextlib.suppress(OSError):
            while not got and time.monotonic() < end:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    got = True
                except BlockingIOError:
                    time.sleep(RETRY_S)
        yield got


def _compact(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    if len(lines) <= 3 * MOST_RUNS:
        return
    kept: dict[tuple[str, float], bytes] = {}
    for text in reversed(lines):
        if (line := _line(text)) is not None and len(kept) < MOST_RUNS:
            kept.setdefault(line.key, text)
    with replacing(path) as file:
        file.write(b"".join(reversed(kept.values())))


def _line(text: bytes) -> IndexLine | None:
    """Returns a line of the index; None where it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        line = read(IndexLine, json.loads(text))
        if isinstance(line.run_dir, str) and isinstance(line.run_id, str):
            return line
    return None
