"""Composes the notes, which say what a user should know about a run and do about it, worst first. Pure.

This module owns their order and their rules. A rule is a function from the record to notes; a new one is added to
RULES.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from hpcstage.problem import NO_PYTHON, Problem
from hpcstage.protocol.shim import PYTHON_SLOTS_FROM, SLOTS
from hpcstage.record.figures.counts import DIRECT_LAYER, UNSEEN_LAYERS
from hpcstage.record.parts.roster import Presence, few
from hpcstage.record.parts.rows import UNCOUNTED_LAYER
from hpcstage.record.schema import Note, Record, Severity
from hpcstage.units import format_number, format_share, format_size

ERRORS = {
    "killed", "daemon-died", "node-missing", "node-dead", "no-part", "scan-failed", "local-failed", "not-staged",
    "command-not-run", "not-drained", "outputs-gone",
}  # fmt: skip
NEWS = {"running", "unclear", "deferred-to-others"}


def notes_of(record: Record, problems: Sequence[Problem]) -> tuple[Note, ...]:
    """Returns what was told and what the rules find, worst first. A rule's note replaces the problem of that id, as its
    text is better."""
    found = [note for rule in RULES for note in rule(record)]
    told = {note.id for note in found}
    rest = [Note(p.id, _severity(p.id), p.text, p.remedy) for p in problems if p.id not in told]
    return tuple(sorted([*rest, *found], key=lambda note: list(Severity).index(note.severity)))


def _severity(problem: str) -> Severity:
    if problem in NEWS:
        return Severity.INFO
    return Severity.ERROR if problem in ERRORS else Severity.WARNING


# ---- what hpcstage could see and redirect ----

WORTH_SHARE = 0.02
"""Opens that were not swapped are worth a note if they are at least this share of all opens."""

REASONS = {
    # Of other reasons the verdict or a problem tells more: a copy that came late, no room, an error, no daemon.
    "unknown": (
        "were not there when the dataset was scanned, or not regular files",
        "files that the program makes itself need no staging; otherwise name their directory with --data",
    ),
    "timeout": (
        "got no answer from the daemon in time",
        "leave the daemon some processor time: use one loader worker fewer",
    ),
    "local_error": ("could not be read from the local disk", "check the health and the quota of the local disk"),
}
DROPPED = "python -I, -E or -S, `env -i`, sudo and containers with a clean environment drop PYTHONPATH: pass it on"
SHIM_OFF = "try --intercept python; please report the platform"
REINSTALL = "reinstall hpcstage where a C compiler exists (x86-64 or aarch64, glibc)"


def _is_judged(record: Record) -> bool:
    """Returns whether the figures of the processes go on to the end: a daemon that died did not note what came last,
    and a program that still runs may import its libraries yet."""
    seen_to_its_end = all(node.state is not Presence.DIED for node in record.nodes)
    return record.run.was_watched and record.names_dataset and record.run.state != "running" and seen_to_its_end


def nothing_attached(record: Record) -> Iterator[Note]:
    """Notes that no shim ran in any process."""
    if record.coverage.processes_attached != 0 or not _is_judged(record):
        return
    remedy = _how_to_attach(record) or f"{DROPPED}; programs that are not Python are not redirected"
    if record.coverage.processes_missed:
        severity = Severity.ERROR if record.run.stages else Severity.WARNING
        text = "no Python process of the command attached: what it read came from the source, and was not measured"
    else:
        severity = Severity.WARNING
        text = NO_PYTHON
    yield Note("nothing-attached", severity, text, remedy)


def _how_to_attach(record: Record) -> str:
    """Names the line to change where processes were started with another PYTHONPATH than hpcstage's; empty if none."""
    paths = [missed.pythonpath for missed in record.coverage.missed_examples if missed.pythonpath is not None]
    if not paths:
        return ""
    if not paths[0]:
        return "a script unsets PYTHONPATH: keep it, or run `hpcstage install-hook` once in this environment"
    append = f"export PYTHONPATH={paths[0]}${{PYTHONPATH:+:$PYTHONPATH}}"
    return f"a script sets PYTHONPATH={paths[0]}: append with `{append}`, or run `hpcstage install-hook` once"


