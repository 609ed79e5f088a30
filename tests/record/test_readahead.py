"""Read-ahead: what computing between the reads of a file costs beside a source, in the model and in the estimate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordcases import SECOND, composed, looped, run_part

from hpcstage.record.figures.readahead import PLAYED, WINDOW_BYTES, Pieces

KB = 1024
SIZES = st.integers(1, 10**8)


@given(SIZES, st.floats(1, 5000), st.floats(0, 10), st.floats(0, 10))
def test_no_more_is_hidden_than_is_computed_or_read(size: int, reads: float, within_s: float, read_s: float) -> None:
    hidden = Pieces(size, reads, within_s).hidden_s(read_s)
    assert 0 <= hidden.low <= hidden.high <= min(within_s, read_s) + 1e-9


def test_reads_of_unknown_size_hide_nothing() -> None:
    assert Pieces(0, 10, 1).hidden_s(1).high == 0


@given(st.integers(1, WINDOW_BYTES), st.floats(0, 10), st.floats(0, 10))
def test_of_a_file_that_is_one_window_the_kernel_hides_nothing_for_certain(
    size: int, within_s: float, read_s: float
) -> None:
    assert Pieces(size, 1, within_s).hidden_s(read_s).high == 0
    assert Pieces(size, 2, within_s).hidden_s(read_s).low <= 0.75 * min(within_s, read_s) + 1e-9


@pytest.mark.parametrize("pieces", [10, PLAYED // 2, 40 * PLAYED])
def test_of_a_long_file_nearly_all_is_hidden(pieces: int) -> None:
    for within_s in (0.5, 1.0, 4.0):
        hidden = Pieces(pieces * 64 * KB, pieces, within_s).hidden_s(1.0)
        most_s = min(within_s, 1.0)
        assert most_s * (0.998 - 4 / pieces) <= hidden.low <= hidden.high <= most_s


def test_windows_double_from_a_few_pieces_to_the_largest() -> None:
    """Pieces of 8 kB: 16 kB, of which 8 remain when the next 32 are asked for, then 64, 128, and 16 at the end. Each kB
    takes 1 ms at the source, and 1 ms is computed on it."""
    hidden = Pieces(256 * KB, 32, 0.248).hidden_s(0.256)
    computed_while_windows_came_s = 0.008, 0.032, 0.064, 0.016
    assert hidden.low == pytest.approx(sum(computed_while_windows_came_s))
    assert hidden.high == pytest.approx(0.256 - 0.016)


def estimate(**counters: Any) -> dict[str, Any]:
    """That of a loop over 200 files of 500 kB that computes for 10 s; a file takes 22.5 ms at the source."""
    node = looped()
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
