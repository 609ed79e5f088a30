"""The pure parts of generations: the choice of a kind, blocks and their predecessors, hashes, differences."""

from __future__ import annotations

import io
import os
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numpy", reason="needs the extra `checkpoint`")
pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")

import numpy as np

from hpcstage.checkpoint.generations import xor
from hpcstage.checkpoint.generations.choice import GenerationPolicy, Measurement, choose
from hpcstage.checkpoint.generations.files import Files
from hpcstage.checkpoint.generations.layout import BLOCK_BYTES, BlockLayout, NamedFile, bases, predecessors
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.checkpoint.generations.parts import parts_of
from hpcstage.checkpoint.generations.table import find, first_alike
from hpcstage.checkpoint.generations.xor import ProbedXor

FULL, DELTA, XOR = GenerationKind.FULL, GenerationKind.DELTA, GenerationKind.XOR


def slow_disk(changed_bytes: int, xor: ProbedXor) -> Measurement:
    """A state of 1 GB, and a disk that takes 300 MB in a second."""
    return Measurement(10**9, changed_bytes, xor, written_bytes_per_s=3e8)


@pytest.mark.parametrize(
    ("measured", "kind", "reason"),
    [
        (Measurement(100, None, None), FULL, "there is no generation before"),
        (Measurement(100, None, None, hindrance="it is damaged"), FULL, "it is damaged"),
        (Measurement(1000, 42, None), DELTA, "4 % of the state changed"),
        (Measurement(1000, 900, None), DELTA, "90 % of the state changed"),
        (Measurement(1000, 901, None), FULL, "90 % of the state changed"),
        (
            Measurement(1000, 1000, ProbedXor(0.7, 4)),
            XOR,
            "100 % of the state changed, the differences compress to 70",
        ),
        (Measurement(1000, 1000, ProbedXor(0.95, 4)), FULL, "compress to 95 % of it, which saves too little"),
        (Measurement(1000, 42, ProbedXor(0.1, 4)), DELTA, "compress to 10 % of it, which saves too little"),
        (Measurement(1000, 300, ProbedXor(0.2, 4)), DELTA, "compress to 20 % of it, which saves too little"),
        (Measurement(1000, 300, ProbedXor(0.1, 4)), XOR, "30 % of the state changed"),
        (Measurement(1000, 42, None, 17), FULL, "a restore would need more than 16 older generations"),
        (Measurement(1000, 42, None, 16), DELTA, "4 % of the state changed"),
        (Measurement(1000, 500, None, 3, 2501), FULL, "a restore would read 3 kB, more than 3 times the state"),
        (Measurement(1000, 500, None, 3, 2500), DELTA, "50 % of the state changed"),
        (Measurement(1000, 500, ProbedXor(0.5, 4), 3, 2700), XOR, "50 % of the state changed"),
        (Measurement(0, 0, None), DELTA, "0 % of the state changed"),
        (slow_disk(10**9, ProbedXor(0.1, 4, 2e-9)), XOR, "the differences compress to 10 % of it"),
        (slow_disk(10**9, ProbedXor(0.1, 4, 4e-9)), FULL, "compress to 10 % of it, which takes 4 s and saves 3 s of w"),
        (
            slow_disk(10**9 // 2, ProbedXor(0.1, 4, 4e-9)),
            DELTA,
            "10 % of it, which takes 2 s and saves 1.5 s of writing",
        ),
        (slow_disk(10**9, ProbedXor(0.9, 4, 1e-12)), FULL, "compress to 90 % of it, which saves too little"),
    ],
)
def test_the_kind_follows_from_what_was_measured(measured: Measurement, kind: GenerationKind, reason: str) -> None:
    found = choose(measured, GenerationPolicy())
    assert (found.kind, reason in found.reason) == (kind, True), found.reason
    assert found.width == (4 if kind is XOR else 0)


def test_a_kind_that_was_asked_for_is_taken_within_the_bounds() -> None:
    measured = Measurement(1000, 1000, ProbedXor(0.99, 2))
    for kind in GenerationKind:
        assert choose(measured, GenerationPolicy(always=kind)).kind is kind
    long = Measurement(1000, 1000, ProbedXor(0.99, 2), chain_length=17)
    assert choose(long, GenerationPolicy(always=XOR)).kind is FULL


@given(st.lists(st.lists(st.integers(0, 50), max_size=4).map(tuple), max_size=8), st.integers(1, 16))
def test_blocks_cover_their_files(files: list[tuple[int, ...]], block_bytes: int) -> None:
    layout = BlockLayout(block_bytes, tuple(files))
    assert layout.count == len(layout.lengths) == len(layout.offsets)
    for file, parts in enumerate(files):
        expected = [
            (sum(parts[:number]) + offset, min(block_bytes, size - offset))
            for number, size in enumerate(parts)
            for offset in range(0, size, block_bytes)
        ]
        found = [(int(layout.offsets[block]), int(layout.lengths[block])) for block in layout.blocks(file)]
        assert found == expected
        assert all(layout.file_of(block) == file for block in layout.blocks(file))


def test_a_file_continues_that_of_its_name_or_the_newest_that_differs_in_numbers() -> None:
    before = [
        NamedFile("step_9/w", 10, 1),
        NamedFile("step_10/w", 10, 2),
        NamedFile("step_10/v", 11, 3),
        NamedFile("step_11/w", 12, 3),
        NamedFile("last", 10, 3),
    ]
    asked = [
        NamedFile("last", 99, 9),
        NamedFile("step_9/w", 10, 9),
        NamedFile("step_12/w", 10, 9),
        NamedFile("step_12/w", 13, 9),
        NamedFile("step_12/u", 10, 9),
    ]
    assert predecessors(asked, before) == [4, 0, 1, 3, None]


def test_bases_stand_at_the_same_place() -> None:
    layout, before = BlockLayout(10, ((25,), (5,), (30,))), BlockLayout(10, ((5,), (40,), (12,)))
    assert bases(layout, before, [1, None, 2]).tolist() == [1, 2, 3, -1, 5, 6, -1]
    longer, shorter = BlockLayout(10, ((25, 20, 3),)), BlockLayout(10, ((15, 20, 3, 7),))
    assert bases(longer, shorter, [0]).tolist() == [0, 1, -1, 2, 3, 4], "parts in their order"


def made_archive() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("small", b"x" * 100)
        file.writestr("large", b"y" * (BLOCK_BYTES + 3))
        file.writestr("larger", b"z" * (2 * BLOCK_BYTES))
    return content.getvalue()


ARCHIVE = made_archive()


def parts_in(content: bytes) -> tuple[int, ...]:
    fd = os.memfd_create("archive")
    try:
        os.write(fd, content)
        return parts_of(Files(), fd, len(content))
    finally:
        os.close(fd)


def test_large_records_of_an_archive_are_parts() -> None:
    found = parts_in(ARCHIVE)
    assert (len(found), found[1], found[3], sum(found)) == (5, BLOCK_BYTES + 3, 2 * BLOCK_BYTES, len(ARCHIVE))
    assert ARCHIVE[found[0] :].startswith(b"yyy")
    assert ARCHIVE[: found[0]].endswith(b"large")
    assert parts_in(bytes(len(ARCHIVE))) == ()
    assert parts_in(ARCHIVE[: BLOCK_BYTES // 2]) == ()


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400), st.integers(0, 255)), max_size=6), st.integers(0, 200))
def test_a_damaged_archive_costs_nothing_but_its_parts(changes: list[tuple[int, int]], cut: int) -> None:
    content = bytearray(ARCHIVE)
    for from_the_end, value in changes:
        content[-from_the_end] = value
    content = content[: len(content) - cut]
    found = parts_in(bytes(content))
    assert min(found, default=1) > 0
    assert sum(found) in (0, len(content))


