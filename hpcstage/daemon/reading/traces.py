"""Leaves the trace of a run, and keeps what an earlier one left: work for helpers, as a home directory may hang.

Owns when a trace is written; `preview.orders` finds that of an earlier run. `plan.order.trace` owns its file; what is
learnt is in `learn`.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from hpcstage.daemon.reading import arrays
from hpcstage.daemon.reading.learn import Learner, TracedTable
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.order import trace
from hpcstage.protocol.daemonspec import DaemonSpec

LEARNT_FILE = "learnt"
FULLER_FACTOR = 2
"""A trace with more than this many times the files is not replaced: a run that was broken off knows less."""
NOTHING_OPENED = "no file was opened"
NOT_LEARNT = "learning is off"
UNFINISHED = "it was not written in time"
FAILED = "writing it failed: see the daemon's log"


class Known(NamedTuple):
    """The content of the trace that this run leaves."""

    first: Sequence[int]
    tables: Mapping[int, tuple[Sequence[int], Sequence[int]]]
    provenance: str | None
    kept_share: float | None


def save_learnt(node_dir: Path, left: trace.Trace) -> None:
    """Writes a trace's tables to the node directory, where the daemon reads them."""
    found: dict[str, Sequence[int]] = {}
    for table in left.tables:
        found[f"offsets {table.key}"], found[f"ids {table.key}"] = table.offsets, table.ids
    arrays.save(node_dir / LEARNT_FILE, {"keys": [table.key for table in left.tables]}, found)


def learner(node_dir: Path, files: int) -> Learner:
    """Returns a learner that knows the tables that `save_learnt` left, if they can be read."""
    found = Learner(files)
    with suppress(OSError, ValueError, KeyError):
        facts, numbers = arrays.load(node_dir / LEARNT_FILE)
        for key in facts["keys"]:
            found.dataset(key).tell(TracedTable(numbers[f"offsets {key}"], numbers[f"ids {key}"]))
    return found


def leave(spec: DaemonSpec, manifest: Manifest, known: Known) -> bytes:
    """Writes the trace. Returns why it was not written, as JSON; an empty text if it was."""
    return json.dumps(_leave(spec, manifest, known)).encode()


def _leave(spec: DaemonSpec, manifest: Manifest, known: Known) -> str:
    if not spec.state_dir:
        from hpcstage.preview.orders import NO_STATE

        return NO_STATE
    if not len(known.first):
        return NOTHING_OPENED
    last, _ = trace.find(_directory(spec), _roots(spec), spec.command, manifest)
    if last is not None and len(last.order) > FULLER_FACTOR * len(known.first):
        return f"run {last.header.run_id} left one of {len(last.order):,} files, this run opened {len(known.first):,}"
    header = trace.TraceHeader(
        command=tuple(spec.command),
        roots=tuple(_roots(spec)),
        digest=trace.digest(manifest),
        files=len(manifest),
        run_id=spec.run_id,
        written_utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        provenance=known.provenance,
        kept_share=known.kept_share,
    )
    tables = [
        trace.TraceTable(key, array("I", offsets), array("I", ids)) for key, (offsets, ids) in known.tables.items()
    ]
    return trace.save(_directory(spec), trace.Trace(header, array("I", known.first), tuple(tables))) or ""


def _directory(spec: DaemonSpec) -> Path:
    return Path(spec.state_dir) / trace.DIRECTORY


def _roots(spec: DaemonSpec) -> list[str]:
    return [os.fsdecode(dataset.root) for dataset in spec.datasets]
