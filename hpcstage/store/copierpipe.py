"""The messages in the pipes between the daemon and a copier: fixed-size records, written whole (below PIPE_BUF)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from hpcstage.store.copyfile import CopyOutcome, Status

COMMAND = struct.Struct("<II")
RESULT = struct.Struct("<IHHQq")


class Op(IntEnum):
    """The kinds of commands to a copier."""

    MANIFEST = 1
    """The manifest can be mapped now."""
    COPY = 2
    URGENT = 3
    """Copy this id before all others that have not begun."""
    CANCEL = 4
    HURRY = 5
    """Move an id that was given before to the front, if no thread has taken it."""


@dataclass(frozen=True)
class Result:
    """The result of one transfer."""

    id: int
    status: Status
    errno: int = 0
    size_bytes: int = 0
    mtime_ns: int = 0


def pack_result(id_: int, outcome: CopyOutcome) -> bytes:
    """Returns the record of a result."""
    return RESULT.pack(
        id_,
        outcome.status,
        outcome.errno,
        outcome.size_bytes,
        outcome.mtime_ns,
    )


def unpack_results(data: bytes | memoryview) -> list[Result]:
    """Returns the results in a buffer of whole records."""
    return [Result(values[0], Status(values[1]), *values[2:]) for values in RESULT.iter_unpack(data)]
