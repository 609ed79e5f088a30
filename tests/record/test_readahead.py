"""Read-ahead: what computing between the reads of a file costs beside a source, in the model and in the estimate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordcases import SECOND, composed, looped, run_part

from hpcstage.record.figures.readahead import (
    COPY_READ_BYTES,
    FEW_READS,
    MOST_PLAYED,
    NOTHING,
    WINDOW_BYTES,
    Pieces,
    WholeRead,
)
from hpcstage.store import copyfile

KB = 1024
COPY_C = Path(copyfile.__file__).with_name("_copy.c")
SIZES = st.integers(1, 10**8)
TIMES = st.floats(0, 10)


def test_copies_read_as_much_at_a_time_as_the_estimate_says() -> None:
    assert copyfile.CHUNK_BYTES == COPY_READ_BYTES
    if COPY_C.exists():
        assert f"#define BUFFER_BYTES (1 << {COPY_READ_BYTES.bit_length() - 1})\n" in COPY_C.read_text()


@given(SIZES, st.floats(1, 5000), TIMES, TIMES)
def test_no_more_is_hidden_than_is_computed_or_read(size: int, reads: float, within_s: float, read_s: float) -> None:
    added = Pieces(size, reads, within_s).added_s(WholeRead(read_s))
    assert -min(within_s, read_s) - 1e-9 <= added.low <= added.high <= 1e-9


@given(SIZES, st.floats(1, 5000), TIMES, TIMES, TIMES, TIMES)
def test_no_more_is_added_than_a_request_for_each_window(
    size: int, reads: float, within_s: float, read_s: float, open_s: float, waiting_s: float
) -> None:
    """The first windows are of 16, 32 and 64 kB, and the last one is a rest. One open is added for the attributes."""
    whole = WholeRead(read_s, open_s, min(waiting_s, read_s))
    added = Pieces(size, reads, within_s, descriptors=2.0).added_s(whole)
    assert added.high - added.low <= (5 + size / WINDOW_BYTES) * read_s + within_s + open_s + 1e-9
    slowest_s = max(open_s, whole.waiting_s)
    assert added.high <= (5 + size / WINDOW_BYTES) * slowest_s + open_s + 1e-6 * read_s + 1e-9


@given(SIZES, st.floats(1, 5000), TIMES, TIMES, TIMES)
def test_a_window_that_is_known_is_within_what_is_possible_where_it_is_not(
    size: int, reads: float, within_s: float, read_s: float, open_s: float
) -> None:
    whole = WholeRead(read_s, open_s)
    known = Pieces(size, reads, within_s).added_s(replace(whole, window_bytes=WINDOW_BYTES))
    unknown = Pieces(size, reads, within_s).added_s(whole)
    assert unknown.low - 1e-6 * (read_s + within_s) - 1e-9 <= known.low <= known.high
    assert known.high <= unknown.high + 1e-6 * (read_s + within_s) + 1e-9
    if reads >= FEW_READS:
        assert known.low == known.high


def test_of_larger_windows_parts_may_arrive_before_the_rest() -> None:
    pieces, whole = Pieces(8 << 20, 128, 0.5), WholeRead(1.0, 0.01)
    assert pieces.added_s(replace(whole, window_bytes=4096 * KB)) == pieces.added_s(whole)


def test_reads_of_unknown_size_add_nothing() -> None:
    assert Pieces(0, 10, 1).added_s(WholeRead(1, 1)) == NOTHING


@given(st.integers(1, WINDOW_BYTES), TIMES, TIMES)
def test_of_a_file_that_is_one_window_the_kernel_hides_nothing_for_certain(
    size: int, within_s: float, read_s: float
) -> None:
    assert Pieces(size, 1, within_s).added_s(WholeRead(read_s, 1)) == NOTHING
    assert Pieces(size, 2, within_s).added_s(WholeRead(read_s)).high >= -0.97 * min(within_s, read_s) - 1e-9


@pytest.mark.parametrize("pieces", [10, MOST_PLAYED // 2, 40 * MOST_PLAYED])
def test_of_a_long_file_nearly_all_is_hidden(pieces: int) -> None:
    for within_s in (0.5, 1.0, 4.0):
        added = Pieces(pieces * 64 * KB, pieces, within_s).added_s(WholeRead(1.0))
        most_s = min(within_s, 1.0)
        assert most_s * (0.998 - 4 / pieces) <= -added.high <= -added.low <= most_s


def test_windows_double_from_a_few_pieces_to_the_largest() -> None:
    """Pieces of 8 kB: 16 kB, of which 8 remain when the next 32 are asked for, then 64, 128, and 16 at the end. Each kB
    takes 1 ms at the source, and 1 ms is computed on it."""
    added = Pieces(256 * KB, 32, 0.248).added_s(WholeRead(0.256))
    computed_while_windows_came_s = 0.008, 0.032, 0.064, 0.016
    assert -added.high == pytest.approx(sum(computed_while_windows_came_s))
    assert -added.low == pytest.approx(0.256 - 0.016)


@pytest.mark.parametrize(
    ("size", "at_once", "small_first", "pieces_of_16_kb"),
    [
        (100_000, 1, 2, 2),
        (131_072, 1, 3, 2),
        (200_000, 2, 3, 2),
        (262_144, 2, 3, 3),
        (400_000, 3, 4, 3),
        (524_288, 3, 4, 4),
        (800_000, 4, 5, 5),
        (1_000_128, 5, 6, 5),
        (1_048_576, 5, 6, 6),
        (1_200_000, 6, 7, 6),
    ],
)
def test_requests_that_a_reader_waits_for_in_turn(
    size: int, at_once: int, small_first: int, pieces_of_16_kb: int
) -> None:
    """The numbers were measured with Linux 6.18 at a file system of FUSE each of whose requests takes 8 ms."""
    whole = WholeRead(read_s=0.008 * at_once, open_s=0.008)
    small, even = Pieces(size, 2), Pieces(size, size / (16 * KB))
    assert whole.read_s + small.added_s(whole).high == pytest.approx(0.008 * small_first)
    assert whole.read_s + even.added_s(whole).high == pytest.approx(0.008 * pieces_of_16_kb)


def test_where_bytes_take_the_time_small_windows_add_little() -> None:
    added = Pieces(1_000_000, 2).added_s(WholeRead(read_s=0.05, open_s=0.0002))
    assert 0 < added.high <= 0.0002


def test_requests_that_take_longer_than_opens_show_in_what_the_bytes_do_not_explain() -> None:
    added = Pieces(1_000_000, 2).added_s(WholeRead(read_s=0.05, open_s=0.0002, waiting_s=0.05))
    assert added.high == pytest.approx(0.01, rel=1e-4)


def test_a_file_that_is_read_through_a_second_descriptor_may_cost_a_request_for_its_attributes() -> None:
    """numpy reads the header of an array through one descriptor, and the rest through another."""
    one, two = (estimate(local_reads=400, first_ns=SECOND, **more) for more in ({"within_ns": 1}, {}))
    assert two["inputs"]["low_s"] == pytest.approx(one["inputs"]["low_s"])
    assert two["inputs"]["high_s"] == pytest.approx(one["inputs"]["high_s"] + 200 * 0.0025)


def test_where_requests_take_most_of_the_time_of_files_in_parts_nothing_is_said() -> None:
    far = {"files": 8, "bytes": 8 * 500_000, "open_ns": 8 * SECOND // 50, "read_ns": 8 * SECOND * 4 // 100}
    assert estimate(alone=far, local_reads=200)["saved_s"] is not None
    nothing = estimate(alone=far, local_reads=400)
    assert nothing["saved_s"] is None
    assert "reads ahead of a program that reads its files in parts" in nothing["reason"]


def estimate(alone: dict[str, int] | None = None, **counters: Any) -> dict[str, Any]:
    """That of a loop over 200 files of 500 kB that computes for 10 s; a file takes 22.5 ms at the source."""
    node = looped(**({"alone": alone} if alone else {}))
    own = {"hit_opens": 200, "local_reads": 200, "blocked_ns": SECOND, "blocked_source_ns": SECOND}
    node.processes[0].counters |= own | {"last_ns": 12 * SECOND, "exit_ns": 12 * SECOND} | counters
    datasets = [replace(node.datasets[0], files=200, staged_files=200)]
    record = composed(
        run_part(child_ended_s=counters.get("exit_ns", 12 * SECOND) / SECOND + 0.2), [replace(node, datasets=datasets)]
    )
    found: dict[str, Any] = record["savings"]["vs_direct"]
    return found


def test_what_is_computed_between_the_reads_of_a_file_hides_its_reading() -> None:
    in_turn = estimate()
    assert in_turn["inputs"]["low_s"] == pytest.approx(12 - 1 + 200 * 0.0225, rel=0.02)
    ahead = estimate(local_reads=200 * 61, within_ns=9 * SECOND)
    assert ahead["saved_s"] is not None
    least_s, most_s = (ahead["inputs"][name] for name in ("low_s", "high_s"))
    assert least_s < most_s < in_turn["inputs"]["low_s"] - 2
    assert least_s == pytest.approx(12 - 1 + 200 * 0.0225 - 200 * 0.02 * (1 - 32 / 500), rel=0.02)


def test_where_the_windows_decide_how_much_is_hidden_nothing_is_said() -> None:
    """Files of a little more than one window: from nothing to most of the reading."""
    wide = estimate(local_reads=400, within_ns=4 * SECOND, first_ns=SECOND, last_ns=6 * SECOND, exit_ns=6 * SECOND)
    assert wide["saved_s"] is None
    assert "reads ahead" in wide["reason"]


def test_a_program_that_jumps_within_its_files_waits_longer_than_for_reading_in_order() -> None:
    few = estimate(local_reads=200 * 8, jumps=20)
    assert few["inputs"]["low_s"] == pytest.approx(12 - 1 + 200 * 0.0225, rel=0.02)
    assert few["inputs"]["high_s"] == pytest.approx(few["inputs"]["low_s"] + 20 * 0.02 / (500 / 131), rel=0.02)
    many = estimate(local_reads=200 * 8, jumps=200 * 7)
    assert many["saved_s"] is None
    assert "out of order" in many["reason"]
