"""The pure parts of generations: the choice of a kind, blocks, hashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numpy", reason="needs the extra `checkpoint`")
pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")

import numpy as np

from hpcstage.checkpoint.generations.layout import BlockLayout, find, first_alike
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.checkpoint.generations.terms import GenerationPolicy, choose

FULL, DELTA = GenerationKind.FULL, GenerationKind.DELTA


@pytest.mark.parametrize(
    ("measured", "kind", "reason"),
    [
        ((1000, 42, 0, 0), DELTA, "4 % of the state changed"),
        ((1000, 900, 0, 0), DELTA, "90 % of the state changed"),
        ((1000, 901, 0, 0), FULL, "90 % of the state changed"),
        ((1000, 42, 17, 0), FULL, "a restore would need more than 16 older generations"),
        ((1000, 42, 16, 0), DELTA, "4 % of the state changed"),
        ((1000, 500, 3, 2501), FULL, "a restore would read 3 kB, more than 3 times the state"),
        ((1000, 500, 3, 2500), DELTA, "50 % of the state changed"),
        ((0, 0, 0, 0), DELTA, "0 % of the state changed"),
    ],
)
def test_the_kind_follows_from_what_was_measured(
    measured: tuple[int, int, int, int], kind: GenerationKind, reason: str
) -> None:
    found = choose(GenerationPolicy(), *measured)
    assert (found.kind, reason in found.reason) == (kind, True), found.reason


def test_a_kind_that_was_asked_for_is_taken_within_the_bounds() -> None:
    for kind in GenerationKind:
        assert choose(GenerationPolicy(always=kind), 1000, 1000, 0, 0).kind is kind
    assert choose(GenerationPolicy(always=DELTA), 1000, 1000, 17, 0).kind is FULL


@given(st.lists(st.integers(0, 200), max_size=8), st.integers(1, 16))
def test_blocks_cover_their_files(files: list[int], block_bytes: int) -> None:
    layout = BlockLayout(block_bytes, tuple(files))
    assert layout.count == len(layout.lengths) == len(layout.offsets)
    for file, size in enumerate(files):
        expected = [(offset, min(block_bytes, size - offset)) for offset in range(0, size, block_bytes)]
        found = [(int(layout.offsets[block]), int(layout.lengths[block])) for block in layout.blocks(file)]
        assert found == expected
        assert all(layout.file_of(block) == file for block in layout.blocks(file))


words = st.tuples(st.integers(0, 5), st.integers(0, 1))


@given(st.lists(words), st.lists(words, unique_by=lambda pair: pair[0]))
def test_hashes_are_found_again(asked: list[tuple[int, int]], known: list[tuple[int, int]]) -> None:
    found = find(np.array(asked, np.uint64).reshape(-1, 2), np.array(known, np.uint64).reshape(-1, 2))
    assert found.tolist() == [known.index(pair) if pair in known else -1 for pair in asked]


@given(st.lists(words))
def test_blocks_of_one_content_stand_for_each_other(hashes: list[tuple[int, int]]) -> None:
    alike = first_alike(np.array(hashes, np.uint64).reshape(-1, 2)).tolist()
    for block, first in enumerate(alike):
        assert hashes[block] == hashes[first]
        assert first == alike[first] <= block
