"""What a copier and the receiver of its node tell each other: a node of a job that joins the training of another one
asks for copies that nodes of that training have. Owns the form of a request.

A request names a file as the manifest has it, and comes with the descriptor into which the bytes go. Another node has
the same file if its own manifest says the same of it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

SOCKET = "passing"
"""The receiver's socket in the node directory."""
HERE, NOT_HERE = b"1", b"0"
"""The answers: the bytes are in the file; it has to be read at the source."""
COMING_S = 60.0
"""A request waits so long, from the receiver's start on, for a node that has said that it will give."""
MOST_BYTES = 8192
"""The most bytes of a request."""
_FACTS = struct.Struct("<Qqq")


@dataclass(frozen=True)
class Wanted:
    """A file of the source: its path there, and what tells whether it is the same."""

    path: bytes
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    def pack(self) -> bytes:
        """Returns the form in which it is sent."""
        return _FACTS.pack(self.size_bytes, self.mtime_ns, self.ctime_ns) + self.path

    @classmethod
    def unpack(cls, data: bytes) -> Wanted:
        """Reads what `pack` returned. Raises struct.error."""
        return cls(data[_FACTS.size :], *_FACTS.unpack_from(data))
