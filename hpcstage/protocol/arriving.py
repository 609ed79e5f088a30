"""The file `arriving` of a node directory: which parts of large files on their way are there already.

Owns the layout. Daemon, copiers and attached processes map the file; `scripts/wire.py` copies the numbers for the shim.
Everything is little-endian. Each word has one writer, so there are no locks:

    header   0 u64 ARRIVING_MAGIC   8 u32 rows   12 u32 stripes of a row   16..63 reserved
             64 u32 granted[rows]: by the daemon: the serial number of the transfer to which a row belongs; 0: of none
             192 u32 shown[rows]: by the copier of that transfer: the same number, once the rest of the row is written
             320 IN_ORDER_NOTES notes, IN_ORDER each: by readers, which may write over each other's: an inode that one
             reads in order at the source, and the bytes that it has read so
    rows     from ARRIVING_HEADER_BYTES on, ARRIVING_ROW_BYTES each, see ARRIVING_ROW; by the copier, but for what
             ARRIVING_READ and WISHED_OFFSET name, which readers write, and for PRIORITY_OFFSET and
             SHARE_OFFSET
    stripes  from STRIPES_OFFSET on, a byte for each stripe of each row: by the copier, a StripeState

A row may be used only while both of its words have the same number other than 0, which is looked at before bytes are
read from the incoming file and again afterwards. The daemon takes `granted` away before a write is answered, when a
transfer has failed or was given up, and before the row is another's. A number is never given twice.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from hpcstage.plan import blocks

ARRIVING_FILE = "arriving"
ARRIVING_MAGIC = int.from_bytes(b"hpcarrv1", "little")
ARRIVING_HEADER = struct.Struct("<QII")
ARRIVING_ROWS = 32
GRANTED_OFFSET = 64
SHOWN_OFFSET = 192
IN_ORDER_OFFSET = 320
IN_ORDER = struct.Struct("<QQ")
IN_ORDER_NOTES = 12
LEAST_IN_ORDER_BYTES = 4 << 20
"""A reader that has read so many bytes in a row at the source notes it, and again after as many."""
ARRIVING_HEADER_BYTES = 512
ARRIVING_ROW = struct.Struct("<QQQqqIIQ")
"""u64 device, u64 inode, u64 size, i64 mtime, i64 ctime of the source, as stat says on this node, u32 id,
u32 bytes of a stripe, u64 reserved."""
WISHED_OFFSET = 56
"""In a row: u32 the stripe that a reader needs next, plus one; 0: none. Where none has said it, the exchange writes
what another node needs."""
PRIORITY_OFFSET = 60
"""In a row: u32, by the daemon: the copier's Priority."""
NAME_OFFSET = 64
"""In a row: the name of the incoming file in the node directory, up to a NUL."""
ARRIVING_NAME_BYTES = 64
READ_OFFSET = 128
"""In a row: ARRIVING_READ."""
ARRIVING_READ = struct.Struct("<QQ")
"""u64 bytes that readers got from the incoming file, u64 bytes that they read at the source where no copier was."""
SHARE_OFFSET = 144
"""In a row: SHARE, by the daemon."""
SHARE = struct.Struct("<II64s")
"""u32 this node, u32 how many nodes bring the file together (0: this one alone), and a bit for each of these, by its
number."""
MOST_SHARING = 512
"""Nodes with numbers from this on bring no file together with others."""
ARRIVING_ROW_BYTES = 256
STRIPES_OFFSET = 12288
ROW_STRIPES = blocks.MOST_STRIPES
ARRIVING_BYTES = STRIPES_OFFSET + ARRIVING_ROWS * ROW_STRIPES
LEAST_STRIPE_BYTES = blocks.LEAST_STRIPE_BYTES
stripe_bytes = blocks.stripe_bytes


class Priority(IntEnum):
    """The priority of a copy below programs that read the source: a higher number gives way to more."""

    FULL = 0
    TRIAL = 1
    """It does not yet, and takes small pieces, so that it gives way at once if it is to."""
    BELOW_CALLS = 2
    """It goes on while no program is in a call that the source answers, or in a page fault."""
    BELOW_PROGRAMS = 3
    """It goes on once no program has been in such a call for far longer than a piece takes."""


class StripeState(IntEnum):
    """How far a stripe is."""

    ABSENT = 0
    COMING = 1
    """A thread of the copier reads it from the source, or another node was asked for it."""
    ARRIVED = 2
    """All of it is in the incoming file, and the source was what the row says after it had been read."""
