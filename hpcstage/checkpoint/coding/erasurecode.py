"""The matrix of an erasure code: k data blocks and m parities, of which any k restore the others.

Owns how the matrix is made and how rows that restore lost blocks follow from it. The matrix is a part of what it
protects and is kept with it: libraries make different ones, and a later version of this module may, too.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hpcstage.checkpoint.coding.field import LOGARITHMS, ORDER, POWERS, Row, Rows, inverted, times
from hpcstage.errors import HpcstageError
from hpcstage.units import format_number

MOST_BLOCKS = 256
"""The elements of the field: so many blocks a stripe can have, data and parities together."""


class TooMuchLost(HpcstageError):
    """More blocks of a stripe are gone than it has parities."""


class NoErasureCode(HpcstageError):
    """Numbers that were read, or asked for, are not those of an erasure code."""


@dataclass(frozen=True)
class Restoration:
    """How lost blocks follow from others: block `lost[i]` is the sum of `rows[i][j]` times block `sources[j]`."""

    lost: tuple[int, ...]
    sources: tuple[int, ...]
    rows: Rows


@dataclass(frozen=True)
class ErasureCode:
    """The coefficients of the parities: parity i is the sum of `rows[i][j]` times data block j.

    Blocks of a stripe are numbered: the data blocks from 0, the parities from k.
    """

    rows: Rows

    def __post_init__(self) -> None:
        k, m = len(self.rows[0]) if self.rows else 0, len(self.rows)
        whole = all(len(row) == k for row in self.rows)
        if not (k and whole and all(isinstance(c, int) and 0 < c <= ORDER for row in self.rows for c in row)):
            raise NoErasureCode("the coefficients of an erasure code are rows of as many numbers from 1 to 255")
        _check(k, m)

    @classmethod
    def cauchy(cls, k: int, m: int) -> ErasureCode:
        """Returns the code that is used for k data blocks and m parities."""
        _check(k, m)
        return cls(_cauchy_rows(k, m))

    @classmethod
    def from_json(cls, rows: object) -> ErasureCode:
        """Returns the code of rows that were kept as JSON."""
        if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
            raise NoErasureCode("an erasure code is kept as a list of rows")
        return cls(tuple(map(tuple, rows)))

    @property
    def k(self) -> int:
        """Returns the number of data blocks in a stripe."""
        return len(self.rows[0])

    @property
    def m(self) -> int:
        """Returns the number of parities, and of blocks that may be lost."""
        return len(self.rows)

    def column(self, index: int) -> Row:
        """Returns the coefficients of one data block in all parities."""
        return tuple(row[index] for row in self.rows)

    def restoring(self, lost: Collection[int], absent: Collection[int] = ()) -> Restoration:
        """Returns how the lost blocks follow from the others. Raises TooMuchLost if they do not.

        Raises NoErasureCode if the coefficients, read from elsewhere, do not allow it.
        `absent` data blocks do not exist: they are zeros, nobody has them, and they cannot be lost.
        """
        return _restoration(self, tuple(sorted(set(lost))), frozenset(absent))


def _check(k: int, m: int) -> None:
    if k < 1 or m < 1 or k + m > MOST_BLOCKS:
        raise NoErasureCode(f"{k}+{m} is no erasure code: at least 1+1 blocks, and {MOST_BLOCKS} at most")


@lru_cache(maxsize=64)
def _cauchy_rows(k: int, m: int) -> Rows:
    """Makes a Cauchy matrix, element 1 / (x_i + y_j), whose rows and columns are scaled so that the first ones are 1.

    Every square part of such a matrix has an inverse, whatever distinct numbers x and y are. The x are 0 to m - 1; the
    y are chosen so that the elements have few and low bits, since each bit costs the numpy kernel a pass over a block.
    With two parities the second row becomes 1, 2, 3, 4, ...
    """
    x = np.arange(m)[:, None]
    y = np.arange(m, MOST_BLOCKS)
    logarithms, powers = np.array(LOGARITHMS), np.array(POWERS)
    unscaled = (logarithms[y] - logarithms[x ^ y]) % ORDER
    best: tuple[tuple[int, int], Rows] | None = None
    for first in range(len(y)):
        elements = powers[(unscaled - unscaled[:, first : first + 1]) % ORDER]
        highest = elements.max(axis=0)
        bits = np.unpackbits(elements.astype(np.uint8)[:, :, None], axis=2).sum(axis=(0, 2), dtype=np.int64)
        order = np.lexsort((highest, bits, np.frexp(highest)[1]))
        chosen = [first, *order[order != first][: k - 1]]
        cost = (int(highest[chosen].max()).bit_length(), int(bits[chosen].sum()))
        if best is None or cost < best[0]:
            best = cost, tuple(tuple(map(int, row)) for row in elements[:, chosen])
    if best is None:
        raise AssertionError("k is at least 1")
    return best[1]


@lru_cache(maxsize=4096)
def _restoration(code: ErasureCode, lost: tuple[int, ...], absent: frozenset[int]) -> Restoration:
    k, m = code.k, code.m
    data = [block for block in lost if block < k]
    parities = [row for row in range(m) if k + row not in lost][: len(data)]
    if len(parities) < len(data):
        names = ", ".join(f"data {block}" if block < k else f"parity {block - k}" for block in lost)
        blocks = format_number(k + m - len(absent), "block")
        what = f"{len(lost)} of {blocks} of a stripe are gone ({names}); {format_number(m, 'parity', 'parities')}"
        raise TooMuchLost(f"{what} can restore {m}", "restore an older generation or the drained copy")
    known = [block for block in range(k) if block not in lost and block not in absent]
    # Each parity that is used, less what the known data contribute to it, is a sum of the lost data alone.
    try:
        of_lost = inverted([tuple(code.rows[row][block] for block in data) for row in parities])
    except ZeroDivisionError as error:
        raise NoErasureCode("the coefficients that were kept cannot restore every loss") from error
    rest = [
        (*(code.rows[row][block] for block in known), *(int(row == other) for other in parities)) for row in parities
    ]
    restored = times(of_lost, rest) if data else ()
    again = [_encoded_again(code.rows[block - k], data, known, restored, len(parities)) for block in lost if block >= k]
    return Restoration(lost, (*known, *(k + row for row in parities)), (*restored, *again))


def _encoded_again(row: Row, data: list[int], known: list[int], restored: Rows, parities: int) -> Row:
    """Returns a lost parity's row over the sources: from known data directly, from lost data by what restores them."""
    direct = (*(row[block] for block in known), *(0 for _ in range(parities)))
    if not data:
        return direct
    (by_lost,) = times([tuple(row[block] for block in data)], restored)
    return tuple(a ^ b for a, b in zip(direct, by_lost, strict=True))
