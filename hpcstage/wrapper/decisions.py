"""Says what a run decides before its command starts, and why, a line for each decision: what `-v` prints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpcstage.job import share
from hpcstage.plan.budget import NO_LIMIT, decide
from hpcstage.plan.dataset.datasets import LOCAL
from hpcstage.units import format_number, format_size

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job import Job
    from hpcstage.job.localdir import LocalDir
    from hpcstage.job.together import Grouping
    from hpcstage.plan.dataset.datasets import Datasets
    from hpcstage.record.parts.run import RunPart

_MODES = {
    "runtime": "copies while the command runs",
    "upfront": "copies everything, then starts the command",
    "direct": "copies nothing, and measures",
}


def decided(
    config: Config, datasets: Datasets, job: Job, local: LocalDir, group: Grouping | None, part: RunPart
) -> list[str]:
    """Returns a line for each decision."""
    roots, direct_why = ", ".join(os.fsdecode(dataset.root) for dataset in datasets.all) or "none", part.direct_why
    mode = f"mode direct: {direct_why}" if direct_why else _set(config, "mode", _MODES[config.mode])
    lines = [f"datasets: {roots} ({config.origin['data']})", mode, f"staging below {local.path} ({local.why})"]
    if config.origin["local_dir"] != "default":
        lines[-1] = f"staging below {local.path} ({config.origin['local_dir']})"
    if not direct_why:
        lines[1:1] = [f"left alone: {problem.text}" for problem in part.problems if problem.id == LOCAL]
    if config.mode != "direct" and not direct_why:
        shares = 1 if group is None else group.shares
        budget = decide(share.budget_facts(config.budget_asked(), job, local, shares))
        files = "" if budget.inodes >= NO_LIMIT else f", {format_number(budget.inodes, 'file')}"
        lines.append(f"budget {format_size(budget.size_bytes)}{files} ({config.origin['budget']}): {budget.why}")
        lines.append(_set(config, "order", "the best that is known" if config.order == "auto" else ""))
    if group is None:
        return [*lines, f"one node: {_alone(config, job)}"]
    started = "virtual nodes of this machine" if group.virtual else f"brought up with {group.launcher}"
    started = started if group.starts_daemons else "each started by the command's launcher"
    lines.append(f"nodes: {', '.join(group.hosts[:4])}{' ...' if group.hosts[4:] else ''}, {started}")
    what = "partition where a node has no room for all files" if config.placement == "replicate" else ""
    return [*lines, _set(config, "placement", what)]


def _set(config: Config, key: str, what: str) -> str:
    value = config.raw[key]
    return f"{key} {value} ({config.origin[key]})" + (f": {what}" if what else "")


def _alone(config: Config, job: Job) -> str:
    if config.nodes == 1:
        return f"as {config.origin['nodes']} says"
    if len(job.nodes) < 2:
        return "the job has no other" if job.scheduler != "none" else "no scheduler is seen"
    if config.launcher == "none":
        return f"as {config.origin['launcher']} says, of the job's {len(job.nodes)}"
    return f"the others of the job's {len(job.nodes)} cannot be brought up from here"
