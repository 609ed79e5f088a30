"""Makes the shared page of a node, before the daemon and the first attached process.

Owns its creation. `protocol.shim` says what lies where; the daemon writes the state, every attached process its slot.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from hpcstage.protocol import shim


def create(path: Path, *, logging: bool = False) -> None:
    """Makes the page with its header. With `logging`, processes log what they open from their first moment on.

    Its blocks are allocated at once: writing into a hole of a mapped file on a disk that has filled up since would end
    the training process with SIGBUS. Raises OSError if the disk is full now.
    """
    slots = (shim.SLOTS, shim.SLOT_BYTES, 1, shim.PYTHON_SLOTS_FROM)
    header = shim.PAGE_HEADER.pack(shim.PAGE_MAGIC, shim.VERSION, shim.State.STARTING, *slots, 0, int(logging))
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, shim.PAGE_BYTES)
        os.pwrite(fd, header, 0)
    finally:
        os.close(fd)


def is_staging(path: Path) -> bool:
    """Returns whether the daemon has a manifest, or never will; from then on it answers opens as it will later."""
    try:
        with path.open("rb") as file:
            file.seek(shim.STATE_OFFSET)
            return int.from_bytes(file.read(4), "little") >= shim.State.STAGING
    except OSError:
        return True


def note_progress(path: Path, progress: shim.WorkProgress) -> None:
    """Writes how far the daemon is, for `progress`."""
    _write(path, (shim.PROGRESS_OFFSET, shim.PROGRESS.pack(*progress)))


def progress(path: Path) -> tuple[shim.State, shim.WorkProgress] | None:
    """Returns the daemon's state and how far it is; None if there is no page."""
    try:
        with path.open("rb") as file:
            head = file.read(shim.PROGRESS_OFFSET + shim.PROGRESS.size)
        state = int.from_bytes(head[shim.STATE_OFFSET : shim.STATE_OFFSET + 4], "little")
        return shim.State(state), shim.WorkProgress(*shim.PROGRESS.unpack_from(head, shim.PROGRESS_OFFSET))
    except (OSError, ValueError, struct.error):
        return None


def summed_progress(paths: Sequence[Path]) -> tuple[shim.State, shim.WorkProgress] | None:
    """Returns the state of the first node, and how far all nodes together are; None if the first one has no page.
    Nodes that still scan are left out while the first one stages, for what they have found is not copied."""
    found = [progress(path) for path in paths]
    if not found or found[0] is None:
        return None
    first = found[0][0]
    begun = first >= shim.State.STAGING
    each = [done for state, done in filter(None, found) if (state >= shim.State.STAGING) == begun]
    return first, shim.WorkProgress(*map(sum, zip(*each, strict=True)))


def waits_until_staging(path: Path, timeout_s: float) -> bool:
    """Returns `is_staging`; if it is not yet so, waits for `timeout_s` once and looks again."""
    if not is_staging(path):
        time.sleep(timeout_s)
    return is_staging(path)


def close(path: Path) -> None:
    """Makes programs open no copy ever again, in place of a daemon that does not answer or has died."""
    _write(path, (shim.GATE_OFFSET + 4 * shim.CLOSED, (1).to_bytes(4, "little")))


def set_state(path: Path, state: shim.State) -> None:
    """Sets the state in place of a daemon that has died, and ends the logging."""
    _write(path, (shim.STATE_OFFSET, int(state).to_bytes(4, "little")), (shim.LOGGING_OFFSET, bytes(4)))


def _write(path: Path, *values: tuple[int, bytes]) -> None:
    """Writes values at their offsets. A page that cannot be opened is no longer read, either."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for offset, value in values:
                os.pwrite(fd, value, offset)
        finally:
            os.close(fd)
