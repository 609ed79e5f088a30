"""Finds the run that a user asks for: by its directory, its id, its job's id, or the last one.

The index may be missing (a read-only home, another machine): the runs that lie in `./hpcstage-runs` and the state
directory are found without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpcstage.errors import NoResult
from hpcstage.protocol.rundir import RUNS
from hpcstage.record import index, runs
from hpcstage.record.parts.alive import last_sign_s


def last_run(env: Mapping[str, str], cwd: Path) -> Path:
    """Returns the run that was last written to, among the index's last run and those in `./hpcstage-runs`.

    Raises NoResult if there is none.
    """
    indexed = index.last(env)
    found = _newest([*([indexed] if indexed else []), *runs.lying(cwd / RUNS)])
    if found is None:
        raise NoResult(f"no run found: none in ./{RUNS}, none in the index", "name one: hpcstage report RUN_DIR")
    return found


def named_run(asked: Path, env: Mapping[str, str], cwd: Path) -> Path:
    """Returns `asked` if this path exists, else the last run with this run id or job id. Raises NoResult."""
    if (cwd / asked).exists():
        return asked
    of_run = [Path(line.run_dir) for line in runs.known(env, cwd) if line.answers_to(str(asked))]
    found = _newest([path for path in of_run if path.is_dir()])
    if found is None:
        what = f"{asked} is no run directory, and no id of a run or a job in ./{RUNS} or the index"
        raise NoResult(what, "`hpcstage list --all` names the runs that are known")
    return found


def _newest(paths: list[Path]) -> Path | None:
    return max(paths, key=last_sign_s, default=None)
