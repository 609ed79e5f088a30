"""Composes the notes, which say what a user should know about a run and do about it, worst first. Pure.

This module owns their order, and the rules about time, storage and nodes; `visible` has those about what hpcstage could
see. A rule is a function from the record to notes; a new one is added to RULES.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcstage.extras import Extra
from hpcstage.record.notes.visible import VISIBLE_RULES
from hpcstage.record.parts.roster import few
from hpcstage.record.schema import Note, Record, Severity
from hpcstage.units import format_number, format_rate, format_share, format_size

ERRORS = {
    "killed", "daemon-died", "node-missing", "node-dead", "no-part", "scan-failed", "local-failed", "not-staged",
    "command-not-run", "not-drained", "outputs-gone",
}  # fmt: skip
NEWS = {"running", "unclear", "deferred-to-others"}


def notes_of(record: Record) -> tuple[Note, ...]:
    """Returns all notes that apply, worst first. A rule's note replaces the problem of that id, as its text is better.

    The record's own notes are not read.
    """
    found = [note for rule in RULES for note in rule(record)]
    told = {note.id for note in found}
    problems = [Note(p.id, _severity(p.id), p.text, p.remedy) for p in record.problems if p.id not in told]
    return tuple(sorted([*problems, *found], key=lambda note: list(Severity).index(note.severity)))


def _severity(problem: str) -> Severity:
    if problem in NEWS:
        return Severity.INFO
    return Severity.ERROR if problem in ERRORS else Severity.WARNING


# ---- storage: the store, the local disk, the files at the source ----

WRITES_SHARE = 0.5
"""Transfers that spend more than this share of their time in writes wait for the local disk, not for the source."""
WAITS_LOCAL_SHARE = 0.15
LEAST_WAITED_S = 0.5
"""A program that is over in a moment gains nothing from a faster disk."""


def store_full(record: Record) -> Iterator[Note]:
    """Notes that the datasets do not fit into the store, and how many bytes are missing."""
    sizes = [dataset.size_bytes for dataset in record.datasets if dataset.size_bytes is not None]
    rooms = [node.budget_bytes for node in record.nodes if node.budget_bytes is not None]
    if not rooms or len(sizes) < len(record.datasets) or not record.run.stages:
        return
    partition = record.group is not None and record.group.placement == "partition"
    room, what = (sum(rooms), "the stores of all nodes") if partition else (min(rooms), "the store")
    if (missing := sum(sizes) - room) > 0:
        text = (
            f"the datasets hold {format_size(sum(sizes))}, {what} at most {format_size(room)}: "
            f"{format_size(missing)} are read from the source in every epoch"
        )
        remedy = "name a larger disk with --local-dir, or raise --budget where that was asked for"
        yield Note("store-full", Severity.WARNING, text, remedy)


def slow_disk(record: Record) -> Iterator[Note]:
    """Notes that the local disk limits copying or the reading of copies; names the slowest of several nodes."""
    if not record.run.stages:
        return
    split = record.time_split
    wall_s, waited_s = split.wall_s or 0.0, split.wait_local_s or 0.0
    writing = [node for node in record.nodes if (node.disk_write_share or 0.0) > WRITES_SHARE]
    if writing:
        worst = max(writing, key=lambda node: node.disk_write_share or 0.0)
        waited_for_copies = wall_s and (split.wait_source_s or 0.0) > WAITS_LOCAL_SHARE * wall_s
        severity = Severity.WARNING if waited_for_copies else Severity.INFO
        spent = f"transfers spent {format_share(worst.disk_write_share or 0.0)} of their time writing to it"
        text = f"the local disk {record.environment.local_dir} on {worst.host} is slower than the source: {spent}"
        remedy = "name a faster disk with --local-dir; with none, --mode direct may be as fast"
        yield Note("slow-local-disk", severity, text, remedy)
    if wall_s and waited_s > max(WAITS_LOCAL_SHARE * wall_s, LEAST_WAITED_S):
        speeds = [node.disk_read_bytes_per_s for node in record.nodes if node.disk_read_bytes_per_s]
        speed = f" (read at {format_rate(min(speeds))} by each reader)" if speeds else ""
        text = f"the program waited for the local disk {format_share(waited_s / wall_s)} of its time{speed}"
        remedy = "name a faster disk with --local-dir, or read with more loader workers (num_workers)"
        yield Note("waits-for-local-disk", Severity.WARNING, text, remedy)


def written(record: Record) -> Iterator[Note]:
    """Notes that the program wrote to files of the datasets whose copies were dropped then."""
    dropped = record.coverage.dropped or 0
    if dropped:
        what = format_number(dropped, "staged copy was", "staged copies were")
        text = f"{what} dropped because the program wrote to the file"
        yield Note("dropped", Severity.INFO, text, "keep outputs outside the datasets")


# ---- nodes: slow ones, and datasets that were read more often than once ----

MORE_THAN_ONCE_FACTOR = 1.05
"""The datasets count as read more often than once if they were read more than this many times."""
MUCH_SLOWER_SHARE = 0.05
"""A slow node deserves a warning if its program waited longer than the others' by this share of the wall time."""


