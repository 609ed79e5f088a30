"""Defines a node's part of the record: what its daemon saw, as plain data, written to the run directory as JSON.

This module owns the form. Each service of the daemon returns the part with the fields that it knows, and
`record.compose` composes the record from the parts of all nodes. Seconds are relative to `started_unix_s`; an unknown
value is None, never 0. Samples are written by column, as each of many nodes has thousands; a column that holds nothing
but its default is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from hpcstage.jsonform import Count, Seconds, read, written
from hpcstage.problem import Problem
from hpcstage.protocol import rundir
from hpcstage.record.parts.checkpoints import StandstillPart
from hpcstage.record.parts.rows import ProcessPart, Sample
from hpcstage.writing import replace_copy, replace_text


@dataclass(frozen=True)
class DatasetPart:
    """One dataset: its root, what the scan found, and what was staged of it."""

    root: str = ""
    files: Count | None = None
    size_bytes: Count | None = None
    staged_files: Count = 0
    staged_bytes: Count = 0


@dataclass(frozen=True, kw_only=True)
class NodeTotals:
    """The daemon's and its copiers' counts; None: not known."""

    want_ready: int | None = None
    """Opens that asked the daemon for a file that was not staged yet, and got the copy."""
    peer_bytes: int | None = None
    """Bytes of staged files that the node received from nodes of its node group, or of a training that it joined."""
    peer_files: int | None = None
    copied_bytes: int | None = None
    """Bytes that copiers read at the source."""
    copied_files: int | None = None
    copy_opens: int | None = None
    void: int | None = None
    """Files that the program wrote to."""
    refused: int | None = None
    """Files for which there was no room."""
    copy_busy_s: float | None = None
    """Seconds with at least one transfer in flight."""


@dataclass(frozen=True, kw_only=True)
class OrderLead:
    """How many announced files after the front of the program's reading were staged without a gap, while any was
    missing. Null: nothing was announced, or all of it was staged at once."""

    median_files: Count
    least_files: Count
    median_s: Seconds | None
    """In how many seconds the program gets to the end of these files at its pace."""


@dataclass(frozen=True, kw_only=True)
class OrderPart:
    """Where the access order came from, and how far ahead of the program the copies were: of a node, and of the job."""

    provenance: str | None
    """The origin of the order that copies followed last: sampler, given, trace, manifest."""
    announcements: Count | None = None
    """Epochs that samplers announced."""
    lead: OrderLead | None


NO_ORDER = OrderPart(provenance=None, lead=None)


@dataclass(frozen=True, kw_only=True)
class GroupPart:
    """The node group as one node saw it."""

    generations: int = 0
    """The number of groups that the node was in."""
    why: str | None = None
    """The reason of the last end or absence."""


@dataclass(frozen=True, kw_only=True)
class ErrorPart:
    """The files that could not be copied for one reason."""

    path: str
    """The first of them."""
    error: str
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class MissedProcess:
    """A Python process of the command that never attached."""

    command: str = "?"
    pythonpath: str | None = None
    """The process's PYTHONPATH, where it lacks hpcstage's."""


@dataclass(frozen=True)
class NodePart:
    """A node's part of the record: all that its daemon reports."""

    host: str
    mode: str
    """The mode that was followed."""
    started_unix_s: float
    ended_s: float | None = None
    complete: bool = False
    """Whether the daemon ended in an orderly way; False: it was killed, and the figures end where it did."""
    datasets: Sequence[DatasetPart] = ()
    staged_s: float | None = None
    """The time at which the last file was staged, in seconds from the start; None if not all were."""
    totals: NodeTotals = field(default_factory=NodeTotals)
    errors: Sequence[ErrorPart] = ()
    """Up to 20 of them."""
    hist_open: dict[int, int] = field(default_factory=dict)
    """Copiers' opens at the source."""
    hist_read: dict[int, int] = field(default_factory=dict)
    budget_bytes: int | None = None
    used_bytes: int | None = None
    """What the store may hold, and what it holds."""
    order: OrderPart = NO_ORDER
    samples: Sequence[Sample] = ()
    processes: Sequence[ProcessPart] = ()
    missed_processes: Sequence[MissedProcess] = ()
    """Up to 20 of them."""
    missed_count: int = 0
    problems: Sequence[Problem] = ()
    """`node-missing`: the node's daemon never came up (the lead wrote the part);
    `group-missing`: the node staged without the group."""
    node_index: int = 0
    """The node's index in the job; node 0 scans."""
    node_count: int = 1
    """Number of nodes of the job."""
    placement: str = "private"
    """The placement that was followed: private, replicate or partition."""
    placement_why: str = ""
    group: GroupPart | None = None
    standstill: StandstillPart | None = None
    """None: no program told; those that save by themselves do not."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for json.dump, which turns dictionary keys into text."""
        return {**written(replace(self, samples=())), "samples": _columns(self.samples)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodePart:
        """Reads what `to_json` returned. Raises ValueError or LookupError if the data are no part of a node."""
        part = read(cls, {**data, "samples": []})
        return replace(part, samples=_samples(data.get("samples", {})))


def _columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    columns = {name: [getattr(sample, name) for sample in samples] for name in Sample.__dataclass_fields__}
    return {name: column for name, column in columns.items() if name in ALWAYS_WRITTEN or any(column)}


ALWAYS_WRITTEN = ("start_s", "length_s")


def _samples(data: dict[str, list[Any]]) -> list[Sample]:
    """Reads samples by column. Raises ValueError if columns are unequal."""
    rows = len(data["start_s"]) if data else 0
    columns: list[Iterable[Any]] = []
    for name, form in Sample.__dataclass_fields__.items():
        column = data[name] if name in ALWAYS_WRITTEN or name in data else repeat(form.default, rows)
        columns.append(column)
    return [Sample(*row) for row in zip(*columns, strict=True)]


def write_part(part: NodePart, run_dir: Path, host: str, extra: Sequence[tuple[Path, str]] = ()) -> bytes:
    """Writes the part atomically, and copies the files of `extra`, pairs (file, suffix), beside it.

    Runs in a helper process, as the source may hang.
    """
    nodes = run_dir / rundir.NODES
    nodes.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, suffix in extra:
        if path.exists():
            replace_copy(path, nodes / f"{host}.{suffix}")
    replace_text(nodes / f"{host}.json", json.dumps(part.to_json()))
    return b"written"
