"""Defines the record, the one machine-readable result of a run, as frozen dataclasses. `python -m
hpcstage.record.schema` prints its JSON schema.

This module owns the names, the types and the meaning of the record's keys: docstrings of classes and attributes are the
schema's descriptions. `jsonform` says how objects become JSON, and `record.compose` fills them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal

from hpcstage import jsonform
from hpcstage.jsonform import Count, NotNegative, Seconds, Share
from hpcstage.record.parts.checkpoints import CheckpointsPart
from hpcstage.record.parts.elastic import ElasticPart
from hpcstage.record.parts.outputs import OutputsPart
from hpcstage.record.parts.part import DatasetPart, MissedProcess, OrderPart
from hpcstage.record.parts.roster import Presence

VERSION = "1.0"
TITLE = "The record of a run of hpcstage"
RunState = Literal["ended", "running", "unclear", "lost", "aside", "not started"]
VerdictKind = Literal[
    "error", "running", "no-dataset", "already-local", "not-attached", "nothing-opened", "not-measured",
    "source-keeps-up", "direct-was-faster", "copies-served", "copies-late", "does-not-fit", "source-contended",
    "source-limits", "local-disk-limits", "other-nodes-limit",
]  # fmt: skip
Column = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """The run, its command, and where it took place."""

    id: str
    command: tuple[str, ...]
    host: str
    mode: str | None
    """runtime, upfront or direct."""
    mode_asked: str
    mode_why: str | None
    state: RunState
    """ended: the end of the command was seen; running: it still runs; unclear: it runs on another host, or was killed a
    moment ago; lost: hpcstage stopped before it; aside: nothing could be staged, the command ran without hpcstage; not
    started: the command did not start."""
    started_unix_s: float
    exit_code: int | None
    signal: int | None
    scheduler: str
    job_id: str | None
    local_dir: str | None

    @property
    def stages(self) -> bool:
        """Returns whether the run's mode stages files."""
        return self.mode in ("runtime", "upfront")

    @property
    def was_watched(self) -> bool:
        """Returns whether the command ran with hpcstage beside it."""
        return self.state not in ("aside", "not started")


@dataclass(frozen=True)
class Split:
    """Seconds of a process, or the mean of several, by what it did. Null: not measured."""

    compute_s: Seconds | None
    wait_source_s: Seconds | None
    wait_local_s: Seconds | None
    preprocess_s: Seconds | None
    """Waits of the loader that reading does not explain: decoding, collating. The least it can have been."""

    @property
    def measured_s(self) -> float:
        """Returns the sum of the parts that were measured."""
        return sum(filter(None, (self.compute_s, self.wait_source_s, self.wait_local_s, self.preprocess_s)), 0.0)

    @property
    def waited_s(self) -> float | None:
        """Returns the seconds that the program waited for the source and the local disk; None: not measured."""
        if self.wait_source_s is None or self.wait_local_s is None:
            return None
        return self.wait_source_s + self.wait_local_s


@dataclass(frozen=True, kw_only=True)
class NodeRow:
    """One node of the job."""

    host: str
    """The name of the node; with its index where several nodes share a host."""
    state: Presence = Presence.OK
    """died: its daemon ended before the job did; missing: none ever reported; silent: none has reported for a while."""
    why: str | None = None
    """Why the node died or is missing, as far as anybody said."""
    slow: tuple[str, ...] = ()
    """The figures in which it is slower than the median of the other nodes; empty with one node."""
    staged_s: float | None = None
    """When its last file was staged; null: not all were."""
    staged_files: Count | None = None
    """Files in its store at the end, from wherever."""
    source_bytes: Count | None = None
    """Bytes read at the source by its copiers and its program."""
    peer_bytes: Count | None = None
    """Bytes received from other nodes."""
    local_bytes: Count | None = None
    """Bytes read by its program from staged copies."""
    opens: Count | None = None
    """Opens by its program, below the datasets. Null: the node reported no figure."""
    waited_s: Seconds | None = None
    """The waits for files, as in time_split, of this node alone: the mean of its training processes."""
    reader_bytes_per_s: NotNegative | None = None
    """The rate of one reader of its program at the source, with the opens."""
    disk_write_share: Share | None = None
    """The share of all their time that transfers spent in writes to the local disk; null where that was short."""
    disk_read_bytes_per_s: NotNegative | None = None
    """The rate of one reader of staged copies."""
    budget_bytes: Count | None = None
    """What its store may hold."""
    used_bytes: Count | None = None
    over_time: tuple[Count, ...] | None = None
    """What the source gave to it, in bytes per second, at up to 60 equal distances on the axis of all nodes; null where
    the node reported none."""


