"""Writes what a run that could not be staged leaves behind: its part of the record, and a line in the index.

Without it `hpcstage report` would show an older run as if it were the last. Nothing here may fail or take long, because
the command is waiting.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcstage import inherited
from hpcstage import job as jobs
from hpcstage.errors import HpcstageError
from hpcstage.problem import Problem
from hpcstage.record import index
from hpcstage.wrapper import facts, grouping, rundir

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.plan.dataset.datasets import Resolved
    from hpcstage.wrapper.run import Clock


def leave_word(command: Sequence[str], config: Config, error: HpcstageError, resolved: Resolved, clock: Clock) -> None:
    """Writes into the run directory why nothing was staged, and makes none that its user could not use later. Behind a
    launcher only the first rank writes; where the launch has no name and each node stages alone, the first rank on each
    node writes."""
    with contextlib.suppress(Exception):  # whatever goes wrong here, the command runs
        job = jobs.detect(os.environ, hostname=socket.gethostname(), parent_pid=os.getppid())
        if inherited.hides_own_files() or not grouping.leaves_word(job):
            return
        run_id = rundir.unique_id(clock.unix_s, job.job_id)
        part = facts.run_part(command, config, clock, run_id, job, None)
        part.roots = [os.fsdecode(dataset.root) for dataset in resolved.datasets]
        part.aside = not config.strict
        part.exit_code = error.exit_code if config.strict else None
        part.problems.append(Problem("not-staged", error.what, error.remedy))
        run_dir = rundir.make(config.run_dir, inherited.directory(), run_id, dict(os.environ))
        rundir.save_part(run_dir, part)
        index.begin(part, run_dir)
