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
from typing import Annotated, Any

from hpcstage.problem import Problem
from hpcstage.protocol import rundir
from hpcstage.record.jsonform import (
    DEFAULT_IF_DAMAGED,
    EMPTY_IF_NONE,
    LEFT_OUT_IF_NONE,
    REQUIRED_KEY,
    Count,
    NumberLimits,
    Seconds,
    read,
    written,
)
from hpcstage.record.parts.rows import ProcessPart, Sample
from hpcstage.writing import replace_copy, replace_text

NAMED_NODES = 16
"""A list of nodes, in a part or in the record, names at most this many: 1000 lists of 1000 nodes are too much."""


@dataclass(frozen=True)
class DatasetPart:
    """One dataset: its name and root, what the scan found, and what was staged of it."""

    name: str = field(default="", metadata=REQUIRED_KEY)
    root: str = field(default="", metadata=REQUIRED_KEY)
    arguments: tuple[str, ...] = field(default=(), metadata=REQUIRED_KEY)
    files: Count | None = None
    size_bytes: Count | None = None
    staged_files: Count = 0
    staged_bytes: Count = 0


@dataclass(frozen=True, kw_only=True)
class NodeTotals:
    """The daemon's and its copiers' counts; a count that is not known is left out."""

    want_ready: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    want_direct: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    source_stats: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    source_listings: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    peer_bytes: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """Bytes of staged files that the node received from nodes of its node group, or of a training that it joined."""
    peer_files: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    sent_bytes: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    sent_files: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    source_bytes: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    source_files: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    source_opens: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    source_reads: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    failed: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    void: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    refused: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    divided_files: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """Files that have room on no node, and of which the node has a part."""
    divided_bytes: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """The bytes of these parts that the node had at the end, as they are at the source."""
    copy_busy_s: float | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """Seconds with at least one transfer in flight."""
    measuring_opens: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """Files that the daemon opened only to measure what an open costs; `source_opens` does not contain them."""


@dataclass(frozen=True, kw_only=True)
class AlonePart:
    """The speed of the source for one reader alone (see `daemon.copying.alone`)."""

    files: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """Files that were copied with no other transfer beside them."""
    open_ns: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    read_ns: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    cold_open_ns: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """The time of an open of a file that was copied a while ago: the lower quartile, as a busy machine makes some
    slow."""
    kept_share: float | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """The share of the pages of such files that was still in memory."""
    window_bytes: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """The largest window that the kernel reads ahead of a program there."""


@dataclass(frozen=True, kw_only=True)
class BudgetPart:
    """The budget of the store, its reason, and how much of it is used."""

    size_bytes: int | None = None
    inodes: int | None = None
    why: str = ""
    used_bytes: int | None = None
    used_inodes: int | None = None


@dataclass(frozen=True, kw_only=True)
class OrderLead:
    """How many announced files after the front of the program's reading were staged without a gap, while any was
    missing; in seconds: until the program gets there at its pace. Null: nothing was announced, or all of it was staged
    at once."""

    median_files: Count
    least_files: Count
    median_s: Seconds | None
    least_s: Seconds | None
    samples: tuple[tuple[float, int, float | None], ...]
    """Time, files, seconds."""
    host: str | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """The node that was least ahead."""


@dataclass(frozen=True, kw_only=True)
class IndexTable:
    """One of the program's datasets, and from where it is known which file an index of it is."""

    key: int
    source: Annotated[str, NumberLimits(enum=("program", "trace", "opens", "wrong"))]
    """`program`: the dataset's attributes; `wrong`: these did not hold."""
    samples: Count
    judged: Count
    agreed: Count


@dataclass(frozen=True, kw_only=True)
class OrderPart:
    """Where the order of a node's copies came from, and how well its program kept to it."""

    provenance: str | None = None
    """The origin of the order that copies followed last."""
    ids: int | None = None
    planned: str | None = None
    """The origin of the order with which copies began."""
    announcements: int | None = None
    """Epochs that samplers announced."""
    announced_files: int | None = None
    unknown_samples: int | None = None
    followed: bool | None = None
    trace_written: bool | None = None
    trace_why: str | None = None
    kept_share: float | None = None
    near_share: float | None = None
    announced_opens: int | None = None
    """The opens of announced files that were seen; `kept_share` and `near_share` are shares of them."""
    lead: OrderLead | None = field(default=None, metadata=DEFAULT_IF_DAMAGED)
    tables: tuple[IndexTable, ...] = field(default=(), metadata=DEFAULT_IF_DAMAGED)
    lost_bytes: int | None = None
    opened_files: int | None = None
    trace_used: str | None = None
    trace_unused_why: str | None = None


@dataclass(frozen=True, kw_only=True)
class GroupPart:
    """The node group as one node saw it."""

    generations: int = 0
    """The number of groups that the node was in."""
    size: int = 0
    """Nodes in the last one."""
    missing: tuple[int, ...] = ()
    """The first of the indices of nodes that were not in it."""
    why: str | None = None
    """The reason of the last end or absence."""
    missing_count: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """The number of these nodes, where not all are listed."""

    def shortened(self) -> GroupPart:
        """Returns the part with a short list of missing nodes."""
        if len(self.missing) <= NAMED_NODES:
            return self
        return replace(self, missing=self.missing[:NAMED_NODES], missing_count=len(self.missing))


@dataclass(frozen=True, kw_only=True)
class AccountsPart:
    """The kernel's counters of bytes read when the command has ended. Of a process that did not tell at its end what it
    had read, only the reads of the datasets are accounted for after the daemon's last look."""

    command_bytes: int
    """Bytes that the command and all its descendants read, from files of any kind."""
    accounted_bytes: int
    """The part of them that attached processes read."""
    attached: int
    """The number of attached processes."""
    told: int = 0
    """The number of those that told at their end what they had read."""
    unattached: int | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
    """The number of other processes that were seen; those that lived for a moment are not among them."""