def nothing_opened(record: Record) -> Iterator[Note]:
    """Notes that shims ran, but no process opened a file of the datasets."""
    coverage = record.coverage
    attached = sum(number for layer, number in coverage.layers.items() if layer not in UNSEEN_LAYERS)
    if attached > 0 and coverage.opens == 0 and _is_judged(record):
        roots = ", ".join(dataset.root for dataset in record.datasets[:2]) or "the datasets"
        text = f"no attached process opened a file below {roots}"
        remedy = "check that --data names the paths that the program opens, and that they are regular files"
        yield Note("nothing-opened", Severity.WARNING, text, remedy)


def missed(record: Record) -> Iterator[Note]:
    """Notes Python processes without a shim, where others have one."""
    coverage = record.coverage
    if not record.names_dataset:
        return
    if coverage.processes_missed and coverage.processes_attached:
        first = f", such as {coverage.missed_examples[0].command[:60]}" if coverage.missed_examples else ""
        who = format_number(coverage.processes_missed, "Python process", "Python processes")
        text = f"{who} never attached{first}: they read the source"
        remedy = _how_to_attach(record) or "started with -I, -E or -S, or without PYTHONPATH in the environment?"
        yield Note("processes-missed", Severity.WARNING, text, remedy)


def shim_off(record: Record) -> Iterator[Note]:
    """Notes shims that switched themselves off."""
    count = record.coverage.layers.get(DIRECT_LAYER)
    if count:
        who = format_number(count, "process", "processes")
        text = f"in {who} redirection failed its self-test: they read the source"
        yield Note("shim-off", Severity.WARNING, text, SHIM_OFF)


def uncounted(record: Record) -> Iterator[Note]:
    """Notes that more processes lived at a time than the page can count."""
    count = record.coverage.layers.get(UNCOUNTED_LAYER)
    if count:
        who = format_number(count, "process", "processes")
        text = f"{who} found no slot to count in: what they opened is not reported"
        most = f"run at most {SLOTS - PYTHON_SLOTS_FROM} Python processes at a time on a node"
        remedy = f"{most}, or use the native layer, which counts {PYTHON_SLOTS_FROM - 1}"
        yield Note("uncounted", Severity.WARNING, text, remedy)


def python_layer(record: Record) -> Iterator[Note]:
    """Notes that only the Python layer ran (no compiler at installation): it redirects and measures less."""
    layers = record.coverage.layers
    if layers.get("python") and not layers.get("native") and record.coverage.opens:
        text = "Python layer only: files opened by C code were read from the source, and reads are not timed"
        yield Note("python-layer", Severity.INFO, text, f"{REINSTALL}, or drop --intercept python")


def not_swapped(record: Record) -> Iterator[Note]:
    """Notes the two main reasons for opens at the source."""
    opens = record.coverage.opens
    if not opens or not record.run.stages:
        return
    reasons = dict(record.coverage.reasons)
    if _only_lists(record) and all(dataset.staged_files == dataset.files for dataset in record.datasets):
        reasons["unknown"] = reasons.get("unknown", 0) + reasons.pop("settled", 0)  # no listed file was left to copy
    for name, count in sorted(reasons.items(), key=lambda item: -item[1])[:2]:
        if name in REASONS and count >= WORTH_SHARE * opens:
            what, remedy = _reason(name, record)
            severity = Severity.WARNING if count >= 0.2 * opens else Severity.INFO
            text = f"{format_number(count, 'open')} ({format_share(count / opens)}) {what}"
            yield Note(f"direct-{name.replace('_', '-')}", severity, text, remedy)


def _only_lists(record: Record) -> list[str]:
    """Returns the lists of --data on one node; empty where a directory or a file is among its values."""
    named = [str(one) for one in record.config.get("data", ())]
    return named if record.group is None and all(one.startswith("@") for one in named) else []


def _reason(name: str, record: Record) -> tuple[str, str]:
    what, remedy = REASONS[name]
    if name == "unknown" and (lists := _only_lists(record)):
        what = f"were of files that are not in {', '.join(lists)}, or were missing or written to"
        remedy = "add them to the list, or name their directory with --data"
    return what, remedy


