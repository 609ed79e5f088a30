"""Defines a node's part of the record: what its daemon saw, as plain data, written to the run directory as JSON.

This module owns the form; `daemon` fills it, and `record.compose` composes the record from the parts. Seconds are
relative to `started_unix_s`; an unknown value is None, never 0. Samples are written by column, as each of many nodes
has thousands; a column that holds nothing but its default is left out.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Annotated, Any

from hpcstage.problem import Problem
from hpcstage.protocol import rundir
from hpcstage.record.jsonform import LEFT_OUT, Count, Limits, Seconds
from hpcstage.record.parts.thinning import NODES, thinned
from hpcstage.writing import replace_text


@dataclass(slots=True)
class Sample:
    """The daemon's counts of one interval of about a second."""

    start_s: float
    length_s: float
    copied_bytes: int = 0
    """Bytes that copiers read from the source."""
    copied_files: int = 0
    copy_open_ns: int = 0
    copy_read_ns: int = 0
    """Summed over transfers, as `copy_open_ns` and `copy_write_ns` are."""
    copy_write_ns: int = 0
    busy: float = 0.0
    """Mean number of transfers in flight."""
    limited: bool = False
    """The rate cap, the local disk or an empty queue held transfers back: the sample says nothing about the source."""
    shim_opens: int = 0
    """The program's opens for reading at the source (from the page)."""
    shim_open_ns: int = 0
    shim_bytes: int = 0
    shim_reads: int = 0
    shim_read_ns: int = 0
    hit_opens: int = 0
    wants: int = 0
    want_ns: int = 0
    queued_files: int = 0
    store_bytes: int = 0
    loader_wait_ns: int = 0
    """Waits of PyTorch's loaders for their next batch, summed over processes (LOADER_WAIT_NS)."""
    local_ns: int = 0
    """The program's opens and reads of staged copies (HIT_OPEN_NS, LOCAL_READ_NS), summed over processes."""
    blocked_ns: int = 0
    """Time in which a process of the program had a thread inside a call on a dataset's file, up to the sample's end,
    summed over processes (BLOCKED_NS)."""
    blocked_source_ns: int = 0
    """The part of `blocked_ns` that waited for the source."""
    peer_bytes: int = 0
    """Bytes of staged files received from other nodes."""
    sent_bytes: int = 0
    """Bytes of staged files sent to other nodes."""


UNCOUNTED_LAYER = "uncounted"
"""In place of a layer: the process attached but counts nothing, because no slot was left for it in the page."""


@dataclass
class ProcessPart:
    """One attached process: the head and the counters of its slot. Or several that have ended, summed up (pid 0)."""

    pid: int
    parent_pid: int
    layer: str
    python: str
    attached_s: float
    counters: dict[str, int]
    """The counters by their lower-case names in `protocol.shim.Counter`, without zeros; `direct_<reason>` counts the
    opens at the source with that reason. looked_ns is how long the daemon looked at the process's threads;
    look_inside_source_ns, look_wait_local_ns and the like are what it saw (see `daemon.process.looks`)."""
    hist_open: dict[int, int] = field(default_factory=dict)
    """Opens at the source: their number by bucket (`protocol.shim.bucket_of_ns`)."""
    hist_read: dict[int, int] = field(default_factory=dict)
    processes: int = 1
    """Of several, `counters` has life_ns and phase_ns: how long they lived, and from each one's first call on a
    dataset's file to its last, summed. Times of day are those of the first and the last of them."""