@dataclass(frozen=True, kw_only=True)
class StandstillPart:
    """The saves of checkpoints by which one program of the node was held up, that of which that took longest."""

    saves: Count
    seconds: Seconds
    """The time from the begin of a save until the training could go on, of all of them."""


@dataclass(frozen=True, kw_only=True)
class ErrorPart:
    """The files that could not be copied for one reason."""

    path: str
    """The first of them."""
    error: str
    count: int = 1
    at_s: float | None = field(default=None, metadata=LEFT_OUT_IF_NONE)


@dataclass(frozen=True, kw_only=True)
class MissedProcess:
    """A Python process of the command that never attached."""

    pid: int
    command: str = "?"
    pythonpath: str | None = field(default=None, metadata=LEFT_OUT_IF_NONE)
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
    scan_s: float | None = None
    staged_s: float | None = None
    """The time at which the last file was staged, in seconds from the start; None if not all were."""
    totals: NodeTotals = field(default_factory=NodeTotals)
    alone: AlonePart = field(default_factory=AlonePart, metadata=DEFAULT_IF_DAMAGED)
    memory_bytes: int | None = None
    """Bytes of the node's memory that programs could use at the end, the page cache included."""
    errors: Sequence[ErrorPart] = field(default=(), metadata=DEFAULT_IF_DAMAGED)
    """Up to 20 of them."""
    hist_open: dict[int, int] = field(default_factory=dict)
    """Copiers' opens at the source."""
    hist_read: dict[int, int] = field(default_factory=dict)
    budget: BudgetPart | None = field(default=None, metadata=EMPTY_IF_NONE | DEFAULT_IF_DAMAGED)
    order: OrderPart = field(default_factory=OrderPart, metadata=DEFAULT_IF_DAMAGED)
    samples: Sequence[Sample] = ()
    processes: Sequence[ProcessPart] = ()
    missed_processes: Sequence[MissedProcess] = field(default=(), metadata=DEFAULT_IF_DAMAGED)
    """Up to 20 of them."""
    missed_count: int = 0
    accounts: AccountsPart | None = field(default=None, metadata=EMPTY_IF_NONE | DEFAULT_IF_DAMAGED)
    pressure: dict[str, float] = field(default_factory=dict)
    """The kernel's pressure figures over the run, as far as it offers them: io_some_s, io_full_s, cpu_some_s,
    memory_some_s."""
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
    group: GroupPart | None = field(default=None, metadata=EMPTY_IF_NONE | DEFAULT_IF_DAMAGED)
    standstill: StandstillPart | None = field(default=None, metadata=LEFT_OUT_IF_NONE | DEFAULT_IF_DAMAGED)
    """None: no program told; those that save by themselves do not."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for json.dump, which turns dictionary keys into text; a large job's has fewer samples."""
        samples = joined(self.samples) if self.node_count > MANY_NODES else self.samples
        group = self.group.shortened() if self.group else None
        return {**written(replace(self, samples=(), group=group)), "samples": _columns(samples)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodePart:
        """Reads what `to_json` returned. Raises ValueError or LookupError if the data are no part of a node."""
        part = read(cls, {**data, "samples": []})
        return replace(part, samples=_samples(data.get("samples", [])))


def _columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    columns = {name: [getattr(sample, name) for sample in samples] for name in Sample.__dataclass_fields__}
    return {name: column for name, column in columns.items() if name in ALWAYS_WRITTEN or any(column)}


ALWAYS_WRITTEN = ("start_s", "length_s")


def _samples(data: dict[str, list[Any]] | list[dict[str, Any]]) -> list[Sample]:
    """Reads samples by column, or by row as earlier versions wrote them. Raises ValueError if columns are unequal."""
    if not isinstance(data, dict):
        return [read(Sample, row) for row in data]
    rows = len(data["start_s"]) if data else 0
    columns: list[Iterable[Any]] = []
    for name, form in Sample.__dataclass_fields__.items():
        column = data[name] if name in ALWAYS_WRITTEN or name in data else repeat(form.default, rows)
        columns.append(column)
    return [Sample(*row) for row in zip(*columns, strict=True)]


# ---- fewer samples in jobs with many nodes, where a second of one node matters little ----

MANY_NODES = 64
"""In the parts of jobs with more nodes than this, neighbouring samples are joined."""
MOST_JOINED = 900
"""Such a part has at most this many samples: four seconds each in a run of an hour."""
LEVELS = ("queued_files", "store_bytes")
"""These fields are not added up: the value of the later sample is used."""


def joined(samples: Sequence[Sample], most: int = MOST_JOINED) -> list[Sample]:
    """Joins neighbours two by two until at most `most` samples are left. Their sums do not change."""
    found = list(samples)
    while len(found) > most:
        pairs = [_both(one, other) for one, other in zip(found[::2], found[1::2], strict=False)]
        found = [*pairs, *found[2 * len(pairs) :]]
    return found


def _both(one: Sample, other: Sample) -> Sample:
    end_s = other.start_s + other.length_s
    values = {
        name: getattr(other, name) if name in LEVELS else getattr(one, name) + getattr(other, name)
        for name in Sample.__dataclass_fields__
    }
    values["start_s"], values["length_s"] = one.start_s, round(end_s - one.start_s, 4)
    seen_s = one.length_s + other.length_s
    values["busy"] = round((one.busy * one.length_s + other.busy * other.length_s) / seen_s, 3) if seen_s else 0.0
    values["limited"] = one.limited or other.limited
    return Sample(**values)


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
