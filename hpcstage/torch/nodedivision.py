"""Divides the steps of an elastic training by what the disks of nodes hold, among the ranks that train at the moment.

The module owns the agreement of the ranks, which is made anew in each membership and each epoch. `roster` says who
holds what, `shares` divides one step; `elasticsampler` knows the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from hpcstage.torch.holdings import NodeHoldings
from hpcstage.torch.roster import Seats, agree, gather_in, meet
from hpcstage.torch.shares import Held, divide, evenly


class NodeDivision:
    """The division among the ranks of the default process group."""

    def __init__(self, paths: Callable[[], Sequence[str] | None], samples: int, same: str) -> None:
        """`paths` returns the file of each sample, where that is known. `same` is a text of what must be the same on
        all ranks."""
        self._paths = paths
        self._samples = samples
        self._same = same
        self._holdings: NodeHoldings | None = None
        self._seats: Seats | None = None
        self._held: Held | None = None

    def agree(self, rank: int, world: int, epoch: int) -> None:
        """Agrees with the other ranks on who holds what, by two collectives; all of them call it at the same place of
        the training. Where one cannot take part, all divide evenly."""
        self._seats = self._held = None
        if world < 2 or not dist.is_available() or not dist.is_initialized():
            return
        self._holdings = found = self._holdings or NodeHoldings(self._paths())
        gather = gather_in(None)
        self._seats = meet(gather, found.node, f"{self._same} {world}", rank, possible=found.possible)
        if self._seats is not None:
            self._held = agree(gather, self._seats, found, self._samples, epoch)

    def part(self, batch: Sequence[int], rank: int, world: int) -> list[int]:
        """Returns what a rank reads of a step. A step that does not divide evenly, as the last of an epoch may not, is
        divided without regard to nodes."""
        seats, held = self._seats, self._held
        if seats is None or held is None or len(batch) % world:
            return evenly(batch, rank, world)
        return divide(batch, held, seats.ranks, balanced=True)[seats.node][seats.seat]