@dataclass
class DatasetPart:
    """One dataset: its name and root, what the scan found, and what was staged of it."""

    name: str
    root: str
    arguments: list[str]
    files: int | None = None
    size_bytes: int | None = None
    staged_files: int = 0
    staged_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class NodeTotals:
    """The daemon's and its copiers' counts; a count that is not known is left out."""

    want_ready: int | None = field(default=None, metadata=LEFT_OUT)
    want_direct: int | None = field(default=None, metadata=LEFT_OUT)
    source_stats: int | None = field(default=None, metadata=LEFT_OUT)
    source_listings: int | None = field(default=None, metadata=LEFT_OUT)
    peer_bytes: int | None = field(default=None, metadata=LEFT_OUT)
    """Bytes of staged files that the node received from other nodes of its node group."""
    peer_files: int | None = field(default=None, metadata=LEFT_OUT)
    sent_bytes: int | None = field(default=None, metadata=LEFT_OUT)
    sent_files: int | None = field(default=None, metadata=LEFT_OUT)
    source_bytes: int | None = field(default=None, metadata=LEFT_OUT)
    source_files: int | None = field(default=None, metadata=LEFT_OUT)
    source_opens: int | None = field(default=None, metadata=LEFT_OUT)
    source_reads: int | None = field(default=None, metadata=LEFT_OUT)
    failed: int | None = field(default=None, metadata=LEFT_OUT)
    void: int | None = field(default=None, metadata=LEFT_OUT)
    refused: int | None = field(default=None, metadata=LEFT_OUT)
    copy_busy_s: float | None = field(default=None, metadata=LEFT_OUT)
    """Seconds with at least one transfer in flight."""
    measuring_opens: int | None = field(default=None, metadata=LEFT_OUT)
    """Files that the daemon opened only to measure what an open costs; `source_opens` does not contain them."""


@dataclass(frozen=True, kw_only=True)
class AlonePart:
    """How fast the source is for one reader alone (see `daemon.copying.alone`)."""

    files: int | None = field(default=None, metadata=LEFT_OUT)
    """Files that were copied with no other transfer beside them."""
    bytes: int | None = field(default=None, metadata=LEFT_OUT)
    open_ns: int | None = field(default=None, metadata=LEFT_OUT)
    read_ns: int | None = field(default=None, metadata=LEFT_OUT)
    reopened: int | None = field(default=None, metadata=LEFT_OUT)
    """Files that were opened once more after all files were staged."""
    cold_open_ns: int | None = field(default=None, metadata=LEFT_OUT)
    """The median of these opens."""
    kept_share: float | None = field(default=None, metadata=LEFT_OUT)
    """The share of their pages that was still in memory."""


@dataclass(frozen=True, kw_only=True)
class BudgetPart:
    """What the store may hold, why, and what it holds."""

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
    host: str | None = field(default=None, metadata=LEFT_OUT)
    """The node that was least ahead."""


@dataclass(frozen=True, kw_only=True)
class IndexTable:
    """One of the program's datasets, and from where it is known which file an index of it is."""

    key: int
    source: Annotated[str, Limits(enum=("program", "trace", "opens", "wrong"))]
    """`program`: the dataset's attributes; `wrong`: these did not hold."""
    samples: Count
    judged: Count
    agreed: Count


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
    missing_count: int | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class ErrorPart:
    """The files that could not be copied for one reason."""

    path: str
    """The first of them."""
    error: str
    count: int = 1
    at_s: float | None = field(default=None, metadata=LEFT_OUT)


@dataclass(frozen=True, kw_only=True)
class MissedProcess:
    """A Python process of the command that never attached."""

    pid: int
    command: str = "?"
    pythonpath: str | None = field(default=None, metadata=LEFT_OUT)
    """The process's PYTHONPATH, where it lacks hpcstage's."""


