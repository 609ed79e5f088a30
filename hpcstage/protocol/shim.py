"""The protocol between a training process and the daemon of its node: datagrams and shared files.

Owns the numbers. `scripts/wire.py` copies them for the shim, which imports nothing of hpcstage, and half of which is C.
Everything is little-endian. Owns no socket and no mapping.

A message is one SOCK_SEQPACKET datagram on a fresh connection to `<node directory>/sock`, a reply is one datagram:

    message   u8 version, u8 kind, u16 flags, u32 pid, payload
    reply     u8 version, u8 answer, u16 reason, u32 value

REQUEST, WROTE and STATUS are answered; a request waits for its answer as long as the daemon decides, and never longer
than the cap in the shim's configuration. ATTACH keeps its connection open: the daemon lives while one is open.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

VERSION = 1
MESSAGE = struct.Struct("<BBHI")
REPLY = struct.Struct("<BBHI")
MAX_DATAGRAM = 8192
"""A message with the longest path (PATH_MAX is 4096) fits."""
REQUEST_CAP_S = 20.0
"""The longest that a program waits for one file; the daemon answers earlier."""


class Kind(IntEnum):
    """The kinds of messages."""

    HELLO = 1
    """A process attached. Payload: u8 layer, u8 major, u8 minor. Reply value: its slot (python layer only)."""
    REQUEST = 2
    """Payload: absolute source path, as the program spelt it, bytes. Reply: READY or DIRECT with a Reason."""
    ORDER = 3
    """Payload: name of a file below orders/ that holds NUL-separated absolute source paths in reading order. A name
    that begins with SAMPLER_ORDER comes from a sampler (the beginning of an epoch whose EPOCH follows), others come
    from the program."""
    WROTE = 4
    """Payload: path. A write below a dataset begins: once answered (DONE) no stale copy of it is or will be visible."""
    STATUS = 5
    """No payload. Reply: DONE, value: the daemon's State."""
    ATTACH = 6
    """A wrapper attached. Payload: u32 pid of its child, or 0. The connection stays open; reply DONE at once. May be
    sent again on the same connection when the child's pid is known (pid 0 before: upfront mode)."""
    END = 7
    """On an ATTACH connection: the child has ended. No payload. Reply: LAST or OTHERS, after the daemon stopped copying
    and wrote its part of the record (LAST) or at once (OTHERS)."""
    STAGED = 8
    """On an ATTACH connection: answered (DONE) when nothing is left to be copied or nothing more can be (upfront)."""
    EPOCH = 9
    """The indices that one of PyTorch's loaders will read, or the end of them. Payload: EPOCH, then NAME NUL TABLE NUL
    FORMULA, each of which may be empty. Reply: DONE."""
    PEER = 10
    """The node's exchange (a process of the node group) connected. No payload. The connection carries the messages of
    `protocol.exchange` from here on, both ways; the daemon's HELLO is the first. A newer exchange takes the place of
    an older one."""
    LANDED = 11
    """A write begins, or has begun, on an inode. Payload: LANDED, then the path as with WROTE; empty where it is not
    below a dataset. Reply: DONE, as with WROTE, for all names of the inode."""
    DRAIN = 12
    """On an ATTACH connection, once the child has ended: answered (DONE) when the command's output files and
    checkpoints are in their directories, or nothing more can be done for them. Payload: empty, or DISORDERLY."""


DISORDERLY = b"1"
"""The payload of DRAIN where the command did not end with exit code 0."""
LANDED = struct.Struct("<QQ")
"""u64 device, u64 inode, as this node sees them."""
EARLY_FILE = "early"
"""A file in the node directory: LANDED of each file outside of the datasets that was opened for writing before STAGING.
The daemon reads it after it has set that state; a process that wrote to it looks at the state once more."""
SAMPLER_ORDER = b"epoch-"
EPOCH = struct.Struct("<IHH")
"""u32 stream: number of the loader's iterator in its process, from 1. u16 columns: files per sample in the table; 0: no
table known. u16 flags. Then NAME, NUL, TABLE.

NAME: a file below orders/: u32 indices into the loader's dataset in reading order; the daemon deletes it.
TABLE: a file below orders/: NUL-separated absolute source paths, `columns` per sample, an empty entry where there is
none. The daemon keeps it, for several processes may name it.
"""
EPOCH_ENDED = 1
"""Flag: the epoch was read to its end or is abandoned; NAME and TABLE are empty."""


