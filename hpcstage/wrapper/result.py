"""Ends a run: composes the record, writes it, adds it to the index, prints the short form."""

from __future__ import annotations

import os
from pathlib import Path

from hpcstage.protocol.rundir import RECORD
from hpcstage.record import files, index
from hpcstage.record.compose import compose
from hpcstage.record.parts.run import RunPart
from hpcstage.report.terminal.short import short
from hpcstage.wrapper import messages, rundir


def write_record(run_dir: Path, part: RunPart) -> None:
    """Writes the record and prints the short form. A failure is reported; the command's exit code stays what it is."""
    try:
        rundir.save_part(run_dir, part)
        record = compose(part, files.node_parts(run_dir))
        files.save(record, run_dir / RECORD)
    except OSError as error:
        messages.warn(f"cannot write the report of this run to {run_dir}: {error.strerror}")
        return
    index.add(record, run_dir, os.environ)
    if part.child_started_s is not None:
        messages.result([*short(record), f"report: hpcstage report {run_dir}"])
