"""Cleans up this node's local disk by hand: node directories of killed runs, and output files that were not drained.

Owns the sequence and the exit code. It deletes no output file that is not drained, and nothing of a run that lives.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage import job as jobs
from hpcstage.errors import NoLocalDir, NotDrained
from hpcstage.job import localdir
from hpcstage.node import directory, kept
from hpcstage.units import format_number
from hpcstage.wrapper import late, messages

if TYPE_CHECKING:
    from hpcstage.config import Config

LONGEST_S = 86_400.0
"""The longest time for the drains of one call, which whoever called can end at any time."""


def clean(config: Config, verbosity: int, *, drains: bool) -> int:
    """Removes what killed runs left; with `drains` their output files are drained first. Returns the exit code."""
    messages.set_verbosity(verbosity)
    host = socket.gethostname()
    job = jobs.detect(os.environ, hostname=host, parent_pid=os.getppid())
    local = localdir.choose(config.local_dir, os.environ, job)
    if local is None:
        raise NoLocalDir("local_dir is none", "give --local-dir")
    name = directory.base_name(os.geteuid(), host if local.is_network else "")
    removed = directory.leftovers(local.path / name)
    for path in removed:
        directory.remove(path)
    messages.warn(f"removed {format_number(len(removed), 'directory', 'directories')} of killed runs on {host}")
    above = kept.parent(local, host)
    return _drained(above) if drains else _told(above)


def _drained(above: Path) -> int:
    parts = late.drain_dead(above, LONGEST_S)
    files = sum(part.files for part in parts)
    messages.warn(f"drained {format_number(len(parts), 'run')}: {format_number(files, 'copy', 'copies')}")
    return NotDrained.exit_code if any(part.undrained_count for part in parts) else 0


def _told(above: Path) -> int:
    waiting = late.waiting(above)
    for place in waiting:
        messages.warn(f"run {place.path.name} left output files in {place.output}: hpcstage clean --drain copies them")
    return NotDrained.exit_code if waiting else 0
