"""An order to encode one generation of a group of nodes, as the agent of each gives it to its exchange. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from hpcstage.checkpoint.coding.erasurecode import NoErasureCode
from hpcstage.checkpoint.coding.stripes import Striping
from hpcstage.checkpoint.generations.files import GenerationId
from hpcstage.checkpoint.protection.groups import CodeSize

CODED_BLOCK_BYTES = 256 << 10
"""Larger than the blocks of a generation: each costs the exchanges as much as some 100 KB more."""
MOST_BLOCK_BYTES = 4 << 20
MOST_STRIPE_BYTES = 32 << 20
"""The most bytes of one message between two nodes: a block for each parity."""
PROCESSOR_SHARE = 0.5
WAIT_S = 120.0


class NoOrder(ValueError):
    """The values are none of an order."""


@dataclass(frozen=True)
class EncodeOrder:
    """Tells the exchanges of a group what to do together.

    All fields but `directory`, `processor_share`, `rate_bytes_per_s` and `wait_s` are the same on all nodes, or the
    exchanges wait for each other in vain and say so after `wait_s`.
    """

    generation: GenerationId
    directory: Path
    """This node's store: the directory above that of the generation."""
    nodes: tuple[int, ...]
    """The members of the group, in the order of its circle of stripes: their indices among the nodes of the job."""
    names: tuple[str, ...]
    """The members' names in the record, in the same order."""
    size: CodeSize
    block_bytes: int = CODED_BLOCK_BYTES
    trial: int = 0
    """Tells one try from the next. An order that failed, or whose exchange was lost, is given again with a higher one,
    the same for all members."""
    processor_share: float = PROCESSOR_SHARE
    """The share of a processor that the exchange of this node takes while it encodes; 0: no limit."""
    rate_bytes_per_s: float = 0.0
    """The most bytes that this node sends in a second; 0: no limit."""
    wait_s: float = WAIT_S
    """How long a member is waited for that does nothing: one without the order, or one that does not go on."""

    def __post_init__(self) -> None:
        try:
            Striping(len(self.nodes), self.size.k, self.size.m, self.block_bytes)
        except NoErasureCode as error:
            raise NoOrder(error.what) from None
        if len(self.names) != len(self.nodes) or len(set(self.nodes)) != len(self.nodes):
            raise NoOrder("each member of a group has a name, and is named once")
        if self.block_bytes > MOST_BLOCK_BYTES or self.block_bytes * self.size.m > MOST_STRIPE_BYTES:
            raise NoOrder(f"blocks of {self.block_bytes} bytes for {self.size} are too large to be sent")

    def at_rate(self, rate_bytes_per_s: float | None) -> EncodeOrder:
        """Returns the order with a limit for what is sent; a member that waits by it counts as one that does something.
        None: the order as it is."""
        if rate_bytes_per_s is None:
            return self
        longest_s = self.block_bytes * self.size.m / rate_bytes_per_s
        return replace(self, rate_bytes_per_s=rate_bytes_per_s, wait_s=self.wait_s + longest_s)

    @property
    def digest(self) -> int:
        """Returns a number that all members have for the order, and no other order has."""
        known = (self.generation, self.nodes, self.names, self.size, self.block_bytes, self.trial)
        return int.from_bytes(blake2b(repr(known).encode(), digest_size=8).digest(), "little")

    def to_values(self) -> dict[str, Any]:
        """Returns the fields of `protocol.coding.Encode`."""
        return {
            "number": self.generation.number,
            "attempt": self.generation.attempt,
            "trial": self.trial,
            "directory": str(self.directory),
            "nodes": list(self.nodes),
            "names": list(self.names),
            "k": self.size.k,
            "m": self.size.m,
            "block_bytes": self.block_bytes,
            "processor_share": self.processor_share,
            "rate_bytes_per_s": self.rate_bytes_per_s,
            "wait_s": self.wait_s,
        }

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> EncodeOrder:
        """Reads what `to_values` returned. Raises NoOrder."""
        try:
            return cls(
                GenerationId(values["number"], values["attempt"]),
                Path(values["directory"]),
                tuple(map(int, values["nodes"])),
                tuple(map(str, values["names"])),
                CodeSize(values["k"], values["m"]),
                values["block_bytes"],
                values["trial"],
                values["processor_share"],
                values["rate_bytes_per_s"],
                values["wait_s"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise NoOrder(str(error)) from None
