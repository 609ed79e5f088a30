"""Slow reads of all nodes at once against those of one, from made-up loads."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manycases import job, node, run
from recordcases import composed

from hpcstage.record.figures.track import MOST_CELLS, aligned, series_of, track_of
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import Sample

Load = Callable[[float], float]


def between(start_s: float, end_s: float, left: float) -> Load:
    return lambda now_s: left if start_s <= now_s < end_s else 1.0


def section(nodes: list[NodePart], count: int) -> dict[str, Any]:
    contention: dict[str, Any] = composed(run(count), nodes)["contention"]
    return contention


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_all_at_once_is_the_source(count: int) -> None:
    found = section(list(job(count, source=between(20, 33, 0.3))), count)
    (period,) = found["periods"]
    assert (period["start_s"], period["end_s"]) == (pytest.approx(20, abs=1.5), pytest.approx(33, abs=1.5))
    assert period["loss"] == pytest.approx(0.7, abs=0.07)
    assert (period["nodes"], period["nodes_observed"]) == (count, count)
    assert period["host"] is None
    assert found["best_bytes_per_s"] == pytest.approx(400e6, rel=0.06)


@pytest.mark.parametrize("count", [2, 3, 8, 64])
@pytest.mark.parametrize(("start_s", "end_s"), [(30, 45), (5, 45), (40, 60)])
def test_one_alone_is_its_own(count: int, start_s: float, end_s: float) -> None:
    """Also where it is slow most of the time, and where there is only one other node."""
    nodes = list(job(count))
    nodes[1] = node(1, count, own=between(start_s, end_s, 0.35))
    found = section(nodes, count)
    (period,) = found["periods"]
    assert period["host"] == "node0001"
    assert (period["start_s"], period["end_s"]) == (pytest.approx(start_s, abs=2), pytest.approx(end_s, abs=2))
    assert period["loss"] == pytest.approx(0.65, abs=0.1)


def test_both_are_told_apart() -> None:
    source = between(10, 22, 0.4)
    nodes = [node(i, 8, source=source) for i in range(7)] + [node(7, 8, source=source, own=between(15, 50, 0.3))]
    found = section(nodes, 8)
    shared, own = found["periods"]
    assert (round(shared["start_s"]), round(shared["end_s"])) == (10, 22)
    assert (shared["host"], own["host"]) == (None, "node0007")
    assert (own["start_s"], own["end_s"]) == (pytest.approx(15, abs=2), pytest.approx(50, abs=2))


def test_a_node_that_is_always_slower_is_slow_but_has_no_period() -> None:
    nodes = list(job(6))
    nodes[3] = node(3, 6, own=lambda _: 0.4)
    record = composed(run(6), nodes)
    assert record["contention"]["periods"] == []
    (slow,) = [r for r in record["nodes"] if r["slow"]]
    assert slow["host"] == "node0003"
    (said,) = slow["slow"]
    assert re.fullmatch(r"reads the source at (3[6-9]|4[0-4]) % of the others' rate", said)


def test_no_false_alarm_in_quiet_jobs() -> None:
    for seed in range(40):
        rng = random.Random(seed)
        count, seconds = rng.choice([2, 3, 5, 16]), rng.choice([10, 60, 200])
        nodes = [node(i, count, 0, samples=quiet(rng, seconds, 1e8)) for i in range(count)]
        found = section(nodes, count)
        assert found["periods"] == [], (seed, count, seconds)


def quiet(rng: random.Random, seconds: int, level: float) -> list[Sample]:
    rates = [level * max(0.05, rng.gauss(1, 0.1)) for _ in range(seconds)]
    return [Sample(float(s), 1.0, int(rate), int(rate / 1e5) + 1, busy=16.0) for s, rate in enumerate(rates)]


def test_nodes_that_finish_early_leave_more_to_the_rest() -> None:
    """A source that is shared: the more nodes have finished, the faster the others. Nothing of that is contention."""
    rng = random.Random(3)
    ends = [30, 35, 40, 45, 50, 55, 60, 90]
    nodes = []
    for index, end in enumerate(ends):
        active = [sum(second < other for other in ends) for second in range(end)]
        rates = [4e8 / number * max(0.2, rng.gauss(1, 0.08)) for number in active]
        seen = [Sample(float(s), 1.0, int(rate), int(rate / 1e5) + 1, busy=16.0) for s, rate in enumerate(rates)]
        nodes.append(node(index, 8, 0, samples=seen))
    found = section(nodes, 8)
    assert found["periods"] == []


def test_nodes_whose_links_are_the_limit_and_that_finish_early() -> None:
    rng = random.Random(4)
    nodes = [node(i, 8, 0, samples=quiet(rng, 30 + 8 * i, 5e7)) for i in range(8)]
    found = section(nodes, 8)
    assert found["periods"] == []


def test_a_single_reader_of_the_source_among_several_nodes() -> None:
    """All the others got everything from it: there is nobody to compare it with."""
    source = between(20, 33, 0.3)
    nodes = [node(0, 4, source=source), *(node(i, 4, samples=[]) for i in range(1, 4))]
    found = section(nodes, 4)
    (period,) = found["periods"]
    assert (period["nodes"], period["nodes_observed"]) == (1, 1)
    assert period["host"] is None


def test_a_slow_disk_is_told_from_a_slow_link() -> None:
    nodes = list(job(4))
    for sample in nodes[2].samples:
        sample.copy_write_ns, sample.limited = 40 * 10**9, True
    (slow,) = [r for r in composed(run(4), nodes)["nodes"] if r["slow"]]
    assert slow["host"] == "node0002"
    assert slow["slow"] == ["its local disk takes 40.0 times as long to write as the others'"]


def test_milliseconds_of_a_few_files_say_nothing_about_a_disk() -> None:
    nodes = list(job(4))
    for one in nodes:
        for sample in one.samples:
            sample.copy_write_ns = 1000
    for sample in nodes[2].samples:
        sample.copy_write_ns, sample.copy_open_ns, sample.copy_read_ns = 100_000, 0, 0
    assert not any(r["slow"] for r in composed(run(4), nodes)["nodes"])


def test_direct_mode_of_several_nodes_is_judged_by_their_reads() -> None:
    def seen(index: int) -> list[Sample]:
        rng = random.Random(index)
        found = []
        for second in range(60):
            got = int(3e7 * (0.4 if 20 <= second < 35 else 1.0) * rng.gauss(1, 0.08))
            times = {"shim_open_ns": 60_000_000, "shim_read_ns": 540_000_000}
            found.append(Sample(float(second), 1.0, shim_opens=got // 10**5, shim_bytes=got, **times))
        return found

    found = section([node(i, 3, 0, mode="direct", samples=seen(i)) for i in range(3)], 3)
    (period,) = found["periods"]
    assert (period["start_s"], period["end_s"]) == (pytest.approx(20, abs=1.5), pytest.approx(35, abs=1.5))


# ---- cells ----


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(-1e5, 1e5), st.floats(0.01, 5)), min_size=1, max_size=50))
def test_cells_keep_sums_and_bounds(intervals: list[tuple[float, float]]) -> None:
    samples = [Sample(start_s, length_s, copied_bytes=100) for start_s, length_s in sorted(intervals)]
    tracks = [track for track in (track_of(samples, -3.5), track_of(samples, 1e5)) if track is not None]
    assert len(tracks) == 2
    joined = aligned(tracks, 64)
    for track, most in [*zip(tracks, [MOST_CELLS] * 2, strict=True), *zip(joined, [64] * 2, strict=True)]:
        assert len(track.got) <= most
        assert sum(track.got) == 100 * len(samples)


def test_the_series_is_the_sum_of_the_nodes_with_points_of_a_second_at_least() -> None:
    tracks = [
        track_of([Sample(at / 4, 0.25, copied_bytes=50, shim_bytes=10, shim_read_ns=1000) for at in range(40)], shift)
        for shift in (0.0, 1.0)
    ]
    series = series_of([track for track in tracks if track is not None])
    assert series.interval_s == 1.0
    assert series.source_bytes_per_s == (240.0, *[480.0] * 9, 240.0)


def test_bytes_out_of_memory_did_not_come_from_the_source() -> None:
    read = {"shim_bytes": 100_000_000, "shim_opens": 100}
    track = track_of([Sample(0.0, 0.25, **read, shim_read_ns=8**9), Sample(0.25, 0.25, **read, shim_read_ns=9**8)], 0.0)
    assert track is not None
    assert list(track.got) == [100_000_000, 0]
