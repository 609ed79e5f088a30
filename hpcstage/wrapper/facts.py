"""Gathers what is known of a run before it starts: its part of the record, its id, the notices about its datasets."""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hpcstage import job as jobs
from hpcstage.errors import NotStarted
from hpcstage.plan.dataset.datasets import already_local
from hpcstage.problem import Problem
from hpcstage.record.parts import alive
from hpcstage.record.parts.run import RunPart

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.plan.dataset.datasets import Resolved
    from hpcstage.wrapper.run import Clock


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
        pid_space=alive.pid_space(),
    )


def tell_of_one_node(part: RunPart, job: jobs.Job) -> None:
    """Says in the record that it is about this node only: behind a launcher each node may stage alone."""
    part.nodes = [job.hostname]
    if len(job.nodes) > 1:
        text = f"this report is about {job.hostname} only: each node of this launch stages alone and has its own"
        remedy = "put hpcstage in front of the launcher: one report, and files are passed between the nodes"
        part.problems.append(Problem("alone", text, remedy))


def check_datasets(resolved: Resolved, local: LocalDir, part: RunPart, *, strict: bool) -> list[str]:
    """Returns what to say about the datasets. A dataset that lies on the local disk gains nothing: it is read there."""
    said = []
    if not resolved.datasets:
        part.direct_why = "no dataset is named"
    for notice in [*resolved.warnings, *already_local(resolved.datasets, local.device)]:
        if notice.id == "already_local":
            if strict:
                raise NotStarted(notice.text, notice.remedy)
            part.direct_why = notice.text
        said.append(f"{notice.text} ({notice.remedy})")
        part.problems.append(Problem(notice.id.replace("_", "-"), notice.text, notice.remedy))
    return said