words = st.tuples(st.integers(0, 5), st.integers(0, 1))


@given(st.lists(words), st.lists(words, unique_by=lambda pair: pair[0]))
def test_hashes_are_found_again(asked: list[tuple[int, int]], known: list[tuple[int, int]]) -> None:
    found = find(np.array(asked, np.uint64).reshape(-1, 2), np.array(known, np.uint64).reshape(-1, 2))
    assert found.tolist() == [known.index(pair) if pair in known else -1 for pair in asked]


@given(st.lists(words), st.data())
def test_blocks_of_one_content_stand_for_each_other(hashes: list[tuple[int, int]], data: st.DataObject) -> None:
    among = data.draw(st.lists(st.booleans(), min_size=len(hashes), max_size=len(hashes)))
    alike = first_alike(np.array(hashes, np.uint64).reshape(-1, 2), np.array(among, bool)).tolist()
    for block, first in enumerate(alike):
        assert hashes[block] == hashes[first]
        assert first == block or (among[block] and among[first])
        assert first == alike[first]


@pytest.mark.skipif(not xor.available(), reason=xor.MISSING)
@given(st.binary(max_size=200), st.binary(max_size=200), st.sampled_from(xor.WIDTHS))
def test_a_difference_gives_the_block_back(block: bytes, base: bytes, width: int) -> None:
    new, old = np.frombuffer(block, np.uint8), np.frombuffer(base, np.uint8)
    made = np.empty(len(new), np.uint8)
    xor.decode(xor.BlockEncoder(width).encode(new, old), old, width, made)
    assert made.tobytes() == block


@pytest.mark.skipif(not xor.available(), reason=xor.MISSING)
def test_the_probe_finds_the_width_of_the_words() -> None:
    values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    moved = values * np.float32(1 + 2**-16)
    found = xor.probe([values.view(np.uint8)], [moved.view(np.uint8)])
    assert found is not None
    assert 1e-12 < found.seconds_per_byte < 1e-4
    assert found.width == 4
    assert found.share < 0.5
    assert xor.probe([], []) is None


@pytest.mark.skipif(not xor.available(), reason=xor.MISSING)
def test_what_is_no_difference_of_the_block_is_refused() -> None:
    base = np.zeros(8, np.uint8)
    for stored in (b"", b"no frame", xor.BlockEncoder(1).encode(base[:5], base[:5])):
        with pytest.raises(xor.UndecodableBlock):
            xor.decode(stored, base, 1, base.copy())
