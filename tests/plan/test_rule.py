"""The rule by which large files are copied beside programs that read them."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from hpcstage.plan.rule import (
    CHUNK_NS,
    FOLLOWED_BYTES,
    LEAST_CHUNK_BYTES,
    MOST_AHEAD_BYTES,
    MOST_CHUNK_BYTES,
    Aside,
    FileReads,
    Front,
    set_aside,
)

MB = 1 << 20
SIZES = st.integers(0, 1 << 40)
READS = st.builds(
    FileReads,
    size_bytes=SIZES,
    read_bytes=SIZES,
    faults_bytes=SIZES,
    jumped_bytes=st.integers(0, 1 << 30),
    fronts=st.lists(st.builds(Front, SIZES, st.integers(0, 1 << 30)), max_size=4).map(tuple),
    ahead_bytes=st.integers(0, MOST_AHEAD_BYTES),
)


@given(READS)
def test_what_follows_a_reader_is_right_ahead_of_it(reads: FileReads) -> None:
    """As much as it has read in a row, and nothing where a run as long has ended with a jump."""
    followed = [front for front in reads.fronts if front.run > max(FOLLOWED_BYTES, reads.jumped_bytes)]
    allowed = [(front.at, min(front.run, MOST_AHEAD_BYTES)) for front in followed] + [(0, reads.ahead_bytes)]
    for window in reads.windows():
        assert 0 <= window.start < window.stop <= reads.size_bytes
        assert any(window.start == at and window.stop <= at + most for at, most in allowed)
    most = max((at + most - reads.size_bytes for at, most in allowed if most), default=0)
    assert reads.beyond_bytes == most


def test_a_jump_ends_the_following_and_each_length_of_a_run_costs_once() -> None:
    run = Front(20 * MB, 10 * MB)
    assert FileReads(100 * MB, fronts=(run,)).windows() == [range(20 * MB, 30 * MB)]
    assert FileReads(100 * MB, fronts=(Front(20 * MB, FOLLOWED_BYTES),)).windows() == []
    assert FileReads(100 * MB, jumped_bytes=10 * MB, fronts=(run,)).windows() == []
    assert FileReads(100 * MB, jumped_bytes=9 * MB, fronts=(run,)).windows() != []


def test_what_follows_goes_past_the_end_of_the_file() -> None:
    reads = FileReads(100 * MB, fronts=(Front(70 * MB, 70 * MB),))
    assert reads.windows() == [range(70 * MB, 100 * MB)]
    assert reads.beyond_bytes == 34 * MB
    assert FileReads(34 * MB, ahead_bytes=40 * MB).windows() == [range(34 * MB)]


def test_credit() -> None:
    assert FileReads(9, read_bytes=3, faults_bytes=4).credit_bytes == 14


@given(st.dictionaries(st.integers(0, 9), st.integers(-9, 9)), st.none() | st.integers(0, 9), st.integers(1, 9))
def test_one_file_stands_aside_until_it_has_no_credit(credits: dict[int, int], now: int | None, least: int) -> None:
    found = set_aside(credits, now, least)
    if now is not None and credits.get(now, 0) > 0:
        assert found == now
    elif found is None:
        assert all(credit < least for credit in credits.values())
    else:
        assert credits[found] == max(credits.values()) >= least


@given(
    st.lists(
        st.tuples(st.integers(0, 50_000_000), st.booleans(), st.integers(1, 80_000_000), st.floats(0, 1)), max_size=60
    )
)
def test_what_stands_aside_takes_no_more_time_than_programs_left(steps: Iterable[tuple[int, bool, int, float]]) -> None:
    """`steps`: for how long the node was quiet, whether it is now, what a chunk takes that begins now, and for which
    part of that the node was quiet."""
    aside, quiet_ns, taken_ns, last_ns, chunks = Aside(), 0, 0, 0, 0
    for left_ns, is_quiet, took_ns, part in steps:
        quiet_ns += left_ns
        if not aside.may_begin(quiet_ns, is_quiet=is_quiet):
            continue
        assert is_quiet
        size_bytes = aside.chunk_bytes
        assert LEAST_CHUNK_BYTES <= size_bytes <= MOST_CHUNK_BYTES
        assert size_bytes % LEAST_CHUNK_BYTES == 0
        aside.begins(quiet_ns)
        quiet_ns += int(took_ns * part)
        aside.ended(size_bytes, took_ns)
        taken_ns, last_ns, chunks = taken_ns + took_ns, took_ns, chunks + 1
        assert taken_ns <= quiet_ns + last_ns, "all but the last chunk was earned"
        assert aside.chunk_bytes <= 2 * size_bytes


@given(st.integers(64 << 10, 1 << 30))
def test_a_chunk_comes_to_take_as_long_as_it_is_to(bytes_per_s: int) -> None:
    aside = Aside()
    for _ in range(20):
        aside.ended(aside.chunk_bytes, aside.chunk_bytes * 1_000_000_000 // bytes_per_s)
    is_smallest, is_largest = (aside.chunk_bytes == limit for limit in (LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES))
    took_ns = aside.chunk_bytes * 1_000_000_000 // bytes_per_s
    assert is_smallest or took_ns <= CHUNK_NS
    assert is_largest or took_ns + LEAST_CHUNK_BYTES * 1_000_000_000 // bytes_per_s >= CHUNK_NS