def shim_errors(record: Record) -> Iterator[Note]:
    """Notes failures that the shim swallowed."""
    count = record.coverage.errors or 0
    if count:
        text = f"the shim swallowed {format_number(count, 'failure')} of its own; these calls went to the source"
        yield Note("shim-errors", Severity.INFO, text, "results are not affected; please report it")


# ---- storage: the store, the local disk, the files at the source ----

WRITES_SHARE = 0.5
"""Transfers that spend more than this share of their time in writes wait for the local disk, not for the source."""
WAITS_SHARE = 0.15


def store_full(record: Record) -> Iterator[Note]:
    """Notes that the datasets do not fit into the store, and how many bytes are missing."""
    size, room = record.size_bytes, record.room_bytes
    if size is not None and room is not None and size > room and record.run.stages:
        what = "the stores of all nodes" if record.is_divided else "the store"
        text = (
            f"the datasets hold {format_size(size)}, {what} at most {format_size(room)}: "
            f"{format_size(size - room)} are read from the source in every epoch"
        )
        remedy = "name a larger disk with --local-dir, or raise --budget where that was asked for"
        yield Note("store-full", Severity.WARNING, text, remedy)


def slow_disk(record: Record) -> Iterator[Note]:
    """Notes that the local disk limits copying; names the slowest of several nodes."""
    if not record.run.stages:
        return
    split = record.time_split
    wall_s = split.wall_s or 0.0
    writing = [node for node in record.nodes if (node.disk_write_share or 0.0) > WRITES_SHARE]
    if writing:
        worst = max(writing, key=lambda node: node.disk_write_share or 0.0)
        waited_for_copies = wall_s and (split.wait_source_s or 0.0) > WAITS_SHARE * wall_s
        severity = Severity.WARNING if waited_for_copies else Severity.INFO
        spent = f"transfers spent {format_share(worst.disk_write_share or 0.0)} of their time writing to it"
        text = f"the local disk {record.run.local_dir} on {worst.host} is slower than the source: {spent}"
        remedy = "name a faster disk with --local-dir; with none, --mode direct may be as fast"
        yield Note("slow-local-disk", severity, text, remedy)


def written(record: Record) -> Iterator[Note]:
    """Notes that the program wrote to files of the datasets whose copies were dropped then."""
    dropped = record.coverage.dropped or 0
    if dropped:
        what = format_number(dropped, "staged copy was", "staged copies were")
        text = f"{what} dropped because the program wrote to the file"
        yield Note("dropped", Severity.INFO, text, "keep outputs outside the datasets")


# ---- nodes ----

MUCH_SLOWER_SHARE = 0.05
"""A slow node deserves a warning if its program waited longer than the others' by this share of the wall time."""


def slow_nodes(record: Record) -> Iterator[Note]:
    """Notes the nodes that are slower than the others."""
    slow = sorted((node for node in record.nodes if node.slow), key=lambda node: -(node.waited_s or 0.0))
    if not slow or not record.group:
        return
    worst = slow[0]
    others = [node.waited_s for node in record.nodes if node is not worst and node.waited_s is not None]
    behind_s = (worst.waited_s or 0.0) - median(others) if others else 0.0
    costs = behind_s > MUCH_SLOWER_SHARE * (record.time_split.wall_s or 0.0)
    who = f"{worst.host} is slow"
    if len(slow) > 1:
        names = few([node.host for node in slow])
        who = f"{len(slow)} of {len(record.nodes)} nodes are slow ({names}); {worst.host}"
    remedy = (
        "its link, its disk or its load, not the shared file system: leave it out of the next job, or tell the site"
    )
    severity = Severity.WARNING if costs else Severity.INFO
    yield Note("slow-nodes", severity, f"{who}: {'; '.join(worst.slow)}", remedy)


def idle_nodes(record: Record) -> Iterator[Note]:
    """Notes nodes on which the program opened no file of the datasets, while it did on others."""
    well = [node for node in record.nodes if node.opens is not None]
    idle = [node.host for node in well if not node.opens]
    if not record.group or not idle or len(idle) == len(well):
        return
    of_all = f"{len(idle)} of {format_number(len(record.nodes), 'node')}"
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
    *(nothing_attached, nothing_opened, missed, shim_off),
    *(uncounted, python_layer, not_swapped, shim_errors),
    *(store_full, slow_disk, written, slow_nodes, idle_nodes, preprocessing),
]
