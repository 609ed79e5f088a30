"""Leaves the trace of a run: work for a helper, as a home directory may hang.

Owns when a trace is written; `preview.findorder` finds that of an earlier run. `plan.order.trace` owns its file.
"""

from __future__ import annotations

import os
from array import array
from datetime import datetime, timezone
from pathlib import Path

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.order import trace
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.stderr import log

FULLER_FACTOR = 2
"""A trace with more than this many times the files is not replaced: a run that was broken off knows less."""


def leave(spec: DaemonSpec, manifest: Manifest, first: array[int]) -> bytes:
    """Writes the trace: the ids in the order of their first opens."""
    if not spec.state_dir or not first:
        return b""
    last, _ = trace.find(_directory(spec), _roots(spec), spec.command, manifest)
    if last is not None and len(last.order) > FULLER_FACTOR * len(first):
        log(f"the trace of run {last.header.run_id} stays, as this run opened {len(first):,} files only")
        return b""
    header = trace.TraceHeader(
        command=tuple(spec.command),
        roots=tuple(_roots(spec)),
        digest=trace.digest(manifest),
        files=len(manifest),
        run_id=spec.run_id,
        written_utc=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    if why := trace.save(_directory(spec), trace.Trace(header, first)):
        log(f"no trace is left: {why}")
    return b""


def _directory(spec: DaemonSpec) -> Path:
    return Path(spec.state_dir) / trace.DIRECTORY


def _roots(spec: DaemonSpec) -> list[str]:
    return [os.fsdecode(dataset.root) for dataset in spec.datasets]
