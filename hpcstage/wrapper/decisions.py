"""Says what a run decided and why, a line for each decision: what `-v` prints before the command and after it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hpcstage.job import share
from hpcstage.plan.budget import NO_LIMIT, decide
from hpcstage.plan.dataset.datasets import LOCAL
from hpcstage.units import format_number, format_size

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.job.together import Grouping
    from hpcstage.job.types import Job
    from hpcstage.plan.dataset.datasets import Datasets
    from hpcstage.record.parts.run import RunPart
    from hpcstage.record.schema import Record

_MODES = {
    "runtime": "copies while the command runs",
    "upfront": "copies everything, then starts the command",
    "direct": "copies nothing, and measures",
}
_ORDERS = {
    "sampler": "as the program's samplers announced",
    "given": "as the list says",
    "trace": "as the last run read",
    "manifest": "by path",
}


def before(
    config: Config, datasets: Datasets, job: Job, local: LocalDir, group: Grouping | None, part: RunPart
) -> list[str]:
    """Returns what is decided before the command starts."""
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
    return [*lines, _set(config, "placement", "by size and room" if config.placement == "auto" else "")]


def after(record: Record) -> list[str]:
    """Returns what was followed, what was copied and what was not, once the command has ended."""
    from hpcstage.report.terminal.page import REASON_NAMES

    lines = []
    if record.run.stages and (provenance := record.order.provenance):
        lines.append(f"order followed: {provenance}, {_ORDERS.get(provenance, 'as asked for')}")
    if record.group is not None and record.group.placement:
        why = f" ({record.group.placement_why})" if record.group.placement_why else ""
        lines.append(f"placement followed: {record.group.placement}{why}")
    for dataset in record.datasets:
        if record.run.stages and dataset.files is not None and dataset.size_bytes is not None:
            files, size = format_number(dataset.files, "file"), format_size(dataset.size_bytes)
            where = "" if record.group is None else f", on {record.group.reported} nodes together"
            copied = f"{format_number(dataset.staged_files, 'file')}, {format_size(dataset.staged_bytes)}{where}"
            lines.append(f"copied {copied}; {dataset.root} holds {files}, {size}")
    reasons = sorted(record.coverage.reasons.items(), key=lambda item: -item[1])
    if reasons:
        told = ", ".join(f"{count} {REASON_NAMES.get(name, name)}" for name, count in reasons)
        lines.append(f"opened at the source: {told}")
    return lines


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
