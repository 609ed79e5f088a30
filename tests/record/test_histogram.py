"""Percentiles of latencies: inside their bucket, where the latencies are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.protocol.shim import bucket_of_ns, bucket_upper_ns
from hpcstage.record.figures.contention import percentile_ns, percentiles_ms
from hpcstage.record.figures.counts import joined
from hpcstage.record.schema import Percentiles

BUCKET = bucket_of_ns(1_000_000)
LOWER, UPPER = bucket_upper_ns(BUCKET - 1), bucket_upper_ns(BUCKET)


@pytest.mark.parametrize("percent", [1, 25, 50, 75, 99, 100])
def test_a_percentile_is_as_far_into_its_bucket_as_its_rank(percent: float) -> None:
    assert percentile_ns({BUCKET: 1000}, percent) == pytest.approx(LOWER + (UPPER - LOWER) * percent / 100)


def test_the_bucket_is_that_of_the_rank() -> None:
    both = {BUCKET: 60, BUCKET + 2: 40}
    assert percentile_ns(both, 30) == pytest.approx((LOWER + UPPER) / 2)
    assert percentile_ns(both, 80) == pytest.approx((bucket_upper_ns(BUCKET + 1) + bucket_upper_ns(BUCKET + 2)) / 2)


def test_nothing_has_no_percentile() -> None:
    assert percentile_ns({}, 50) is None
    assert percentiles_ms({}) == Percentiles(p50=None, p95=None, p99=None)


@given(st.lists(st.integers(1, 10**11), min_size=1, max_size=300), st.integers(1, 99))
def test_it_lies_in_the_bucket_of_the_latency_of_that_rank(latencies_ns: list[int], percent: int) -> None:
    histogram = joined({bucket_of_ns(latency): 1} for latency in latencies_ns)
    rank = -(-len(latencies_ns) * percent // 100)
    bucket = bucket_of_ns(sorted(latencies_ns)[rank - 1])
    lower = bucket_upper_ns(bucket - 1) if bucket else 0
    found = percentile_ns(histogram, percent)
    assert found is not None
    assert lower <= found <= bucket_upper_ns(bucket)
