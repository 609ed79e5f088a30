"""The matrix of an erasure code: k data blocks and m parities, of which any k restore the others.

Owns the arithmetic of GF(256) on single numbers and small matrices, how the matrix is made, and how rows that restore
lost blocks follow from it; blocks of bytes are the kernel's part. The field is that of the polynomial
x^8 + x^4 + x^3 + x^2 + 1, as in ISA-L. Addition and subtraction are both XOR. The matrix is a part of what it protects
and is kept with it: libraries make different ones, and a later version of this module may, too.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import xor

from hpcstage.errors import HpcstageError

POLYNOMIAL = 0x11D
ORDER = 255
"""The number of elements other than 0; they are the powers of 2."""
MOST_BLOCKS = 256
"""The elements of the field: so many blocks a stripe can have, data and parities together."""
Row = tuple[int, ...]
Rows = tuple[Row, ...]


def _powers() -> list[int]:
    made = [1]
    while len(made) < 2 * ORDER:
        doubled = made[-1] << 1
        made.append(doubled ^ POLYNOMIAL if doubled > ORDER else doubled)
    return made


POWERS = tuple(_powers())
"""The powers of 2, twice round, so that the sum of two logarithms is an index."""
LOGARITHMS = tuple(POWERS.index(value) if value else 0 for value in range(ORDER + 1))
"""The logarithm of each element other than 0."""


def multiply(a: int, b: int) -> int:
    """Returns the product of two elements."""
    return POWERS[LOGARITHMS[a] + LOGARITHMS[b]] if a and b else 0


def inverse(a: int) -> int:
    """Returns the element whose product with this one is 1."""
    if not a:
        raise ZeroDivisionError("0 has no inverse in GF(256)")
    return POWERS[ORDER - LOGARITHMS[a]]


def dot(row: Sequence[int], column: Sequence[int]) -> int:
    """Returns the sum of the products of two rows' elements."""
    return reduce(xor, map(multiply, row, column), 0)


def times(left: Sequence[Row], right: Sequence[Row]) -> Rows:
    """Returns the product of two matrices."""
    columns = list(zip(*right, strict=True))
    return tuple(tuple(dot(row, column) for column in columns) for row in left)


def inverted(matrix: Sequence[Row]) -> Rows:
    """Returns the inverse of a square matrix. Raises a ZeroDivisionError if it has none."""
    size = len(matrix)
    rows = [[*row, *(int(i == j) for j in range(size))] for i, row in enumerate(matrix)]
    for column in range(size):
        pivot = next((i for i in range(column, size) if rows[i][column]), column)
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = inverse(rows[column][column])
        rows[column] = [multiply(scale, value) for value in rows[column]]
        for i in range(size):
            if i != column and (factor := rows[i][column]):
                rows[i] = [a ^ multiply(factor, b) for a, b in zip(rows[i], rows[column], strict=True)]
    return tuple(tuple(row[size:]) for row in rows)


class TooMuchLost(HpcstageError):
    """More data blocks of a stripe are gone than there are parities of it."""


class NoErasureCode(HpcstageError):
    """Numbers that were read, or asked for, are not those of an erasure code."""


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
        """Returns the code that is used for k data blocks and m parities: a Cauchy matrix, every square part of which
        has an inverse."""
        _check(k, m)
        return cls(tuple(tuple(inverse(parity ^ block) for block in range(m, m + k)) for parity in range(m)))

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

    def restoring(self, lost: Collection[int], known: Collection[int]) -> tuple[Row, Rows]:
        """Returns sources among the known blocks, and a row of coefficients for each lost data block, ascending: the
        block is the sum of the sources times these.

        A data block that is neither lost nor known does not exist and counts as zeros. Raises TooMuchLost, and
        NoErasureCode if the coefficients, read from elsewhere, do not allow it.
        """
        return _restoring(self, tuple(sorted(lost)), tuple(sorted(known)))


def _check(k: int, m: int) -> None:
    if k < 1 or m < 1 or k + m > MOST_BLOCKS:
        raise NoErasureCode(f"{k}+{m} is no erasure code: at least 1+1 blocks, and {MOST_BLOCKS} at most")


@lru_cache(maxsize=4096)
def _restoring(code: ErasureCode, lost: Row, known: Row) -> tuple[Row, Rows]:
    data, parities = [block for block in known if block < code.k], [block for block in known if block >= code.k]
    if len(lost) > len(parities):
        raise TooMuchLost(
            f"{len(lost)} data blocks of a stripe are gone, and {len(parities)} of its parities are there"
        )
    used = parities[: len(lost)]
    rows = [code.rows[parity - code.k] for parity in used]
    # Each parity that is used, less what the known data contribute to it, is a sum of the lost data alone.
    try:
        of_lost = inverted([tuple(row[block] for block in lost) for row in rows])
    except ZeroDivisionError as error:
        raise NoErasureCode("the coefficients that were kept cannot restore every loss") from error
    rest = [
        (*(row[block] for block in data), *(int(parity == other) for other in used))
        for parity, row in zip(used, rows, strict=True)
    ]
    return (*data, *used), times(of_lost, rest) if lost else ()