class Answer(IntEnum):
    """The kinds of replies."""

    READY = 1
    DIRECT = 2
    DONE = 3
    LAST = 4
    OTHERS = 5
    REFUSED = 6


class Reason(IntEnum):
    """Why an open goes to the source; also the order of the `direct_*` counters below."""

    NONE = 0
    UNKNOWN = 1
    """Not in the manifest (not a regular file at the scan, or came later)."""
    LATER = 2
    """Waiting would take longer than reading the source."""
    FULL = 3
    """The store has no free budget for it."""
    FAILED = 4
    """Copying it failed."""
    VOID = 5
    """It was written to during the run."""
    SCANNING = 6
    """The manifest is not complete yet."""
    TIMEOUT = 7
    """The daemon did not answer within the cap (counted by the shim)."""
    NO_DAEMON = 8
    """No daemon listens (counted by the shim)."""
    SETTLED = 9
    """The page says that requests are not answered any more, so none was sent (counted by the shim)."""
    LOCAL_ERROR = 10
    """The staged copy exists but could not be opened (counted by the shim)."""
    LARGE = 11
    """A large file, which is not copied while the program reads it at the source."""


class Layer(IntEnum):
    """How a process is redirected."""

    NATIVE = 1
    PYTHON = 2
    DIRECT = 3


class State(IntEnum):
    """The daemon's state as the page shows it. Shims send requests in SCANNING and STAGING only."""

    STARTING = 0
    SCANNING = 1
    STAGING = 2
    SETTLED = 3
    """All that will be staged is in the store: a miss goes to the source without asking."""
    MEASURING = 4
    """Mode direct: nothing is redirected, opens are only counted."""
    ENDED = 5


# ---- the page: `<node directory>/page`, one shared mapping ----
#
# header (8192 bytes):  0 u64 MAGIC   8 u32 version  12 u32 state  16 u32 slots  20 u32 slot bytes
#                      24 u32 next native slot (atomic fetch-and-add by attaching processes; starts at 1)
#                      28 u32 next python slot (taken by attaching processes under flock on the page; starts at
#                      PYTHON_SLOTS_FROM; beyond SLOTS it counts the processes that found none)
#                      32 u32 pid of the daemon  36 u32 LOGGING: 1 while opens are to be logged (rings, below)
#                      40 the gate, four u32: GIVEN_UP, CAUGHT_UP, CLOSED, HELD
#                      56 u32 LINKED: 1: no file of the datasets is a symbolic link or behind one; 0: else, or not known
#                      60 u32 VOIDED: rises when copies have been voided, before the write is answered
#                      64 u64 DEVICE: where all files of the datasets are, as seen from here; 0: several, or not known
#                      72 PROGRESS: how far the daemon is, for the wrapper
#                      104 u32 PUBLISHED: rises when a copy is there with its attributes: who has the file open at
#                      the source may go on with the copy
#                      4096 FREE: a byte per slot, SLOT_FREE where the process of a used slot has ended, the daemon has
#                      taken its counters, and the slot is zeros again. Who attaches takes such a slot first: by
#                      exchanging the byte (native), or under the flock (python).
# then `slots` slots. Slot 0 is shared by all processes of the native layer that found no slot (atomic adds only).
# A slot is written only by its process (all its threads: atomic adds), and outlives it.
PAGE_MAGIC = int.from_bytes(b"hpcstg01", "little")
PAGE_HEADER = struct.Struct("<QIIIIIIII")
PAGE_HEADER_BYTES = 8192
STATE_OFFSET = 12
LOGGING_OFFSET = 36
NEXT_NATIVE_OFFSET, NEXT_PYTHON_OFFSET = 24, 28
GATE_OFFSET = 40
"""Copies are opened only while GIVEN_UP equals CAUGHT_UP and the other two are 0.

GIVEN_UP: a process that sent a WROTE and did not wait until it was answered writes a value here that no other writes.
CAUGHT_UP: the daemon writes here what it found in GIVEN_UP before it read all that had been sent until then.
CLOSED: 1 for good, because a copy that is not the source any more may be visible. HELD: the daemon writes here the
number of transfers of files that were written to and that may be published all the same, and one more while other nodes
may write without this one knowing."""
GIVEN_UP, CAUGHT_UP, CLOSED, HELD = range(4)
GATE_BYTES = 16
LINKED_OFFSET = 56
UNLINKED = 1
VOIDED_OFFSET = 60
DEVICE_OFFSET = 64
PROGRESS_OFFSET = 72
PROGRESS = struct.Struct("<4Q")
"""The fields of `WorkProgress`. While the state is SCANNING they say what was found, and the last two are 0."""
PUBLISHED_OFFSET = 104
FREE_OFFSET = 4096
SLOT_FREE = 1
SLOTS = 4096
PYTHON_SLOTS_FROM = 3072
SLOT_BYTES = 2048
PAGE_BYTES = PAGE_HEADER_BYTES + SLOTS * SLOT_BYTES