@dataclass
class NodePart:
    """A node's part of the record: all that its daemon reports."""

    host: str
    mode: str
    """The mode that was followed."""
    mode_asked: str
    mode_why: str
    started_unix_s: float
    ended_s: float | None = None
    complete: bool = False
    """Whether the daemon ended in an orderly way; False: it was killed, and the figures end where it did."""
    datasets: list[DatasetPart] = field(default_factory=list)
    scan_s: float | None = None
    staged_s: float | None = None
    """When the last file was staged, in seconds from the start; None if not all were."""
    totals: dict[str, float] = field(default_factory=dict)
    """source_bytes, source_files, source_opens, source_reads, source_stats, source_listings count what daemon and
    copiers did (the shims' counts are in `processes`). Others are want_ready, want_direct, failed, void and refused.
    copy_busy_s is the time with at least one transfer in flight; measuring_opens counts the opens of
    `daemon.copying.alone`, which source_opens does not contain. In a node group: peer_bytes and peer_files received
    from other nodes, sent_bytes and sent_files sent to them."""
    alone: dict[str, float] = field(default_factory=dict)
    """How fast the source is for one reader alone (see `daemon.copying.alone`). files, bytes, open_ns and read_ns are
    of transfers that had no other beside them. reopened counts the files that were opened once more after all files
    were staged; cold_open_ns is the median of these opens, and kept_share the share of their pages that was still in
    memory."""
    memory_bytes: int | None = None
    """Bytes of the node's memory that programs could use at the end, the page cache included."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Up to 20 entries {path, error, count, at_s}; `count` is the number of files with the same error."""
    hist_open: dict[int, int] = field(default_factory=dict)
    """Copiers' opens at the source."""
    hist_read: dict[int, int] = field(default_factory=dict)
    budget: dict[str, Any] = field(default_factory=dict)
    """size_bytes, inodes, why, used_bytes, used_inodes."""
    order: dict[str, Any] = field(default_factory=dict)
    """provenance and ids are of the order that copies followed last, planned is the provenance of the one with which
    they began. announcements, announced_files, unknown_samples and followed say what samplers announced; kept_share,
    near_share, announced_opens, lead and tables say how well the program kept to it. Others are opened_files,
    lost_bytes, trace_used, trace_unused_why, trace_written and trace_why."""
    forecast: dict[str, Any] | None = None
    samples: list[Sample] = field(default_factory=list)
    processes: list[ProcessPart] = field(default_factory=list)
    missed_processes: list[dict[str, Any]] = field(default_factory=list)
    """Python processes of the command that never attached: {pid, command}; up to 20."""
    missed_count: int = 0
    accounts: dict[str, int] = field(default_factory=dict)
    """The kernel's counters when the command has ended. command_bytes: read by the command and all its descendants,
    from files of any kind; accounted_bytes: the part of it that attached processes read; attached: the number of these
    processes. After the daemon's last look at a process, only its reads of the datasets are accounted for. Empty: not
    known."""
    pressure: dict[str, float] = field(default_factory=dict)
    """The kernel's pressure figures over the run, as far as it offers them: io_some_s, io_full_s, cpu_some_s,
    memory_some_s."""
    problems: list[Problem] = field(default_factory=list)
    """`node-missing`: the node's daemon never came up (the lead wrote the part);
    `group-missing`: the node staged without the group."""
    node_index: int = 0
    """The node's index in the job; node 0 scans."""
    node_count: int = 1
    """Number of nodes of the job."""
    placement: str = "private"
    """The placement that was followed: private, replicate or partition."""
    placement_why: str = ""
    group: dict[str, Any] = field(default_factory=dict)
    """The node group; empty without one. generations: how many worlds of exchanges this node was in; size: nodes in the
    last; missing: indices of nodes that were not in it (the first of them, with missing_count, where there are many);
    why: the reason of the last end or absence."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for json.dump, which turns dictionary keys into text; a large job's has fewer samples."""
        samples = thinned(self.samples) if self.node_count > NODES else self.samples
        plain = asdict(replace(self, samples=[], group=short_group(self.group)))
        return {**plain, "samples": _columns(samples), "problems": [problem.to_json() for problem in self.problems]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodePart:
        """Reads what `to_json` returned; drops unknown keys of a newer version."""
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        known["datasets"] = [DatasetPart(**_known(DatasetPart, d)) for d in known.get("datasets", [])]
        known["samples"] = _samples(known.get("samples", []))
        known["problems"] = [Problem.from_json(d) for d in known.get("problems", [])]
        known["processes"] = [_process(d) for d in known.get("processes", [])]
        for name in ("hist_open", "hist_read"):
            known[name] = {int(k): v for k, v in known.get(name, {}).items()}
        return cls(**known)


def short_group(group: dict[str, Any]) -> dict[str, Any]:
    """Cuts a long list of missing nodes to the first ones and their number: 1000 lists of 1000 nodes are too much."""
    missing = group.get("missing") or []
    if len(missing) <= NAMED:
        return group
    return {**group, "missing": missing[:NAMED], "missing_count": len(missing)}


def _columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    columns = {name: [getattr(sample, name) for sample in samples] for name in Sample.__dataclass_fields__}
    return {name: column for name, column in columns.items() if name in REQUIRED or any(column)}


NAMED = 16
REQUIRED = ("start_s", "length_s")


def _samples(data: dict[str, list[Any]] | list[dict[str, Any]]) -> list[Sample]:
    """Reads samples by column, or by row as earlier versions wrote them. Raises ValueError if columns are unequal."""
    if not isinstance(data, dict):
        return [Sample(**_known(Sample, row)) for row in data]
    rows = len(data["start_s"]) if data else 0
    columns: list[Iterable[Any]] = []
    for name, form in Sample.__dataclass_fields__.items():
        column = data[name] if name in REQUIRED or name in data else repeat(form.default, rows)
        columns.append(column)
    return [Sample(*row) for row in zip(*columns, strict=True)]


def _known(form: type[Any], data: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in data.items() if k in form.__dataclass_fields__}


def _process(data: dict[str, Any]) -> ProcessPart:
    part = ProcessPart(**_known(ProcessPart, data))
    part.hist_open = {int(k): v for k, v in part.hist_open.items()}
    part.hist_read = {int(k): v for k, v in part.hist_read.items()}
    return part


@dataclass
class RunPart:
    """The wrapper's part of the record: what it knows of the run."""

    run_id: str
    command: list[str]
    cwd: str
    host: str
    started_unix_s: float
    """When the wrapper started."""
    child_started_s: float | None = None
    child_ended_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    mode_asked: str = "runtime"
    version: str = ""
    python: str = ""
    kernel: str = ""
    scheduler: str = "none"
    job_id: str | None = None
    nodes: list[str] = field(default_factory=list)
    local_dir: str | None = None
    local_dir_why: str = ""
    config: list[dict[str, Any]] = field(default_factory=list)
    """The settings: entries {key, value, source}."""
    child_cpu_s: float | None = None
    """User and system time of the command and its reaped children."""
    child_pid: int | None = None
    run_dir: str | None = None
    roots: list[str] = field(default_factory=list)
    """Roots of the datasets, known before any node has reported."""
    problems: list[Problem] = field(default_factory=list)
    direct_why: str = ""
    """Why nothing is staged although another mode was asked for; empty: the mode that was asked for is followed."""
    aside: bool = False
    """Whether hpcstage could not stage and left the machine to the command, whose end it did not see."""
    pid_space: str = ""
    """The wrapper's PID namespace; `child_pid` is valid only within it."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for json.dump."""
        return {**asdict(self), "problems": [problem.to_json() for problem in self.problems]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunPart:
        """Reads what `to_json` returned; drops unknown keys of a newer version."""
        problems = [Problem.from_json(d) for d in data.get("problems", [])]
        return cls(**{**_known(cls, data), "problems": problems})


def write_part(part: NodePart, run_dir: Path, host: str, extra: Sequence[tuple[Path, str]] = ()) -> bytes:
    """Writes the part atomically, and copies the files of `extra`, pairs (file, suffix), beside it.

    Runs in a helper process, as the source may hang.
    """
    nodes = run_dir / rundir.NODES
    nodes.mkdir(parents=True, exist_ok=True)
    for path, suffix in extra:
        if path.exists():
            shutil.copyfile(path, nodes / f"{host}.{suffix}")
    replace_text(nodes / f"{host}.json", json.dumps(part.to_json()))
    return b"written"
