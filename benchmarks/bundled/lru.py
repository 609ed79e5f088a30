"""A cache of bytes that drops what was used longest ago, simulated, and what its miss rates are in closed form. Pure.

Owns the derivation. A file is missed if what was read since its last use, and itself, is more than the cache holds. Let
c be the cache's share of the dataset, and a file be read at the fraction u of one epoch and v of the next.

Random order: between the two uses come the files behind u and those before v, where 1 - u and v are independent:
    (1 - u) + v - (1 - u) v = 1 - u (1 - v)
of the dataset. It is a hit where u (1 - v) > 1 - c; for two uniform numbers that has the probability c + (1-c) ln(1-c).
So (1 - c) (1 - ln(1 - c)) are missed.

Bundles of r of the dataset, forward and then backward: of the bundle with j others behind it, the j others come between
the two uses, all of them and once each, and of its own files what comes in a random order, so
    j r + r (1 - u (1 - v))
of the dataset. With c = (m + f) r, 0 <= f < 1, the last m bundles are hits, of the one before them the part
f + (1-f) ln(1-f), of the others nothing. So 1 - r (m + f + (1-f) ln(1-f)) are missed: 1 - c where f is 0, which is the
least that any cache of that size can miss. With r = 1 it is the random order's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Images:
    """Files with sizes like those of a dataset: log-normal, as those of JPEG images about are."""

    name: str
    files: int
    mean_bytes: float
    sigma: float
    """Of the sizes' logarithms."""

    def sizes(self) -> list[int]:
        """In bytes."""
        rng = np.random.default_rng(11)
        drawn = rng.lognormal(math.log(self.mean_bytes) - self.sigma**2 / 2, self.sigma, self.files)
        found: list[int] = np.maximum(1024, drawn).astype(int).tolist()
        return found


def miss_rates(epochs: Iterable[Sequence[int]], sizes: Sequence[int], capacity_bytes: float) -> list[float]:
    """By epoch, the share of files that a cache which begins empty does not have."""
    held: OrderedDict[int, None] = OrderedDict()
    used, rates = 0, []
    for order in epochs:
        missed = 0
        for index in order:
            if index in held:
                held.move_to_end(index)
                continue
            missed += 1
            held[index] = None
            used += sizes[index]
            while used > capacity_bytes:
                used -= sizes[held.popitem(last=False)[0]]
        rates.append(missed / len(order))
    return rates


def random_misses(share: float) -> float:
    """Of a new random order each epoch, in steady state."""
    return bundle_misses(share, 1.0)


def bundle_misses(share: float, ratio: float) -> float:
    """Of bundles that are read forward and backward; 1 / ratio must be whole."""
    whole, part = divmod(share / ratio + 1e-9, 1)
    hits = whole + part + ((1 - part) * math.log(1 - part) if part else 0.0)
    return 1 - ratio * hits
