"""A node's part of the record: what its daemon saw, as plain data. Written to the run directory as JSON.

Owns the form; `daemon` fills it, `record.compose` draws the record from the parts. Seconds are relative to
`started_unix_s`; unknown is None, never 0. Samples are written by column, as there are thousands on each of many
nodes; a column of nothing but its default is left out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from hpcstage.record.parts.thinning import NODES, thinned


@dataclass(slots=True)
class Sample:
    """One interval of about a second, seen from the daemon."""

    start_s: float
    length_s: float
    copied_bytes: int = 0
    """Read from the source by copiers."""
    copied_files: int = 0
    copy_open_ns: int = 0
    copy_read_ns: int = 0
    """Summed over transfers, as are the others."""
    copy_write_ns: int = 0
    busy: float = 0.0
    """Mean number of transfers in flight."""
    limited: bool = False
    """The rate cap, the local disk or an empty queue kept transfers back: says nothing about the source."""
    shim_opens: int = 0
    """Opens for reading at the source by the program (from the page)."""
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
    """Time in which the processes of the program had a thread inside a call on a dataset's file, each counted by itself
    and summed, up to the sample's end (BLOCKED_NS)."""
    blocked_source_ns: int = 0
    """The part of it that waited for the source."""
    peer_bytes: int = 0
    """Of staged files received from other nodes."""
    sent_bytes: int = 0
    """Of staged files sent to other nodes."""


@dataclass
class ProcessPart:
    """One attached process: the head and the counters of its slot."""

    pid: int
    parent_pid: int
    layer: str
    python: str
    attached_s: float
    counters: dict[str, int]
    """By the lower-case names of wire.Counter, zeros left out; `direct_<reason>` for the reasons. looked_ns: of how
    long the daemon looked at its threads, look_inside_source_ns, look_wait_local_ns and the like: what it saw (see
    `daemon.process.looks`)."""
    hist_open: dict[int, int] = field(default_factory=dict)
    """Bucket (wire.bucket_of_ns) → count, opens at the source."""
    hist_read: dict[int, int] = field(default_factory=dict)


@dataclass
class DatasetPart:
    """What happened to one dataset."""

    name: str
    root: str
    arguments: list[str]
    files: int | None = None
    size_bytes: int | None = None
    staged_files: int = 0
    staged_bytes: int = 0