def slow_nodes(record: Record) -> Iterator[Note]:
    """Notes the nodes that are slower than the others."""
    slow = sorted((node for node in record.nodes if node.slow), key=lambda node: -(node.behind_s or 0.0))
    if not slow or not record.group:
        return
    worst = slow[0]
    costs = (worst.behind_s or 0.0) > MUCH_SLOWER_SHARE * (record.time_split.wall_s or 0.0)
    who = f"{worst.host} is slow"
    if len(slow) > 1:
        names = few([node.host for node in slow])
        who = f"{len(slow)} of {record.group.nodes} nodes are slow ({names}); {worst.host}"
    remedy = (
        "its link, its disk or its load, not the shared file system: leave it out of the next job, or tell the site"
    )
    severity = Severity.WARNING if costs else Severity.INFO
    yield Note("slow-nodes", severity, f"{who}: {'; '.join(worst.slow)}", remedy)


def read_more_than_once(record: Record) -> Iterator[Note]:
    """Notes that datasets were read from the source more than once: each byte should leave it once."""
    group = record.group
    if not group or not record.run.stages or (group.source_times or 0.0) <= MORE_THAN_ONCE_FACTOR:
        return
    nodes = format_number(group.nodes, "node")
    text = f"the datasets were read {group.source_times:.3g} times from the source by {nodes}"
    if group.placement == "private":
        why = f" ({group.placement_why})" if group.placement_why else ""
        remedy = f"--placement auto reads each file once and passes it on; it needs mpi4py ({Extra.MPI.remedy})"
        yield Note("read-by-each-node", Severity.INFO, f"{text}: each for itself{why}", remedy)
        return
    if group.alone_count + record.lost_nodes:
        remedy = "nodes outside of the group read for themselves: see why above"
    else:
        remedy = "files that were read before they were staged, or found no room: see the opens that were not swapped"
    yield Note("read-again", Severity.INFO, text, remedy)


def idle_nodes(record: Record) -> Iterator[Note]:
    """Notes nodes on which the program opened no file of the datasets, while it did on others."""
    well = [node for node in record.nodes if node.opens is not None]
    idle = [node.host for node in well if not node.opens]
    if not record.group or not idle or len(idle) == len(well):
        return
    of_all = f"{len(idle)} of {format_number(record.group.nodes, 'node')}"
    text = f"on {of_all} the program opened no file of the datasets ({few(idle)})"
    remedy = "check that processes start there, that PYTHONPATH reaches them, and that they get a part of the data"
    yield Note("idle-nodes", Severity.WARNING, text, remedy)


# ---- time ----

MUCH_SHARE = 0.15


def preprocessing(record: Record) -> Iterator[Note]:
    """Notes that the loader is short of CPU, not of data."""
    split = record.time_split
    if split.wall_s and split.preprocess_s and split.preprocess_s > MUCH_SHARE * split.wall_s:
        share = format_share(split.preprocess_s / split.wall_s)
        text = f"the program waited {share} of its time for its loader's decoding and collating, not for files"
        remedy = "more loader workers (num_workers) or cores; faster storage will not help"
        yield Note("preprocessing", Severity.INFO, text, remedy)


RULES = [
    *VISIBLE_RULES,
    *(store_full, slow_disk, written, slow_nodes, idle_nodes, read_more_than_once),
    preprocessing,
]
