"""What a copier and the exchange of its node tell each other about stripes of a large file that several nodes bring
together, in SOCK_SEQPACKET datagrams. Owns their form.

A connection is for one file. The first datagram is a Begin, with the descriptor of memory that both map: slots of a
stripe each. Then the copier asks for stripes, each by the node that reads it and a free slot, and the exchange answers
each with a StripeAnswer, once the stripe is in its slot or does not come. A slot is the exchange's until then, so bytes
that come late harm nothing. The end of the connection means that the other side is gone.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

SOCKET = "stripes"
"""The exchange's socket in the node directory."""
BEGIN = struct.Struct("<IIQ")
ASKED = struct.Struct("<III")
ANSWER = struct.Struct("<III")
MOST_BYTES = 64
"""The most bytes of a datagram."""
SLOTS_BYTES, LEAST_SLOTS = 16 << 20, 2
"""The bytes of all slots of a file, and the least slots where stripes are long."""


class Begin(NamedTuple):
    """A file, as the manifest of both sides has it."""

    id: int
    stripe_bytes: int
    size_bytes: int


class Asked(NamedTuple):
    """A stripe that a node is to give."""

    node: int
    stripe: int
    slot: int


class StripeAnswer(NamedTuple):
    """What became of it: whether it is in its slot, or does not come."""

    stripe: int
    slot: int
    is_here: int


def slots_of(stripe_bytes: int) -> int:
    """Returns the number of slots for a file with stripes of this length."""
    return max(LEAST_SLOTS, SLOTS_BYTES // stripe_bytes)
