"""The shared page of a node: made here, before the daemon and the first attached process.

Owns its creation. What lies where is in `wire`; the daemon writes the state, every attached process its own slot.
"""

from __future__ import annotations

import os
from pathlib import Path

from hpcstage import wire


def create(path: Path) -> None:
    """Makes the page with its header. Its blocks are allocated at once: a store into a hole of a mapped file on a disk
    that has filled up since would end the training process with SIGBUS. Raises OSError if there is no room now."""
    header = wire.PAGE_HEADER.pack(
        wire.PAGE_MAGIC, wire.VERSION, wire.State.STARTING, wire.SLOTS, wire.SLOT_BYTES, 1, wire.PYTHON_SLOTS_FROM, 0, 0
    )
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, wire.PAGE_BYTES)
        os.pwrite(fd, header, 0)
    finally:
        os.close(fd)


def set_state(path: Path, state: wire.State) -> None:
    """Sets the state in place of a daemon that has died, and ends the logging. What cannot be written is no longer
    read either."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.pwrite(fd, int(state).to_bytes(4, "little"), wire.STATE_OFFSET)
        os.pwrite(fd, bytes(4), wire.LOGGING_OFFSET)
    finally:
        os.close(fd)
