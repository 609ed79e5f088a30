"""Leaves the trace of a run: work for a helper, as a home directory may hang.

Owns when a trace is written; `preview.orders` finds that of an earlier run. `plan.order.trace` owns its file.
"""

from __future__ import annotations

import json
import os
from array import array
from datetime import datetime, timezone
from pathlib import Path

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.order import trace
from hpcstage.protocol.daemonspec import DaemonSpec

FULLER_FACTOR = 2
"""A trace with more than this many times the files is not replaced: a run that was broken off knows less."""
NOTHING_OPENED = "no file was opened"
UNFINISHED = "it was not written in time"
FAILED = "writing it failed: see the daemon's log"


def leave(spec: DaemonSpec, manifest: Manifest, first: array[int]) -> bytes:
    """Writes the trace: the ids in the order of their first opens. Returns why it was not written, as JSON; an empty
    text if it was."""
    return json.dumps(_leave(spec, manifest, first)).encode()


def _leave(spec: DaemonSpec, manifest: Manifest, first: array[int]) -> str:
    if not spec.state_dir:
        from hpcstage.preview.orders import NO_STATE

        return NO_STATE
    if not first:
        return NOTHING_OPENED
    last, _ = trace.find(_directory(spec), _roots(spec), spec.command, manifest)
    if last is not None and len(last.order) > FULLER_FACTOR * len(first):
        return f"run {last.header.run_id} left one of {len(last.order):,} files, this run opened {len(first):,}"
    header = trace.TraceHeader(
        command=tuple(spec.command),
        roots=tuple(_roots(spec)),
        digest=trace.digest(manifest),
        files=len(manifest),
        run_id=spec.run_id,
        written_utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    return trace.save(_directory(spec), trace.Trace(header, first)) or ""


def _directory(spec: DaemonSpec) -> Path:
    return Path(spec.state_dir) / trace.DIRECTORY


def _roots(spec: DaemonSpec) -> list[str]:
    return [os.fsdecode(dataset.root) for dataset in spec.datasets]
