"""Drains what earlier runs left on the node of an agent, beside the agent: there is no wrapper that would do it.

Owns the process, which is `hpcstage clean --drain`: it takes only what belongs to no living run, may be ended at any
time, and deletes nothing that is not drained. What it says is kept in the run directory.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.errors import HpcstageError
from hpcstage.forked import die_with_parent
from hpcstage.job import localdir
from hpcstage.node import environment, kept, start
from hpcstage.node.directory import outputs_base
from hpcstage.node.environment import RUN_ID
from hpcstage.protocol.rundir import log_path
from hpcstage.writing import replacing

if TYPE_CHECKING:
    from hpcstage.job import Job
    from hpcstage.protocol.leadspec import LeadSpec

AT_START_S = 4.0
"""The start of this node waits for so long; what takes longer goes on beside the run."""


class LeftoverDrain:
    """The drain of what earlier runs left on one node; there is no process where nothing was left."""

    def __init__(self, lead: LeadSpec, env: Mapping[str, str], job: Job) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(HpcstageError, OSError):
            local = localdir.choose(lead.local_dir, env, job)
            if local is not None and any(kept.places(outputs_base(local, job.hostname))):
                log = log_path(Path(lead.daemon.run_dir), f"{job.hostname}.late")
                self._process = _clean(local.path, log, _of_run(lead, env))

    def wait(self) -> None:
        """Waits for the end for a while."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(AT_START_S)

    def end(self) -> None:
        """Ends it; what is not drained stays for the next run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _of_run(lead: LeadSpec, env: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a drain that may write to a directory which this run has locked."""
    return {**env, RUN_ID: lead.daemon.run_id}


def _clean(local_dir: Path, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    parent = os.getpid()
    with replacing(log) as said:
        return subprocess.Popen(
            [sys.executable, "-s", "-m", "hpcstage", "clean", "--drain", "--local-dir", os.fspath(local_dir)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=environment.for_daemon(env, start.package_parent()),
            cwd="/",
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  the agent has one thread
        )