# slot:  0 u32 pid (0 = unused)  4 u32 layer  8 u32 python version (major << 8 | minor)  12 u32 parent pid
#       16 u64 monotonic ns at attach  24 u64 inode of its PID namespace, 0: unknown  32..63 reserved
#       64 u64 counters[64]  576 u32 hist_open[96]  960 u32 hist_read[96]
SLOT_HEAD = struct.Struct("<IIIIQ")
PID_SPACE_OFFSET = 24
PID_SPACE_FILE = "/proc/self/ns/pid"
COUNTERS_OFFSET = 64
COUNTERS = 64
HIST_OPEN_OFFSET = 576
HIST_READ_OFFSET = 960
HIST_BUCKETS = 96


class Counter(IntEnum):
    """Index of a u64 in a slot. `opens` are opens for reading of something below a dataset."""

    HIT_OPENS = 0
    READY_OPENS = 2
    """Misses that the daemon answered READY and that were then opened in the store."""
    WANTS = 4
    SOURCE_OPENS = 5
    """Opens for reading that went to the source, whatever the reason (the sum of DIRECT_* and mode direct's)."""
    SOURCE_OPEN_NS = 6
    WRITE_OPENS = 7
    DROPPED = 8
    """Staged copies dropped because of a write, rename, unlink, truncate or change of times or mode."""
    HIT_STATS = 10
    SOURCE_STATS = 11
    SOURCE_READS = 12
    SOURCE_READ_BYTES = 13
    SOURCE_READ_NS = 14
    LOCAL_READS = 15
    LOCAL_READ_BYTES = 16
    LOCAL_READ_NS = 17
    FAILED_OPENS = 18
    """Opens below a dataset that failed at the source too (ENOENT and the like): the program got the source's error."""
    LOADER_STEPS = 20
    """Batches that PyTorch's loader handed out in this process."""
    LOADER_WAIT_NS = 21
    LOADER_FIRST_NS = 22
    """Monotonic ns when the first batch was asked for."""
    LOADER_LAST_NS = 23
    """Monotonic ns when the last batch had been handed out."""
    LOADER_WORKERS = 24
    """Largest num_workers seen."""
    LOADER_EPOCHS = 25
    """Loader iterators that ran to their end."""
    ERRORS = 26
    """Failures inside the shim that were swallowed."""
    ATTACH_NS = 27
    EXIT_NS = 28
    """Monotonic ns at an orderly exit; 0 if unknown."""
    READS_MEASURED = 29
    """1 where this layer measures reads (native); 0: SOURCE_READ_* and LOCAL_READ_* are unknown, not zero."""
    LISTINGS = 31
    """Directories of a dataset that were opened to be listed."""
    BLOCKED_NS = 33
    """Time in which at least one thread was inside an open, request, read, stat or listing below a dataset. While one
    is, the word holds that time less the monotonic ns at which it began: read as signed, it is negative then."""
    BLOCKED_SOURCE_NS = 34
    """The same for calls that the source answers, and for requests."""
    READERS = 35
    """The most threads that were inside such calls at once."""
    SOURCE_MAPS = 36
    """How often a file of the source was mapped into memory: its reads are page faults, which no counter contains."""
    LOCAL_MAPS = 37
    """How often a staged copy was mapped into memory."""
    LAST_NS = 38
    """Monotonic ns at the end of the last call on a dataset's file (see BLOCKED_NS)."""
    ARRIVED_READ_BYTES = 52
    """The bytes of LOCAL_READ_BYTES that were read from files on their way (see `protocol.arriving`)."""
    SHARERS = 56
    """The number of processes that share slot 0, in slot 0."""
    OWN_READ_BYTES = 59
    """Bytes that the process had read itself, from files of any kind, at an orderly exit; those of its main thread
    alone where it has reaped children. 0 where the kernel does not tell."""
    IS_AGAIN = 60
    """1 where the process had a slot before: that of another of its interpreters, or of the program that it was before
    an exec. Only the Python layer takes another slot then."""
    MOVED_OPENS = 61
    """Open files of the source in whose place the copy was put once it was there."""
    MOVED_READ_BYTES = 62
    """The bytes of LOCAL_READ_BYTES that were read from those."""
    DIRECT_BASE = 40
    """40 + Reason: opens for reading that went to the source for that reason."""


