"""Computes PyTorch's sampling orders exactly, without PyTorch. Pure: from numbers to indices of the loader's dataset.

This module owns the arithmetic of torch's CPU generator and of its samplers, and the text form of a distributed sampler
(`distributed n=10 replicas=2 ...`). It does not know which file an index means.

Python's own generator is the same Mersenne Twister as torch's; only the seeding differs, so the words come from it.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from operator import add, mod
from typing import Any

MOST_SAMPLES = (1 << 32) // 20 - 1
"""For more samples torch draws other numbers for a permutation."""
DISTRIBUTED = "distributed"
_STATE_WORDS = 624
_CHUNK = 1 << 20
_WORD = 0xFFFFFFFF
_LARGEST_SEED = 1 << 64


class Words:
    """The sequence of 32-bit words that `torch.Generator().manual_seed(seed)` yields."""

    def __init__(self, seed: int) -> None:
        state = [seed & _WORD]
        for position in range(1, _STATE_WORDS):
            last = state[-1]
            state.append((1812433253 * (last ^ (last >> 30)) + position) & _WORD)
        self._twister = random.Random(0)  # noqa: S311 - not for secrets
        self._twister.setstate((3, (*state, _STATE_WORDS), None))

    def take(self, count: int) -> array[int]:
        """Returns the next words."""
        words = array("I")
        if count > 0:
            words.frombytes(self._twister.getrandbits(32 * count).to_bytes(4 * count, "little"))
        if sys.byteorder == "big":
            words.byteswap()
        return words


def randperm(n: int, words: Words) -> array[int]:
    """Returns `torch.randperm(n, generator=...)`. Raises ValueError for a number of samples that it cannot compute."""
    _check_samples(n)
    order = array("I", range(n))
    for first in range(0, n - 1, _CHUNK):
        steps = map(mod, words.take(min(n - 1 - first, _CHUNK)), range(n - first, 1, -1))
        for at, other in enumerate(map(add, steps, range(first, n)), first):
            kept = order[at]
            order[at] = order[other]
            order[other] = kept
    return order


# ---- samplers


def sequential(n: int) -> array[int]:
    """Returns the order of a `SequentialSampler`."""
    _check_samples(n)
    return array("I", range(n))


@dataclass(frozen=True)
class Distributed:
    """One rank's `DistributedSampler` in one epoch."""

    n: int
    """Length of the dataset."""
    replicas: int
    rank: int
    shuffle: bool = True
    drop_last: bool = False
    """The sampler's own drop_last, not the loader's."""
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for what torch would refuse."""
        _check_samples(self.n)
        if not 0 <= self.rank < self.replicas:
            raise ValueError(f"rank {self.rank} of {self.replicas}")
        if self.epoch < 0 or not -_LARGEST_SEED // 2 <= self.seed + self.epoch < _LARGEST_SEED:
            raise ValueError(f"seed {self.seed}, epoch {self.epoch}")

    @property
    def samples(self) -> int:
        """Returns how many indices the rank reads."""
        return (self.n if self.drop_last else self.n + self.replicas - 1) // self.replicas

    def order(self) -> array[int]:
        """Returns the indices that the rank reads, in reading order."""
        return self.part(self.permutation())

    def permutation(self) -> array[int]:
        """Returns the permutation of all samples before it is divided; all ranks of one epoch have the same."""
        return randperm(self.n, Words(self.seed + self.epoch)) if self.shuffle else sequential(self.n)

    def part(self, permutation: array[int]) -> array[int]:
        """Returns the rank's share of a permutation."""
        missing = self.samples * self.replicas - self.n
        share = permutation[self.rank : max(self.n + min(missing, 0), 0) : self.replicas]
        if missing > 0 and len(share) < self.samples:
            # The permutation's start fills up what is missing at its end, repeatedly where the permutation is short.
            share.extend(permutation[i % self.n] for i in range(*self._filled()))
        return share

    def _filled(self) -> tuple[int, int, int]:
        """Returns the range (start, stop, step) of the rank's positions behind the end, counted from the end."""
        first = self.rank + self.replicas * (-(-(self.n - self.rank) // self.replicas) if self.rank < self.n else 0)
        return first - self.n, self.samples * self.replicas - self.n, self.replicas

    def later(self, epochs: int) -> Distributed:
        """Returns the same rank's sampler this many epochs later."""
        return replace(self, epoch=self.epoch + epochs)

    def text(self) -> str:
        """Returns the text form that is announced; `parse` reads it."""
        flags = f"shuffle={self.shuffle:d} drop_last={self.drop_last:d}"
        return f"{DISTRIBUTED} n={self.n} replicas={self.replicas} rank={self.rank} {flags} " + (
            f"seed={self.seed} epoch={self.epoch}"
        )


def parse(formula: str) -> Distributed:
    """Reads `Distributed.text()`. Raises ValueError for anything else."""
    kind, *pairs = formula.split() or [""]
    fields: dict[str, Any] = {name: int(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    names = {"n", "replicas", "rank", "shuffle", "drop_last", "seed", "epoch"}
    if kind != DISTRIBUTED or len(pairs) != len(names) or set(fields) != names:
        raise ValueError(f"not the formula of a sampler: {formula[:100]!r}")
    return Distributed(**{**fields, **{name: bool(fields[name]) for name in ("shuffle", "drop_last")}})


def orders_of(samplers: Sequence[Distributed]) -> list[array[int]]:
    """Returns the orders of several ranks (or epochs); a permutation that ranks share is computed once."""
    known: dict[tuple[int, int | None], array[int]] = {}
    found = []
    for sampler in samplers:
        shared = (sampler.n, sampler.seed + sampler.epoch if sampler.shuffle else None)
        if shared not in known:
            known[shared] = sampler.permutation()
        found.append(sampler.part(known[shared]))
    return found


def interleave(orders: Sequence[array[int]]) -> array[int]:
    """Merges several ranks' orders: the first index of each, then the second of each, and so on."""
    if len({len(order) for order in orders}) == 1:
        merged = array("I", bytes(4 * sum(map(len, orders))))
        for rank, order in enumerate(orders):
            merged[rank :: len(orders)] = order
        return merged
    return array("I", _present(chain.from_iterable(zip_longest(*orders))))


def _present(items: Iterable[int | None]) -> Iterator[int]:
    return (item for item in items if item is not None)


def _check_samples(n: int) -> None:
    if not 0 <= n <= MOST_SAMPLES:
        raise ValueError(f"{n:,} samples: from 0 to {MOST_SAMPLES:,} can be computed")