@dataclass(frozen=True, kw_only=True)
class GroupSection:
    """The nodes as a group. Null where the job has one node."""

    placement: str | None
    """The placement that most nodes followed: private, replicate or partition."""
    placement_why: str | None = None
    generations: Count
    """How often the group was started."""


@dataclass(frozen=True, kw_only=True)
class RunTotals:
    """Sums over the nodes that reported: bytes that two nodes read from the source count twice. Null where one of them
    does not know. Programs on nodes without a daemon are not counted."""

    source_bytes: Count | None
    """Bytes read at the source: by copiers and by the program. Null if a process that read there did not measure it."""
    copied_bytes: Count | None
    """The copiers' share of them."""
    copy_read_s: Seconds | None = None
    """Time that copiers spent in opens and reads at the source, summed over all copies."""
    direct_bytes: Count | None
    """The program's share of them."""
    peer_bytes: Count | None
    """Bytes of staged files that nodes received from other nodes, also from those of a training that they joined. Null:
    nodes did not share."""
    local_bytes: Count | None
    """Bytes that the program read from staged copies."""
    wanted: Count | None
    """Opens that asked the daemon for a file that was not staged yet."""
    want_ready: Count | None = None
    """Those that got the copy."""


@dataclass(frozen=True, kw_only=True)
class TimeSplit(Split):
    """The division of the wall time. Of several training processes, on one node or on many, it is the mean; nothing is
    summed over nodes, as a second in which all wait is one second of the job."""

    wall_s: Seconds | None
    """From the start of the command to its end. compute_s + wait_source_s + wait_local_s + preprocess_s + other_s =
    wall_s; a null part is contained in other_s."""
    other_s: Seconds | None
    hidden_s: Seconds | None
    """Time with copies in flight while the command ran and did not wait for the source. It overlaps the other parts.
    With several nodes it is the mean."""
    before_s: Seconds | None
    """From the start of hpcstage to that of the command: the staging, in mode upfront."""
    loader_epochs: Count | None = None
    """Epochs that PyTorch's loader went through, the most of any training process. Null: no process had one."""
    loader_workers: Count | None = None
    unmeasured: tuple[str, ...]

    @property
    def total_s(self) -> float | None:
        """Returns the seconds of the command and of staging before it."""
        return None if self.wall_s is None else self.wall_s + (self.before_s or 0.0)


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch of PyTorch's loader, as the first node saw it: from the end of the epoch before (the first one: from
    its first batch) to its own end, to the length of a sample (a quarter of a second; a second in long runs), whose
    bytes count with the epoch that ended in it. A loader of validation data has epochs of its own. One that was broken
    off, and time between epochs, are in the next; what was copied before the first batch is in none."""

    number: Count
    start_s: Seconds
    length_s: Seconds
    loader_wait_s: Seconds
    """How long training waited for batches, for decoding too; the mean of the node's training processes."""
    source_bytes: Count | None
    """As in totals, as the others are: what the node got in this time, also for later epochs."""
    peer_bytes: Count | None
    local_bytes: Count | None


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Which opens below the datasets were swapped, and why the others were not."""

    opens: Count | None
    """Opens for reading of files below the datasets that succeeded."""
    swapped: Count | None
    """The opens that got the staged copy."""
    dropped: Count | None
    processes_missed: Count | None
    errors: Count | None
    layers: dict[str, Count]
    """The attached processes by the kind of their shim."""
    reasons: dict[str, Count]
    """Opens that were not swapped, by the reason."""
    missed_examples: tuple[MissedProcess, ...]

    @property
    def share(self) -> float | None:
        """Returns the share of the opens that were swapped; None: there were none, or they are not known."""
        return self.swapped / self.opens if self.opens and self.swapped is not None else None

    @property
    def from_source(self) -> int | None:
        """Returns the number of opens that were not swapped; None: not known."""
        return None if self.opens is None or self.swapped is None else self.opens - self.swapped

    @property
    def processes_attached(self) -> int | None:
        """Returns the number of processes with a shim; None where no node reported."""
        return None if self.opens is None else sum(self.layers.values())


@dataclass(frozen=True, kw_only=True)
class Period:
    """A period in which the source fell, or only what one node got of it."""

    start_s: float
    end_s: float
    loss: Share
    """1 - mean bandwidth in the period / best bandwidth; of one node's, both relative to the other nodes'."""
    host: str | None = None
    """The node that alone fell behind the median of the others: its link, or its load. Null: more than half of those
    that read then fell at once, so it is the shared file system; with one node its own link looks the same."""
    nodes: Count = 1
    """The number of nodes that fell."""
    nodes_observed: Count = 1
    """The number of nodes that read the source then."""

    @property
    def length_s(self) -> float:
        """Returns how long it was."""
        return self.end_s - self.start_s

    @property
    def cost_s(self) -> float:
        """Returns the time that it cost where nothing but the source limits."""
        return self.length_s * self.loss


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Percentiles of a latency in milliseconds."""

    p05: NotNegative | None = None
    """The source at its best."""
    p50: NotNegative | None
    p95: NotNegative | None
    p99: NotNegative | None


