"""Divides a global mini-batch among ranks: each takes what its node holds, and what is left over is evened out. Pure.

The module owns the division of one step. It knows samples by their index, nodes and ranks by their number; the caller
says who holds what.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcstage.torch.balance import Move, balance, pour

NOBODY = -1


@dataclass(frozen=True)
class Held:
    """Says which node has which sample; it is the same on all ranks."""

    owner: Sequence[int]
    """For each sample a node that has it, or NOBODY."""
    maps: Sequence[bytes] = ()
    """For each node a bit per sample, the lowest bit of a byte first; empty unless several nodes have some sample."""

    def has(self, node: int, sample: int) -> bool:
        """Returns whether a node has a sample, also where it is one of several nodes."""
        if self.owner[sample] == node:
            return True
        return bool(self.maps) and bool(self.maps[node][sample >> 3] >> (sample & 7) & 1)


def evenly(batch: Sequence[int], rank: int, world: int) -> list[int]:
    """Returns a rank's part where nobody knows who holds what: that of PyTorch's DistributedSampler."""
    return list(batch[rank::world])


def divide(batch: Sequence[int], held: Held, ranks: Sequence[int], *, balanced: bool) -> list[list[list[int]]]:
    """Returns the parts of all ranks of all nodes; `ranks` says how many ranks each node has.

    If `balanced`, all ranks get the same number of samples (the batch must be divisible by the number of ranks).
    Otherwise only samples that nobody holds are used to even out, and a rank that would get nothing gets one sample: a
    collective needs all ranks in each step.

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
    """Moves samples to the target: first those that it holds as well, then those that came last."""
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
    """Divides a part evenly among the ranks of a node."""
    return [part[len(part) * rank // ranks : len(part) * (rank + 1) // ranks] for rank in range(ranks)]
