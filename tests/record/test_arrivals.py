"""Bytes over time: where they came from the source, and how fast it was at most."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordcases import SECOND, composed, node_part, run_part

from hpcstage.record.figures.arrivals import arrived
from hpcstage.record.figures.speeds import of_reads
from hpcstage.record.parts.rows import Sample
from hpcstage.record.schema import Record
from hpcstage.report import figures

MB = 1_000_000
SAMPLE = st.builds(
    lambda size, files, each_ns, read, reads, read_ns: (size, files, files * each_ns, read, reads, reads * read_ns),
    st.integers(0, 10**9), st.integers(0, 50), st.integers(0, 5 * SECOND),
    st.integers(0, 10**8), st.integers(1, 50), st.integers(10**8, 5 * SECOND),
)  # fmt: skip


def sample(at: int, **counts: int) -> Sample:
    return Sample(at / 4, 0.25, **counts)


@given(st.lists(SAMPLE, max_size=8))
def test_no_byte_comes_twice_or_is_lost(rows: list[tuple[int, ...]]) -> None:
    names = ("copied_bytes", "copied_files", "copy_read_ns", "shim_bytes", "shim_reads", "shim_read_ns")
    samples = [sample(at, **dict(zip(names, row, strict=True))) for at, row in enumerate(rows)]
    found = arrived(samples)
    for name in ("copied_bytes", "shim_bytes"):
        total = sum(getattr(s, name) for s in samples)
        assert sum(getattr(s, name) for s in found) == pytest.approx(total, abs=len(rows))
        assert all(getattr(s, name) >= 0 for s in found)


def test_a_long_read_is_spread_over_the_time_that_it_took() -> None:
    read = sample(7, shim_bytes=20 * MB, shim_reads=1, shim_read_ns=7 * SECOND // 4)
    found = arrived([sample(at) for at in range(7)] + [read])
    assert [s.shim_bytes for s in found] == pytest.approx([20 * MB / 8] * 8, abs=1)
    assert [s.copied_bytes for s in found] == [0] * 8


def test_bytes_out_of_memory_did_not_come_from_the_source() -> None:
    first, again = (
        sample(at, shim_bytes=100 * MB, shim_opens=100, shim_reads=100, shim_read_ns=ns)
        for at, ns in ((0, 8**9), (1, 9**8))
    )
    assert [s.shim_bytes for s in arrived([first, again])] == [100 * MB, 0]


def test_bytes_that_the_kernel_read_ahead_came_from_the_source() -> None:
    pieces = [sample(at, shim_bytes=4 * MB, shim_reads=4, shim_read_ns=10**6, shim_opens=not at) for at in range(4)]
    assert [s.shim_bytes for s in arrived(pieces)] == [4 * MB] * 4


def bursts() -> list[Sample]:
    """A source of 15 MB/s, of which 32 transfers get their files of 300 kB at the same time, every 0.64 s."""
    ends = [0.64 * number for number in range(1, 11)]
    counts = [sum(at / 4 <= end < (at + 1) / 4 for end in ends) for at in range(27)]
    return [
        sample(at, copied_bytes=n * 9_600_000, copied_files=n * 32, copy_read_ns=n * 32 * 640_000_000, busy=32)
        for at, n in enumerate(counts)
    ]


def test_files_that_end_together_are_no_peak_of_the_source() -> None:
    """The counts alone would say 38 MB/s."""
    record = Record.from_json(composed(run_part(), [node_part(samples=bursts())]))
    assert max(record.series.source_bytes_per_s) < 24 * MB
    assert figures.highest_rate(record.series) == pytest.approx(15 * MB, rel=0.21)


def test_the_highest_rate_is_the_mean_over_a_second_or_all_of_a_shorter_run() -> None:
    record = Record.from_json(composed(run_part(), [node_part(samples=[sample(0, copied_bytes=MB), sample(1)])]))
    assert figures.highest_rate(record.series) == pytest.approx(2 * MB)
    late = [sample(at, copied_bytes=MB if at in (11, 12) else 0) for at in range(20)]
    record = Record.from_json(composed(run_part(), [node_part(samples=late)]))
    assert figures.highest_rate(record.series) == pytest.approx(2 * MB)
    assert figures.highest_rate(replace(record.series, start_s=(), source_bytes_per_s=())) == 0
    assert figures.highest_rate(replace(record.series, start_s=())) == 0
    assert figures.highest_rate(replace(record.series, start_s=(0.0,), interval_s=None)) == 0


@pytest.mark.parametrize(("reads", "opens", "best"), [(200, 0, 15), (200, 200, 20), (4, 2, 20)])
def test_what_the_kernel_reads_ahead_is_not_taken_for_a_faster_source(reads: int, opens: int, best: int) -> None:
    """The program is inside reads for three quarters of the time; the source is busy all the time or as long as it."""
    samples = [
        sample(at, shim_bytes=15 * MB // 4, shim_reads=reads, shim_opens=opens, shim_read_ns=3 * SECOND // 16)
        for at in range(8)
    ]
    assert {round(point.speed / MB) for point in of_reads(samples)} == {best}