@dataclass(frozen=True, kw_only=True)
class Contention:
    """How far, and for how long, the source fell below its own best."""

    best_bytes_per_s: NotNegative | None
    """The rate of the source at its best: to all nodes together."""
    typical_bytes_per_s: NotNegative | None
    """The rate at the median, to all nodes together."""
    periods: tuple[Period, ...]
    """Those of the source, then those of single nodes, of which those that cost most come first."""
    verdict: Literal["periods", "none", "unknown"] | None = None
    """periods: slow periods were found. none: at no time was the mean over a second as low as in one. unknown: neither
    can be said. With several nodes it is about all together."""
    latency_ms: dict[str, Percentiles]
    """Latencies at the source, of each open and each read."""

    @property
    def shared(self) -> tuple[Period, ...]:
        """Returns the periods of the source."""
        return tuple(one for one in self.periods if one.host is None)


@dataclass(frozen=True, kw_only=True)
class Series:
    """What the source gave over time, what came from other nodes, and what programs read from copies, in columns of
    equal length. With several nodes of all of them, on one axis."""

    interval_s: Seconds | None
    start_s: Column
    source_bytes_per_s: Column
    peer_bytes_per_s: Column = ()
    local_bytes_per_s: Column = ()


class Severity(Enum):
    """How much a note matters, worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


@dataclass(frozen=True)
class Note:
    """One thing that the user should know, and what to do about it."""

    id: str
    severity: Severity
    text: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the run was worth, why, and what to do next."""

    kind: VerdictKind
    text: str
    compared: str = ""
    """This run's time and those of the command's earlier runs in other modes; empty where none is known."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Bytes and seconds carry their unit in the key. Unknown is null, never 0. Times count from the start of the run.
    Within version 1 keys are only added. With several nodes, sums are over the nodes that reported, means over their
    training processes; keys added for several nodes are null, empty or absent with one."""

    schema_version: str
    generator: str
    complete: bool
    """False: a node or the end of the command is missing; see notes."""
    verdict: Verdict | None = None
    run: RunSection
    config: dict[str, Any]
    """The settings by name."""
    config_origin: dict[str, str] = field(default_factory=dict)
    """Where each setting came from, such as default, --data or a file."""
    datasets: tuple[DatasetPart, ...]
    nodes: tuple[NodeRow, ...]
    """The nodes by index; those of which nothing was heard come last."""
    group: GroupSection | None = None
    totals: RunTotals
    time_split: TimeSplit
    epochs: tuple[EpochRow, ...] = ()
    """Up to 1,000, in their order; empty where there are fewer than two, or they cannot be told apart."""
    coverage: Coverage
    contention: Contention
    order: OrderPart
    series: Series
    notes: tuple[Note, ...]
    """What went wrong and what the figures mean, worst first."""
    drains: dict[str, OutputsPart] = field(default_factory=dict)
    """What became of the command's files, by the option: out or checkpoint."""
    checkpoints: CheckpointsPart | None = None
    """The command's checkpoints; null without --checkpoint."""
    elastic: ElasticPart | None = None
    """Who trained, and why that changed; null without --elastic."""

    @property
    def names_dataset(self) -> bool:
        """Returns whether the run has a dataset, as far as is known: some have output files or checkpoints only."""
        return bool(self.datasets) or self.run.mode != "direct"

    @property
    def local_measure(self) -> str:
        """Returns `bytes` where reads were measured, else `opens`: what `local_share` is a share of."""
        known = self.totals.local_bytes is not None and self.totals.direct_bytes is not None
        return "bytes" if known and self._read_bytes > 0 else "opens"

    @property
    def local_share(self) -> float | None:
        """Returns the share of what processes with hpcstage read of the datasets that came from the local disk."""
        if self.local_measure == "opens":
            return self.coverage.share
        return (self.totals.local_bytes or 0) / self._read_bytes

    @property
    def _read_bytes(self) -> int:
        return (self.totals.local_bytes or 0) + (self.totals.direct_bytes or 0)

    @property
    def node_count(self) -> int:
        """Returns the number of nodes that the job has; of a run on one that reported nothing there is no row."""
        return max(1, len(self.nodes))

    @property
    def reported(self) -> int:
        """Returns the number of nodes that reported a figure: all sums are over these."""
        return sum(node.opens is not None for node in self.nodes)

    @property
    def files(self) -> int | None:
        """Returns the number of files of all datasets; None: not known."""
        numbers = [dataset.files for dataset in self.datasets]
        return None if None in numbers else sum(filter(None, numbers))

    @property
    def size_bytes(self) -> int | None:
        """Returns the bytes of all datasets; None: not known."""
        sizes = [dataset.size_bytes for dataset in self.datasets]
        return None if None in sizes else sum(filter(None, sizes))

    @property
    def is_divided(self) -> bool:
        """Returns whether each node keeps a part of the datasets."""
        return self.group is not None and self.group.placement == "partition"

    @property
    def room_bytes(self) -> int | None:
        """Returns of how many bytes of the datasets the stores may hold a copy; None: not known."""
        rooms = [node.budget_bytes for node in self.nodes if node.budget_bytes is not None]
        return (sum if self.is_divided else min)(rooms) if rooms else None

    @property
    def source_times(self) -> float | None:
        """Returns how often the datasets were read at the source: 1 where each byte left it once. None: not known."""
        if self.totals.source_bytes is None or not self.size_bytes:
            return None
        return self.totals.source_bytes / self.size_bytes

    @property
    def slowest(self) -> NodeRow | None:
        """Returns the node whose program waited longest, as a job goes on when its slowest process does. None with one
        node, and where no waits were measured."""
        known = [node for node in self.nodes if node.waited_s is not None]
        return max(known, key=lambda node: node.waited_s or 0.0, default=None) if self.reported > 1 else None

    @property
    def headroom_s(self) -> float | None:
        """Returns the seconds that faster reading could still save at most: the waits for data, with several nodes
        those of the node that waited longest. None: not measured."""
        return (self.slowest or self.time_split).waited_s

    def number(self, state: Presence) -> int:
        """Returns the number of nodes in a state."""
        return sum(node.state is state for node in self.nodes)

    @property
    def lost_nodes(self) -> int:
        """Returns the number of nodes that never came up or died."""
        return self.number(Presence.MISSING) + self.number(Presence.DIED) + self.number(Presence.SILENT)

    @property
    def keeps_directories(self) -> bool:
        """Returns whether the run has output files or checkpoints, for which it needs no dataset."""
        return bool(self.drains)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Record:
        """Reads a record of any 1.x version. Raises ValueError if the data are no record."""
        return jsonform.read(cls, data)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data for json.dump."""
        return jsonform.written(self)

    def to_frames(self) -> dict[str, Any]:
        """Returns tables as DataFrames of pandas: `nodes`, `time` (one row), `datasets`, `series` (the source over
        time), `periods` (of contention), `notes`. Needs pandas."""
        import pandas

        tables: dict[str, tuple[type[Any], Sequence[Any]]] = {
            "nodes": (NodeRow, self.nodes),
            "time": (TimeSplit, [self.time_split]),
            "datasets": (DatasetPart, self.datasets),
            "periods": (Period, self.contention.periods),
            "notes": (Note, self.notes),
        }
        frames = {
            name: pandas.DataFrame([_cells(row) for row in rows], columns=[one.name for one in fields(form)])
            for name, (form, rows) in tables.items()
        }
        series = {"start_s": self.series.start_s, "source_bytes_per_s": self.series.source_bytes_per_s}
        return {**frames, "series": pandas.DataFrame(series, dtype=float)}


def _cells(row: Any) -> dict[str, Any]:  # noqa: ANN401  any dataclass
    """Returns a row of a table. pandas keeps no names that are not UTF-8: their bytes are escaped."""
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in jsonform.written(row).items()
    }


def json_schema() -> dict[str, Any]:
    """Returns the JSON schema of the record."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"hpcstage-record-{VERSION}"}
    return {**head, "title": TITLE, **jsonform.schema(Record)}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=1) + "\n")
