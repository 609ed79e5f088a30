"""Finds the run that a user asks for: by its directory, its id, its job's id, or the last one.

This module owns the places where it looks: the index, `./hpcstage-runs`, and the runs of the state directory. The index
may be missing (a read-only home, another machine); the run directories hold the same information.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcstage.errors import NoResult
from hpcstage.protocol.rundir import NODES, PART, RECORD, RUNS
from hpcstage.record import index


def last_run(env: Mapping[str, str], cwd: Path) -> Path:
    """Returns the run that was last written to, among the index's last run and those in `./hpcstage-runs`.

    Raises NoResult if there is none.
    """
    indexed = index.last(env)
    found = _newest([*([indexed] if indexed else []), *_lying(cwd / RUNS)])
    if found is None:
        raise NoResult(f"no run found: none in ./{RUNS}, none in the index", "name one: hpcstage report RUN_DIR")
    return found


def named_run(asked: Path, env: Mapping[str, str], cwd: Path) -> Path:
    """Returns `asked` if this path exists, else the last run with this run id or job id. Raises NoResult."""
    if (cwd / asked).exists():
        return asked
    places = [*_lying(cwd / RUNS), *_lying(index.state_dir(env) / "runs"), *index.known(env)]
    found = _newest([path for path in dict.fromkeys(places) if _is_of(path, str(asked))])
    if found is None:
        what = f"{asked} is no run directory, and no id of a run or a job in ./{RUNS} or the index"
        raise NoResult(what, "hpcstage report RUN_DIR, or run.json in it")
    return found


def _lying(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (path for path in directory.iterdir() if _written_ns(path))


def _newest(paths: list[Path]) -> Path | None:
    return max(paths, key=_written_ns, default=None)


def _written_ns(run_dir: Path) -> int:
    """Returns when the run was last written to; 0 if the path is no run directory."""
    times = [0]
    for name in (RECORD, PART, NODES):
        with contextlib.suppress(OSError):
            times.append((run_dir / name).stat().st_mtime_ns)
    return max(times)


def _is_of(run_dir: Path, asked: str) -> bool:
    return asked == run_dir.name or asked in _ids(run_dir)


def _ids(run_dir: Path) -> list[str]:
    """Returns the run's id and its job's, the latter also without the name of its server (`123.pbs1`)."""
    with contextlib.suppress(OSError, ValueError):
        part = json.loads((run_dir / PART).read_bytes())
        return _told(part.get("run_id"), part.get("job_id")) if isinstance(part, dict) else []
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        record = json.loads((run_dir / RECORD).read_bytes())
        return _told(record["run"]["id"], record["environment"]["job_id"])
    return []


def _told(run_id: object, job_id: object) -> list[str]:
    ids = [str(run_id)] if run_id else []
    return [*ids, str(job_id), str(job_id).split(".", maxsplit=1)[0]] if job_id else ids