@dataclass
class NodePart:
    """Everything that one daemon reports."""

    host: str
    mode: str
    """What was done."""
    mode_asked: str
    mode_why: str
    started_unix_s: float
    ended_s: float | None = None
    complete: bool = False
    """The daemon ended in an orderly way; False: killed, the numbers end where it did."""
    datasets: list[DatasetPart] = field(default_factory=list)
    scan_s: float | None = None
    staged_s: float | None = None
    """When the last file was staged (from the start), if all were."""
    totals: dict[str, float] = field(default_factory=dict)
    """source_bytes, source_files, source_opens, source_reads, source_stats, source_listings: by daemon and copiers
    alone (the shims' are in `processes`); want_ready, want_direct; failed, void, refused; copy_busy_s: time with at
    least one transfer in flight; measuring_opens: those of `daemon.copying.alone`, not in source_opens. In a node
    group: peer_bytes, peer_files received from other nodes, sent_bytes, sent_files sent to them."""
    alone: dict[str, float] = field(default_factory=dict)
    """What the source gives to one reader alone (see `daemon.copying.alone`). files, bytes, open_ns, read_ns: transfers
    that had no other beside them. reopened: files opened once more after all was staged. cold_open_ns: the median of
    these opens. kept_share: of their pages, how many were still in memory."""
    memory_bytes: int | None = None
    """What programs could use of the node's memory at the end, the page cache included."""
    errors: list[dict[str, Any]] = field(default_factory=list)
    """Up to 20: {path, error, count, at_s}; the same error of many files counts up."""
    hist_open: dict[int, int] = field(default_factory=dict)
    """Copiers' opens at the source."""
    hist_read: dict[int, int] = field(default_factory=dict)
    budget: dict[str, Any] = field(default_factory=dict)
    """size_bytes, inodes, why, used_bytes, used_inodes."""
    order: dict[str, Any] = field(default_factory=dict)
    """provenance and ids of the order that copies followed last, and with which one they began (planned);
    announcements, announced_files, unknown_samples, followed: what samplers announced; kept_share, near_share,
    announced_opens, lead, tables: how it was kept; opened_files, lost_bytes; trace_used, trace_unused_why,
    trace_written, trace_why."""
    forecast: dict[str, Any] | None = None
    samples: list[Sample] = field(default_factory=list)
    processes: list[ProcessPart] = field(default_factory=list)
    missed_processes: list[dict[str, Any]] = field(default_factory=list)
    """Python processes of the command that never attached: {pid, command}; up to 20."""
    missed_count: int = 0
    accounts: dict[str, int] = field(default_factory=dict)
    """By the kernel's counters, when the command has ended: command_bytes that it and all its descendants read, from
    files of any kind; accounted_bytes of these by attached processes; attached: so many these were. What each read
    after the last look at it is not accounted for, but for reads of the datasets. Empty: not known."""
    pressure: dict[str, float] = field(default_factory=dict)
    """From the kernel over the run: io_some_s, io_full_s, cpu_some_s, memory_some_s; those that it offers."""
    problems: list[dict[str, str]] = field(default_factory=list)
    """{id, text, remedy}. `node-missing`: its daemon never came up (the part is the lead's); `group-missing`: it
    staged without the group."""
    node_index: int = 0
    """Of the job's nodes; the first scans."""
    node_count: int = 1
    """So many nodes the job has."""
    placement: str = "private"
    """What was done: private, replicate or partition."""
    placement_why: str = ""
    group: dict[str, Any] = field(default_factory=dict)
    """The node group, empty without one: generations (worlds of exchanges that this node was in), size (nodes in the
    last), missing (indices of nodes that were not in it; the first of them, with missing_count, where they are many),
    why (the reason of the last end or absence)."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for json.dump (dictionary keys become text there); of a large job with fewer samples."""
        samples = thinned(self.samples) if self.node_count > NODES else self.samples
        return {**asdict(replace(self, samples=[], group=short_group(self.group))), "samples": _columns(samples)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> NodePart:
        """Reads what `to_json` gave; unknown keys of a newer version are dropped."""
        known = {k: v for k, v in data.items() if k in cls.__dataclass_fields__}
        known["datasets"] = [DatasetPart(**_known(DatasetPart, d)) for d in known.get("datasets", [])]
        known["samples"] = _samples(known.get("samples", []))
        known["processes"] = [_process(d) for d in known.get("processes", [])]
        for name in ("hist_open", "hist_read"):
            known[name] = {int(k): v for k, v in known.get(name, {}).items()}
        return cls(**known)


def short_group(group: dict[str, Any]) -> dict[str, Any]:
    """Where many nodes are missing, the first of them and their number: a thousand lists of a thousand are too much."""
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
    """By column, or by row as earlier versions wrote them. Raises ValueError where columns differ in length."""
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
    """What the wrapper knows of a run, for the record."""

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
    """{key, value, source}."""
    child_cpu_s: float | None = None
    """User and system time of the command and its reaped children."""
    child_pid: int | None = None
    run_dir: str | None = None
    roots: list[str] = field(default_factory=list)
    """Roots of the datasets, known before any node has reported."""
    problems: list[dict[str, str]] = field(default_factory=list)
    """{id, text, remedy}."""
    direct_why: str = ""
    """Why nothing is staged although another mode was asked for; empty: the mode that was asked for is followed."""
    aside: bool = False
    """hpcstage could not stage and left the machine to the command, whose end it did not see."""
    pid_space: str = ""
    """The wrapper's PID namespace: within it `child_pid` says whether the command still runs."""

    def to_json(self) -> dict[str, Any]:
        """Plain data for json.dump."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunPart:
        """Reads what `to_json` gave; unknown keys of a newer version are dropped."""
        return cls(**_known(cls, data))


def write_part(part: NodePart, run_dir: Path, host: str, extra: Sequence[tuple[Path, str]] = ()) -> bytes:
    """Writes the part atomically, and copies files beside it: (file, suffix). Runs in a helper: the source may hang."""
    nodes = run_dir / "nodes"
    nodes.mkdir(parents=True, exist_ok=True)
    for path, suffix in extra:
        if path.exists():
            shutil.copyfile(path, nodes / f"{host}.{suffix}")
    temporary = nodes / f".{host}.json.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(part.to_json(), file)
    temporary.replace(nodes / f"{host}.json")
    return b"written"
