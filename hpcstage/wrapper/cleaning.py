"""Cleans up this node's local disk by hand: node directories of killed runs, and output files that were not drained.

Owns the sequence and the exit code. It deletes nothing of a run that lives, and no output file that is not drained but
those of runs that the user names.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage import job as jobs
from hpcstage.errors import NoLocalDir, NotDrained, UsageError
from hpcstage.job import localdir
from hpcstage.node import directory, kept
from hpcstage.units import format_number
from hpcstage.wrapper import late, messages

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir


def clean(config: Config, verbosity: int, *, drains: bool, forgotten: Sequence[str] = ()) -> int:
    """Removes what killed runs left, and the output files of those in `forgotten`; with `drains` those of others are
    drained. Returns the exit code. Raises UsageError if a run to forget is not there, or is not over."""
    messages.set_verbosity(verbosity)
    host = socket.gethostname()
    local = local_dir(config, host)
    above = directory.outputs_base(local, host)
    for run_id in forgotten:
        if not late.forget(above, run_id):
            there = ", ".join(place.run_id for place in late.waiting(above)) or "none"
            raise UsageError(
                f"no run {run_id} that is over has output files or checkpoints here", f"name one of: {there}"
            )
        messages.warn(f"deleted the output files and checkpoints of run {run_id} on {host}")
    name = directory.base_name(os.geteuid(), host if local.is_network else "")
    removed = directory.leftovers(local.path / name)
    for path in removed:
        directory.remove(path)
    messages.warn(f"removed {format_number(len(removed), 'directory', 'directories')} of killed runs on {host}")
    return _drained(above) if drains else _told(above)


def local_dir(config: Config, host: str) -> LocalDir:
    """Returns the local directory. One that is named may be full, or unfit for staging by now."""
    job = jobs.detect(os.environ, hostname=host, parent_pid=os.getppid())
    try:
        local = localdir.choose(config.local_dir, os.environ, job)
    except NoLocalDir:
        path = Path(config.local_dir or "")
        if not path.is_absolute() or not path.is_dir():
            raise
        return localdir.LocalDir(path, "it was named", (), False, 0, None, path.stat().st_dev)
    if local is None:
        raise NoLocalDir("local_dir is none", "give --local-dir")
    return local


def _drained(above: Path) -> int:
    used: list[kept.KeptPlace] = []
    parts = late.drain_all(above, used)
    files = sum(part.files for part in parts)
    messages.warn(f"drained {format_number(len(parts), 'run')}: {format_number(files, 'copy', 'copies')}")
    return NotDrained.exit_code if used or any(part.undrained_count for part in parts) else 0


def _told(above: Path) -> int:
    used: list[kept.KeptPlace] = []
    waiting = late.waiting(above, used)
    for place in waiting:
        messages.warn(
            f"run {place.run_id} left {late.what(place)} in {place.output}: `hpcstage clean --drain` copies them"
        )
    return NotDrained.exit_code if used or waiting else 0
