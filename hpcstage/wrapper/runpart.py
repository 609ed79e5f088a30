"""Gathers what is known of a run before it starts: its id, its run directory, its part of the record.

The run directory is on the source, at `./hpcstage-runs/<run id>` or where the user wants it. If the default place
cannot be written, the results go to the user's state directory: a read-only working directory is no reason to fail.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage import inherited
from hpcstage import job as jobs
from hpcstage.errors import HpcstageError, NotStarted, UsageError
from hpcstage.job import file_name
from hpcstage.jsonform import written
from hpcstage.plan.dataset.datasets import LOCAL, to_stage
from hpcstage.problem import Problem
from hpcstage.protocol.rundir import NODES, PART, RUNS
from hpcstage.record import index
from hpcstage.record.parts import alive
from hpcstage.record.parts.run import RunPart
from hpcstage.wrapper import grouping
from hpcstage.writing import replace_text

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.plan.dataset.datasets import Datasets


class Clock:
    """Holds the start of the run on both clocks."""

    def __init__(self) -> None:
        self.unix_s = time.time()
        self.monotonic_s = time.monotonic()

    def elapsed_s(self) -> float:
        """Returns the seconds since the start."""
        return time.monotonic() - self.monotonic_s


def shared_id(run_key: str | None, config: Config, host: str = "") -> str | None:
    """Returns the id that all wrappers of one launch on a node compute alone; two commands of one task must not share
    it.

    `host` is given where each node stages alone: other nodes must not share the id then, either.
    """
    if run_key is None:
        return None
    asked = "\0".join([config.mode, config.order, *config.data, *([host] if host else [])])
    return f"{run_key}-{zlib.crc32(os.fsencode(asked)):08x}"


def run_part(
    command: Sequence[str], config: Config, clock: Clock, run_id: str, job: jobs.Job, local: LocalDir | None
) -> RunPart:
    """Returns the wrapper's part of the record, as far as it is known before the start."""
    return RunPart(
        run_id=run_id,
        command=list(command),
        host=socket.gethostname(),
        started_unix_s=clock.unix_s,
        mode_asked=config.mode,
        scheduler=job.scheduler,
        job_id=job.job_id,
        nodes=list(job.nodes),
        local_dir=None if local is None else os.fspath(local.path),
        config={str(row["key"]): row["value"] for row in config.rows()},
        pid=os.getpid(),
        config_origin={str(row["key"]): str(row["source"]) for row in config.rows()},
        pid_space=alive.pid_space(),
    )


def tell_of_one_node(part: RunPart, job: jobs.Job) -> None:
    """Says in the record that it is about this node only: behind a launcher each node may stage alone."""
    part.nodes = [job.hostname]
    if len(job.nodes) > 1:
        text = f"this report is about {job.hostname} only: each node of this launch stages alone and has its own"
        remedy = "put hpcstage in front of the launcher: one report, and files are passed between the nodes"
        part.problems.append(Problem("alone", text, remedy))


def without_local(datasets: Datasets, local: LocalDir, part: RunPart, *, strict: bool) -> Datasets:
    """Returns the datasets without those on the local disk, which are read there, and notes that. Where no other is
    left, all are measured, and it is noted why the run stages nothing; with `strict` NotStarted is raised then."""
    others, found = to_stage(datasets, local.device)
    if others is not datasets:
        named = ((one.text, one.remedy) for one in found.values())
        part.problems += [Problem(LOCAL, f"{text}, is read there, and is not counted here", fix) for text, fix in named]
        return others
    for problem in found.values():
        if strict:
            raise NotStarted(problem.text, problem.remedy)
        part.problems.append(problem)
    part.direct_why = next((one.text for one in found.values()), "" if datasets.all else "no dataset is named")
    return datasets


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
    replace_text(run_dir / PART, json.dumps(written(part)))


def report_not_staged(
    command: Sequence[str], config: Config, error: HpcstageError, datasets: Datasets, clock: Clock
) -> None:
    """Writes into the run directory why nothing was staged, and makes none that its user could not use later. Behind a
    launcher only the first rank writes; where the launch has no name and each node stages alone, the first rank on each
    node writes."""
    with contextlib.suppress(Exception):  # whatever goes wrong here, the command runs
        job = jobs.here()
        if inherited.hides_own_files() or not grouping.reports_not_staged(job):
            return
        run_id = unique_id(clock.unix_s, job.job_id)
        part = run_part(command, config, clock, run_id, job, None)
        part.roots = [os.fsdecode(dataset.root) for dataset in datasets.all]
        part.aside = not config.strict
        part.exit_code = error.exit_code if config.strict else None
        part.problems.append(Problem("not-staged", error.what, error.remedy))
        run_dir = make(config.run_dir, inherited.directory(), run_id, dict(os.environ))
        save_part(run_dir, part)
        index.begin(part, run_dir)
