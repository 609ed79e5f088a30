"""Lists a user's runs: those of the index, and those that lie in `./hpcstage-runs` and the state directory, of which
the index may know nothing (a read-only home, another machine). Finds the one that is asked for by its directory, its
id, its job's id, or as the last one.

What the index says of a run that had not ended then is completed from its directory, for the runs that are shown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpcstage.errors import NoResult
from hpcstage.protocol.rundir import NODES, PART, RECORD, RUNS
from hpcstage.record import files, index
from hpcstage.record.compose import state_of
from hpcstage.record.index import IndexLine
from hpcstage.record.parts import alive

OVER = frozenset({"ended", "lost", "not started"})
"""States of runs of which nothing comes any more. Nobody sees the end of a command that runs aside."""


@dataclass(frozen=True)
class ListedRun:
    """A run as it is now."""

    line: IndexLine
    is_there: bool
    """Whether its directory exists."""

    @property
    def is_over(self) -> bool:
        """Returns whether the run has ended, whatever way."""
        return self.line.state in OVER

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for json.dump."""
        return {**asdict(self.line), "is_there": self.is_there}


def known(env: Mapping[str, str], cwd: Path) -> list[IndexLine]:
    """Returns what is known of all runs without a look into those that the index knows, newest first."""
    lines = list(index.newest(env))
    paths = {line.run_dir for line in lines}
    for directory in (cwd / RUNS, index.state_dir(env) / "runs"):
        lines += [line for path in lying(directory) if str(path) not in paths and (line := _line(path)) is not None]
    return sorted(lines, key=lambda line: line.started_unix_s, reverse=True)


def lying(directory: Path) -> Iterator[Path]:
    """Yields the run directories in a directory."""
    with contextlib.suppress(OSError):
        yield from (path for path in directory.absolute().iterdir() if is_run_directory(path))


def is_run_directory(path: Path) -> bool:
    """Returns whether a run wrote to this directory, or its nodes did."""
    return not path.is_symlink() and any((path / name).exists() for name in (RECORD, PART, NODES))


def now(line: IndexLine) -> ListedRun:
    """Returns the run as it is now: an end that the index does not know is looked for in the run's directory."""
    path = Path(line.run_dir)
    if not path.is_dir():
        return ListedRun(line if line.state != "running" else replace(line, state="lost"), is_there=False)
    if line.state != "running":
        return ListedRun(line, is_there=True)
    return ListedRun(_completed(line, path), is_there=True)


def _completed(line: IndexLine, path: Path) -> IndexLine:
    """Completes what the index says of a run that had not ended then."""
    with contextlib.suppress(NoResult):
        part = files.run_part(path)
        if part.started_unix_s != line.started_unix_s:
            return replace(line, state="lost")  # a later run has its directory
        state = state_of(part, alive.evidence(part, path))
        if state != "lost":  # nothing more is known of a killed run than its part, or it takes long to compose
            return IndexLine.of_record(files.load_run(path), path)
        return replace(IndexLine.of_part(part, path), state=state)
    return replace(line, state="lost")


def _line(path: Path) -> IndexLine | None:
    """Returns what the wrapper's part says of a run that the index does not know; where there is none, its record."""
    with contextlib.suppress(NoResult):
        if (path / PART).exists():
            return IndexLine.of_part(files.run_part(path), path)
        return IndexLine.of_record(files.load_run(path), path)
    return None


# ---- the run that a user asks for ----


def last_run(env: Mapping[str, str], cwd: Path) -> Path:
    """Returns the run that was last written to, among the index's last run and those in `./hpcstage-runs`.

    Raises NoResult if there is none.
    """
    indexed = index.last(env)
    found = _newest([*([indexed] if indexed else []), *lying(cwd / RUNS)])
    if found is None:
        raise NoResult(f"no run found: none in ./{RUNS}, none in the index", "name one: hpcstage report RUN_DIR")
    return found


def named_run(asked: Path, env: Mapping[str, str], cwd: Path) -> Path:
    """Returns `asked` if this path exists, else the last run with this run id or job id. Raises NoResult."""
    if (cwd / asked).exists():
        return asked
    of_run = [Path(line.run_dir) for line in known(env, cwd) if line.answers_to(str(asked))]
    found = _newest([path for path in of_run if path.is_dir()])
    if found is None:
        what = f"{asked} is no run directory, and no id of a run or a job in ./{RUNS} or the index"
        raise NoResult(what, "`hpcstage list --all` names the runs that are known")
    return found


def _newest(paths: list[Path]) -> Path | None:
    return max(paths, key=alive.last_sign_s, default=None)
