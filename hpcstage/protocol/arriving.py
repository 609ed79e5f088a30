"""The file `arriving` of a node directory: which parts of large files on their way are there already.

Owns the layout. Daemon, copiers and attached processes map the file; `scripts/wire.py` copies the numbers for the shim.
Everything is little-endian. Each word has one writer, so there are no locks:

    header   0 u64 ARRIVING_MAGIC   8 u32 rows   12 u32 stripes of a row   16..63 reserved
             64 u32 granted[rows]: by the daemon: the serial number of the transfer to which a row belongs; 0: of none
             192 u32 shown[rows]: by the copier of that transfer: the same number, once the rest of the row is written
    rows     from ARRIVING_HEADER_BYTES on, ARRIVING_ROW_BYTES each, see ARRIVING_ROW; by the copier, but for what
             ARRIVING_READ, JUMPED_OFFSET and FRONTS_OFFSET name, which readers write, WISHED_OFFSET, which the exchange
             does, and what the daemon writes: PRIORITY_OFFSET, SHARE_OFFSET, AHEAD_OFFSET, FAULTS_OFFSET
    stripes  from STRIPES_OFFSET on, a byte for each stripe of each row: by the copier, a StripeState

A row is granted when a program asks for a file that it reads at the source, or a transfer begins. Until it is shown the
daemon's ARRIVING_ROW stands in it, of which inode, size and id are right: readers only count there.

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
ARRIVING_HEADER_BYTES = 320
ARRIVING_ROW = struct.Struct("<QQQqqIIQ")
"""u64 device, u64 inode, u64 size, i64 mtime, i64 ctime of the source, as stat says on this node, u32 id,
u32 bytes of a stripe, u64 reserved."""
WISHED_OFFSET = 56
"""In a row: u32 the stripe that another node needs next, plus one; 0: none."""
PRIORITY_OFFSET = 60
"""In a row: u32, by the daemon: the copier's Priority."""
NAME_OFFSET = 64
"""In a row: the name of the incoming file in the node directory, up to a NUL."""
ARRIVING_NAME_BYTES = 64
READ_OFFSET = 128
"""In a row: ARRIVING_READ."""
ARRIVING_READ = struct.Struct("<QQ")
"""u64 bytes that readers got from the incoming file, u64 bytes that they read at the source."""
SHARE_OFFSET = 144
"""In a row: SHARE, by the daemon."""
SHARE = struct.Struct("<II64s")
"""u32 this node, u32 how many nodes bring the file together (0: this one alone), and a bit for each of these, by its
number."""
MOST_SHARING = 512
"""Nodes with numbers from this on bring no file together with others."""
JUMPED_OFFSET = 216
"""In a row: u64 the longest run of reads in a row that a jump ended."""
AHEAD_OFFSET = 224
"""In a row: u64 the bytes, from the begin of the file on, that come ahead of a reader of the file before it."""
FAULTS_OFFSET = 232
"""In a row: u64 the bytes that programs have read in page faults."""
FRONTS_OFFSET, ROW_READERS = 240, 4
"""In a row: so many FRONT. Readers may write over each other's."""
FRONT = struct.Struct("<QQ")
"""u64 where the last read of a reader ended, u64 how much it has read in a row up to there."""
ARRIVING_ROW_BYTES = 304
STRIPES_OFFSET = 12288
ROW_STRIPES = blocks.MOST_STRIPES
ARRIVING_BYTES = STRIPES_OFFSET + ARRIVING_ROWS * ROW_STRIPES
LEAST_STRIPE_BYTES = blocks.LEAST_STRIPE_BYTES
stripe_bytes = blocks.stripe_bytes


class Priority(IntEnum):
    """What of a file is copied now."""

    FULL = 0
    """All, as no program of this node reads a large file at the source."""
    FOLLOWS = 1
    """What readers in order need next."""
    ASIDE = 2
    """The rest, too, while programs leave the source alone: of one file at a time."""


class StripeState(IntEnum):
    """How far a stripe is."""

    ABSENT = 0
    COMING = 1
    """A thread of the copier reads it from the source, or another node was asked for it."""
    ARRIVED = 2
    """All of it is in the incoming file, and the source was what the row says after it had been read."""
