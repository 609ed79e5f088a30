"""Merges latency histograms and computes percentiles. The edges of the buckets are in `protocol.shim`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hpcstage.protocol.shim import bucket_upper_ns

Histogram = dict[int, int]
PERCENTILES = (50, 95, 99)


def merge(parts: Iterable[Mapping[int, int]]) -> Histogram:
    """Returns the sum of several histograms."""
    total: Histogram = {}
    for part in parts:
        for bucket, count in part.items():
            total[bucket] = total.get(bucket, 0) + count
    return total


def percentile_ns(histogram: Mapping[int, int], percent: float) -> float | None:
    """Returns a percentile, interpolated inside its bucket; None for an empty histogram."""
    total = sum(histogram.values())
    if total <= 0:
        return None
    wanted, seen = total * percent / 100, 0
    for bucket in sorted(histogram):
        count = histogram[bucket]
        if count and seen + count >= wanted:
            lower = bucket_upper_ns(bucket - 1) if bucket else 0
            return lower + (bucket_upper_ns(bucket) - lower) * max(0.0, wanted - seen) / count
        seen += count
    return float(bucket_upper_ns(max(histogram)))


def percentiles_ms(histogram: Mapping[int, int]) -> dict[str, float | None]:
    """Returns p50, p95 and p99 in milliseconds."""
    values = {f"p{p}": percentile_ns(histogram, p) for p in PERCENTILES}
    return {name: None if value is None else value / 1e6 for name, value in values.items()}