class WorkProgress(NamedTuple):
    """The work that is done, and all that there is to do, which is 0 where it is not known."""

    files: int
    size_bytes: int
    all_files: int = 0
    all_bytes: int = 0


# ---- a ring: `<node directory>/opens/<slot number>.ring`, what one process opened ----
#
# header (64 bytes):  0 u64 RING_MAGIC   8 u64 head: bytes ever written  16 u32 data bytes  20 u32 pid  24..63 reserved
# then the data. A record is 8-aligned and never crosses the data's end (a PAD record fills the rest):
#       0 u32 stamp: low 32 bits of its position + 1, written last: committed  4 u16 payload bytes  6 u8 type
#       7 u8 0  8 u64 monotonic ns  16 payload, padded to 8
# Slot 0 has no ring. A writer never waits; a reader that is further behind than the data is long has lost records.
RING_MAGIC = int.from_bytes(b"hpcring1", "little")
RING_HEADER = struct.Struct("<QQII")
RING_HEADER_BYTES = 64
RING_HEAD_OFFSET = 8
RING_DATA_BYTES = 262144
RECORD = struct.Struct("<IHBBQ")
RECORD_BYTES = 16
RECORD_PAD = 0
RECORD_OPEN = 1
"""Payload: the path below `store/`."""

# ---- the attributes: `<node directory>/attributes`, one shared mapping, written by the daemon ----
#
# header (64 bytes):  0 u64 ATTRIBUTES_MAGIC   8 u64 rows (a power of two)  16 u64 device of the store  24..63 reserved
# then the rows: what stat says of the source of a copy. A copy's row is one of the ATTRIBUTES_PROBES from where its
# inode leads: inode * ATTRIBUTES_FACTOR modulo 2**64, its upper bits. It counts if the copy's time of change is in it.
ATTRIBUTES_FILE = "attributes"
ATTRIBUTES_MAGIC = int.from_bytes(b"hpcattr1", "little")
ATTRIBUTES_HEADER = struct.Struct("<QQQ")
ATTRIBUTES_HEADER_BYTES = 64
ATTRIBUTES_ROW = struct.Struct("<QqQQqIIII8x")
"""u64 inode of the copy, 0: none; i64 its ctime in ns; then of the source: u64 device, u64 inode, i64 ctime in ns,
u32 mode, u32 names, u32 owner, u32 group."""
ATTRIBUTES_ROW_BYTES = 64
ATTRIBUTES_FACTOR = 0x9E3779B97F4A7C15
ATTRIBUTES_PROBES = 8

# ---- the holdings: `<node directory>/holdings`, one shared mapping, written by the daemon ----
#
# 0 u64 HOLDINGS_MAGIC   8 u64 files   then a byte per id of `<node directory>/manifest.bin`
HOLDINGS_FILE = "holdings"
"""A file in the node directory for libraries in training code: a byte for each file of the datasets."""
HOLDINGS_MAGIC = int.from_bytes(b"hpchold1", "little")
HOLDINGS_HEADER = struct.Struct("<QQ")


class Holding(IntEnum):
    """Whether a node has a copy of a file or will read the file from the source."""

    NONE = 0
    DUE = 1
    """The node is the one that will read the file from the source."""
    KEPT = 2
    """A copy is in the node's store and stays there."""


def bucket_of_ns(value_ns: int) -> int:
    """Returns the histogram bucket of a duration: four per octave, the first holds everything below 1024 ns."""
    if value_ns < 1024:
        return 0
    top = value_ns.bit_length() - 1
    return min(1 + 4 * (top - 10) + (value_ns >> (top - 2) & 3), HIST_BUCKETS - 1)


def bucket_upper_ns(bucket: int) -> int:
    """Returns the upper edge of a bucket in ns (exclusive)."""
    if bucket == 0:
        return 1024
    octave, quarter = divmod(bucket - 1, 4)
    return (1 << (octave + 8)) * (5 + quarter)
