"""Composes the record, the one machine-readable result of a run, from the parts of the wrapper and the nodes. Pure.

This module owns the top level of the record (`schema` says what each key holds). The larger sections have modules of
their own. The parts are read one after the other, and only the `Digest` of each node stays in memory.

A sum over nodes covers the nodes that reported a figure; `group` and `notes` name those that did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hpcstage import __version__, jsonform
from hpcstage.record.figures.contention import contention_of
from hpcstage.record.figures.counts import coverage_of, summed
from hpcstage.record.figures.digest import Digest, digest_of, missed_of
from hpcstage.record.figures.track import series_of
from hpcstage.record.figures.waits import ENOUGH_SHARE, NodeTimes, fit, mean
from hpcstage.record.nodes import group_of, rows_of
from hpcstage.record.notes import notes_of
from hpcstage.record.parts.alive import Life
from hpcstage.record.parts.checkpoints import CheckpointsPart
from hpcstage.record.parts.part import DatasetPart, NodePart, OrderPart
from hpcstage.record.parts.roster import Presence, expected, is_left_over, names_of, without_part
from hpcstage.record.parts.run import RunPart
from hpcstage.record.problems import ended, problems_of
from hpcstage.record.schema import (
    VERSION,
    Record,
    RunSection,
    RunState,
    Split,
    TimeSplit,
)
from hpcstage.record.verdict import verdict_of

NOT_ENDED = "the command has not ended, as far as is known: the times are those up to now"


def compose(run: RunPart, parts: Iterable[NodePart], running: Life | None = None) -> Record:
    """Returns the record. A missing value is null in it, and `notes` say why.

    `running` says why the command is taken to be still running, where hpcstage saw no end of it.
    """
    nodes = _read(run, parts, running)
    wall_s = _wall_of(run, [node for node in nodes if node.speaks] or nodes)
    nodes = [replace(node, split=fit(mean(node.times.splits), wall_s or 0.0)) for node in nodes]
    contention, paces = contention_of(nodes)
    nodes = [replace(node, relative_pace=pace) for node, pace in zip(nodes, paces, strict=True)]
    told = [node for node in nodes if node.speaks] or nodes
    split = _time_split(run, wall_s, told)
    datasets, totals = _datasets(told), summed([(node.part, node.totals) for node in told])
    known = [node.part for node in nodes]
    silent, total = without_part(run, known), expected(run, known)
    record = Record(
        schema_version=VERSION,
        generator=f"hpcstage {__version__}",
        complete=ended(run) and not silent and all(node.row.state is Presence.OK for node in nodes),
        run=_run(run, told, running),
        config=run.config,
        config_origin=run.config_origin,
        datasets=datasets,
        nodes=tuple(rows_of(run, nodes, silent if total > 1 else [], wall_s or 0.0, contention)),
        group=group_of(nodes, total),
        totals=totals,
        time_split=replace(split, unmeasured=(NOT_ENDED,)) if running and not ended(run) else split,
        epochs=next((node.epochs for node in told if node.epochs), ()),
        coverage=coverage_of([(node.part, node.layers) for node in told], missed_of(told)),
        contention=contention,
        order=_order(told),
        series=series_of([node.track for node in told if node.track is not None]),
        notes=(),
        drains=run.drains,
        checkpoints=_checkpoints(run.checkpoints, told),
        elastic=run.elastic,
    )
    record = replace(record, notes=notes_of(record, problems_of(run, nodes, silent, total, running)))
    return replace(record, verdict=verdict_of(record))


def _read(run: RunPart, parts: Iterable[NodePart], running: Life | None) -> list[Digest]:
    """Returns the nodes by index."""
    found = [digest_of(run, part, running) for part in parts if not is_left_over(run, part)]
    nodes = sorted(_without_doubles(found), key=lambda node: node.part.node_index)
    names = names_of([node.part for node in nodes])
    return [replace(node, row=replace(node.row, host=name)) for node, name in zip(nodes, names, strict=True)]


def _without_doubles(nodes: Sequence[Digest]) -> list[Digest]:
    """Drops the part that says that a node never came up, where the node came up after all and has its own part."""
    came = [node for node in nodes if node.row.state is not Presence.MISSING]
    here = {(node.part.host, node.part.node_index) for node in came}
    return [*came, *(node for node in nodes if (node.part.host, node.part.node_index) not in here)]


def _checkpoints(part: CheckpointsPart | None, nodes: Sequence[Digest]) -> CheckpointsPart | None:
    """Adds how long training stood still: nodes save side by side, so the longest time of any counts."""
    known = [node.part.standstill for node in nodes if node.part.standstill is not None]
    return part and replace(part, standstill=max(known, key=lambda one: one.seconds, default=None))


def _run(run: RunPart, nodes: Sequence[Digest], running: Life | None) -> RunSection:
    found = {"mode": nodes[0].part.mode if nodes else None, "mode_why": run.direct_why or None}
    return jsonform.read(RunSection, {**vars(run), "id": run.run_id, "state": state_of(run, running), **found})


def state_of(run: RunPart, running: Life | None) -> RunState:
    """Says how far the run got, as far as hpcstage saw it."""
    if run.aside:
        return "aside"
    if ended(run):
        return "ended" if run.child_started_s is not None else "not started"
    if running is None:
        return "lost"
    return "running" if running.is_certain else "unclear"


def _datasets(nodes: Sequence[Digest]) -> tuple[DatasetPart, ...]:
    """Merges the datasets by root: adds what the nodes staged; what they scanned is the same on all nodes."""
    merged: dict[str, DatasetPart] = {}
    for dataset in (dataset for node in nodes for dataset in node.part.datasets):
        found = merged.setdefault(dataset.root, replace(dataset, staged_files=0, staged_bytes=0))
        merged[dataset.root] = replace(
            found,
            files=_larger(found.files, dataset.files),
            size_bytes=_larger(found.size_bytes, dataset.size_bytes),
            staged_files=found.staged_files + dataset.staged_files,
            staged_bytes=found.staged_bytes + dataset.staged_bytes,
        )
    return tuple(merged.values())


def _larger(one: int | None, other: int | None) -> int | None:
    return max((value for value in (one, other) if value is not None), default=None)


# ---- the order: what each node's daemon saw of its own loaders ----


def _order(nodes: Sequence[Digest]) -> OrderPart:
    """Returns the section. `lead` is null where nothing was announced, or no announced file was seen to be opened; else
    it is that of the node whose copies were least ahead, as a job waits for its slowest node."""
    parts = [node.part.order for node in nodes]
    leads = [part.lead for part in parts if part.lead is not None]
    announced = [part for part in parts if part.announcements is not None]
    return OrderPart(
        provenance=next((part.provenance for part in parts if part.provenance is not None), None),
        announcements=sum(part.announcements or 0 for part in announced) if announced else None,
        lead=min(leads, key=lambda lead: (lead.median_files, lead.least_files), default=None),
    )


# ---- the division of the wall time ----


def _wall_of(run: RunPart, nodes: Sequence[Digest]) -> float | None:
    """Returns how long the command ran; where its end was not seen, up to the last time that any node noted."""
    end_s = run.child_ended_s
    if end_s is None:
        end_s = max((node.shift_s + node.last_s for node in nodes), default=None)
    return None if end_s is None else max(0.0, end_s - (run.child_started_s or 0.0))


def _time_split(run: RunPart, wall_s: float | None, nodes: Sequence[Digest]) -> TimeSplit:
    """Returns the section, which divides the command's wall time.

    For any counters, compute + wait for the source + wait for local + preprocessing + other = wall, and no part is
    negative. A part that was not measured is None, and `other_s` contains its time. With several nodes the parts are
    means over all training processes, so that they still add up to the wall time.
    """
    is_seen = run.child_ended_s is not None
    said = [] if is_seen else ["the end of the command was not seen: up to the last sample"]
    split = fit(_of_all([node.times for node in nodes], said), wall_s or 0.0)
    return TimeSplit(
        wall_s=wall_s,
        **vars(split),
        other_s=None if wall_s is None else max(0.0, wall_s - split.measured_s),
        hidden_s=_hidden_s(nodes, split, wall_s),
        before_s=run.child_started_s,
        loader_epochs=max((node.times.epochs for node in nodes if node.times.epochs is not None), default=None),
        loader_workers=max((node.times.workers for node in nodes if node.times.workers is not None), default=None),
        unmeasured=tuple(dict.fromkeys(said)),
    )


def _of_all(nodes: Sequence[NodeTimes], said: list[str]) -> Split:
    """Returns the mean over all nodes' training processes, or where there are none, over the nodes that read; without
    those whose waits were not measured, if the others are enough to stand for all."""
    used = [node for node in nodes if node.workers is not None] or [node for node in nodes if node.splits]
    said += [sentence for node in used for sentence in node.said]
    splits = [split for node in used for split in node.splits]
    known = [split for split in splits if split.wait_source_s is not None]
    if not splits:
        attached = any(node.attached for node in nodes)
        said.append(
            "no node reported" if not nodes
            else "no attached process opened a file of the datasets" if attached
            else "no process of the command attached"
        )  # fmt: skip
    elif len(splits) > len(known) >= ENOUGH_SHARE * len(splits):
        left_out = len(splits) - len(known)
        said.append(f"waits of {left_out} of {len(splits)} processes were not measured: left out of the mean")
        splits = known
    return mean(splits)


def _hidden_s(nodes: Sequence[Digest], split: Split, wall_s: float | None) -> float | None:
    """Returns the seconds with copies in flight while the command ran and did not wait for the source; the mean over
    the nodes. None: something was copied, and the waits were not measured."""
    copying = [node.copying_s for node in nodes if node.copying_s is not None]
    if not any(copying):
        return 0.0 if copying else None
    if split.wait_source_s is None or wall_s is None:
        return None
    return max(0.0, min(wall_s, sum(copying) / len(copying)) - split.wait_source_s)
