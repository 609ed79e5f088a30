"""Drains what killed runs left on the local disk of this node: before the next run starts, and by `hpcstage clean`.

Owns the order, the lines that are printed, and that nothing is deleted unless all of it was drained.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from hpcstage.node import kept
from hpcstage.record.parts.outputs import OutputsPart
from hpcstage.wrapper import messages, outputs

AT_START_S = 60.0
"""The longest time that the start of a run drains what killed runs left."""


def waiting(above: Path) -> list[kept.KeptPlace]:
    """Returns the output directories of runs that are over."""
    found = []
    for place in kept.places(above):
        fd = place.take()
        if fd is not None:
            os.close(fd)
            found.append(place)
    return found


def drain_dead(above: Path, timeout_s: float) -> list[OutputsPart]:
    """Drains the output directories of runs that are over, as far as the time allows; says what was done."""
    if not above.is_dir():
        return []
    deadline = time.monotonic() + timeout_s
    ends: list[OutputsPart] = []
    for place in kept.places(above):
        fd = place.take()
        if fd is None:
            continue
        try:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                messages.warn(f"run {place.path.name} left output files in {place.output}: they are copied later")
                continue
            part = _drain(place, left_s)
            ends += [] if part is None else [part]
        finally:
            os.close(fd)
    return ends


def _drain(place: kept.KeptPlace, timeout_s: float) -> OutputsPart | None:
    run_id, host = place.path.name, os.uname().nodename
    part = outputs.drained_late(place, timeout_s)
    if part is None:  # it was killed before its command could start
        place.remove()
        return None
    for line in outputs.lines(part, host):
        messages.error(line)
    for one in part.beside:
        messages.warn(f"{one.name} of run {run_id} is {one.why} in {part.directory}: that had been changed since")
    if not part.undrained_count:
        place.remove()
        outputs.remove_lock(part.directory, run_id, host)
    messages.info(f"drained run {run_id}, which was killed, to {part.directory}: {part.files} copies")
    return part
