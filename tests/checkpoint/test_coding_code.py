"""The matrices: every square part has an inverse, any m lost blocks follow from the others, more are refused."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.checkpoint.coding import erasurecode as field
from hpcstage.checkpoint.coding.erasurecode import ErasureCode, NoErasureCode, TooMuchLost

CODES = [(2, 1), (4, 2), (8, 2), (8, 3), (6, 4)]


def by_definition(a: int, b: int) -> int:
    """A product of polynomials, reduced."""
    product = 0
    for bit in range(8):
        product ^= (a << bit) * (b >> bit & 1)
    for bit in range(15, 7, -1):
        product ^= (field.POLYNOMIAL << bit - 8) * (product >> bit & 1)
    return product


def test_products_are_those_of_the_field() -> None:
    for a in range(256):
        for b in range(a, 256):
            assert field.multiply(a, b) == field.multiply(b, a) == by_definition(a, b)
    assert all(field.multiply(a, field.inverse(a)) == 1 for a in range(1, 256))
    with pytest.raises(ZeroDivisionError):
        field.inverse(0)


@pytest.mark.parametrize(("k", "m"), CODES)
def test_every_square_part_has_an_inverse(k: int, m: int) -> None:
    rows = ErasureCode.cauchy(k, m).rows
    for size in range(1, min(k, m) + 1):
        for chosen in combinations(rows, size):
            for columns in combinations(range(k), size):
                part = [tuple(row[j] for j in columns) for row in chosen]
                unit = tuple(tuple(int(i == j) for j in range(size)) for i in range(size))
                assert field.times(part, field.inverted(part)) == unit


def test_a_matrix_without_an_inverse_is_found() -> None:
    with pytest.raises(ZeroDivisionError):
        field.inverted([(1, 2), (2, 4)])


@pytest.mark.parametrize(("k", "m"), [*CODES, (1, 1), (1, 5), (16, 3), (200, 56), (254, 2), (1, 255), (255, 1)])
def test_a_code_has_the_asked_size(k: int, m: int) -> None:
    code = ErasureCode.cauchy(k, m)
    assert (code.k, code.m) == (k, m)


def assert_restores(code: ErasureCode, lost: set[int], absent: frozenset[int] = frozenset()) -> None:
    """The lost data blocks follow from the blocks that are there, and a row of the parities follows from the data."""
    k, m = code.k, code.m
    whole = [*(tuple(int(i == j) for j in range(k)) for i in range(k)), *code.rows]
    data = sorted(block for block in lost if block < k)
    sources, rows = code.restoring(data, set(range(k + m)) - lost - absent)
    assert not set(sources) & (lost | absent)
    assert len(sources) == k - len(absent)
    existing = [j for j in range(k) if j not in absent]
    found = field.times(rows, [whole[block] for block in sources])
    assert [[row[j] for j in existing] for row in found] == [[whole[block][j] for j in existing] for block in data]


@pytest.mark.parametrize(("k", "m"), CODES)
def test_restoration_is_the_inverse_of_coding(k: int, m: int) -> None:
    for size in range(m + 1):
        for lost in combinations(range(k + m), size):
            assert_restores(ErasureCode.cauchy(k, m), set(lost))


@pytest.mark.parametrize(("k", "m"), CODES)
def test_more_than_m_are_refused(k: int, m: int) -> None:
    code = ErasureCode.cauchy(k, m)
    for lost in combinations(range(k + m), m + 1):
        data = [block for block in lost if block < k]
        if data:
            with pytest.raises(TooMuchLost):
                code.restoring(data, set(range(k + m)) - set(lost))


@given(st.integers(1, 40), st.integers(1, 8), st.data())
def test_any_code_survives_json(k: int, m: int, data: st.DataObject) -> None:
    code = ErasureCode.cauchy(k, m)
    assert ErasureCode.from_json(json.loads(json.dumps(code.rows))) == code
    lost = data.draw(st.sets(st.integers(0, k + m - 1), max_size=m))
    absent = data.draw(st.sets(st.integers(0, k - 1), max_size=k - 1))
    assert_restores(code, lost - absent, frozenset(absent))


@pytest.mark.parametrize("rows", [None, [], [[]], [[1, 2], [1]], [[0]], [[256]], [["1"]], {}, [1], [[1] * 256]])
def test_what_is_no_code_is_refused(rows: object) -> None:
    with pytest.raises(NoErasureCode):
        ErasureCode.from_json(rows)


@pytest.mark.parametrize(("k", "m"), [(0, 1), (1, 0), (200, 57), (-1, 2)])
def test_impossible_codes_are_refused(k: int, m: int) -> None:
    with pytest.raises(NoErasureCode, match=rf"^{k}\+{m} is no erasure code"):
        ErasureCode.cauchy(k, m)


def test_coefficients_that_cannot_restore_are_no_code() -> None:
    with pytest.raises(NoErasureCode, match="cannot restore"):
        ErasureCode.from_json([[1, 2], [2, 4]]).restoring([0, 1], [2, 3])
