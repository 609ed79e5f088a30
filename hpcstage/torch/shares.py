"""A global mini-batch divided among ranks: each takes what its node holds, and what is left over is evened out. Pure.

Owns the division of one step. It knows samples by their index, nodes and ranks by their number; who holds what is
given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcstage.torch.balance import Move, balance, pour

NOBODY = -1


@dataclass(frozen=True)
class Held:
    """Which node has which sample. The same on all ranks."""

    owner: Sequence[int]
    """By sample: a node that has it, or NOBODY."""
    maps: Sequence[bytes] = ()
    """By node: a bit per sample, the lowest of a byte first. Only where some sample has several nodes."""

    def has(self, node: int, sample: int) -> bool:
        """Whether a node has a sample, be it one of several."""
        if self.owner[sample] == node:
            return True
        return bool(self.maps) and bool(self.maps[node][sample >> 3] >> (sample & 7) & 1)


def evenly(batch: Sequence[int], rank: int, world: int) -> list[int]:
    """A rank's part where nobody knows who holds what: that of PyTorch's DistributedSampler."""
    return list(batch[rank::world])


def divide(batch: Sequence[int], held: Held, ranks: Sequence[int], *, balanced: bool) -> list[list[list[int]]]:
    """The parts of all ranks of all nodes; `ranks`: how many a node has.

    Balanced, all ranks get the same number (the batch must be divisible by theirs). Else only what nobody holds is
    used to even out, and a rank that would get nothing gets one: a collective needs all of them in each step.

    >>> divide([0, 1, 2, 3], Held(owner=[0, 0, 0, 1]), [1, 1], balanced=True)
    [[[0, 1]], [[3, 2]]]
    >>> divide([0, 1, 2, 3], Held(owner=[0, 0, 0, 1]), [1, 1], balanced=False)
    [[[0, 1, 2]], [[3]]]
    """
    parts: list[list[int]] = [[] for _ in ranks]
    nobodys: list[int] = []
    for sample in batch:
        node = held.owner[sample]
        (nobodys if node == NOBODY else parts[node]).append(sample)
    quota = len(batch) // sum(ranks)
    begin = 0
    for part, count in zip(parts, pour(_over(parts, ranks, quota), len(nobodys)), strict=True):
        part.extend(nobodys[begin : begin + count])
        begin += count
    for move in balance(_over(parts, ranks, quota if balanced else 1)):
        _carry_out(move, parts, held)
    return [_split(part, count) for part, count in zip(parts, ranks, strict=True)]


def _over(parts: Sequence[Sequence[int]], ranks: Sequence[int], quota: int) -> list[int]:
    return [len(part) - count * quota for part, count in zip(parts, ranks, strict=True)]


def _carry_out(move: Move, parts: list[list[int]], held: Held) -> None:
    """What the target holds as well goes first, then what came last."""
    source = parts[move.source]
    chosen: list[int] = []
    if held.maps:
        chosen = [at for at, sample in enumerate(source) if held.has(move.target, sample)][-move.samples :]
    taken = set(chosen)
    at = len(source)
    while len(taken) < move.samples:
        at -= 1
        taken.add(at)
    parts[move.target].extend(source[at] for at in sorted(taken))
    parts[move.source] = [sample for at, sample in enumerate(source) if at not in taken]


def _split(part: list[int], ranks: int) -> list[list[int]]:
    """Evenly to the ranks of a node."""
    return [part[len(part) * rank // ranks : len(part) * (rank + 1) // ranks] for rank in range(ranks)]
