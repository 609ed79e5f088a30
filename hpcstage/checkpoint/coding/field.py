"""Arithmetic of GF(256) on single numbers and on small matrices; blocks of bytes are the kernels' part.

The field is that of the polynomial x^8 + x^4 + x^3 + x^2 + 1, as in ISA-L. Addition and subtraction are both XOR.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import xor

POLYNOMIAL = 0x11D
ORDER = 255
"""The number of elements other than 0; they are the powers of 2."""
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
