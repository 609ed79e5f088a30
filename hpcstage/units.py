"""Parses and formats sizes, rates and durations as people write them."""

from __future__ import annotations

import re

NS_PER_S = 1e9
_FACTORS = {
    "": 1, "b": 1,
    "k": 1000, "kb": 1000, "m": 1000**2, "mb": 1000**2, "g": 1000**3, "gb": 1000**3, "t": 1000**4, "tb": 1000**4,
    "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
}  # fmt: skip
_SECONDS = {"": 1.0, "s": 1.0, "ms": 0.001, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)")


def parse_size(text: str) -> int:
    """Returns the bytes that a size such as `"800GiB"` means. Raises a ValueError that says what is accepted."""
    match = _NUMBER.fullmatch(text.strip())
    if not match or match[2].lower() not in _FACTORS:
        raise ValueError(f"{text!r} is not a size (such as 500MB, 800GiB or 1.5TB)")
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def parse_duration(text: str) -> float:
    """Returns the seconds that a duration such as `"5m"` means. Raises a ValueError that says what is accepted."""
    match = _NUMBER.fullmatch(text.strip())
    if not match or match[2].lower() not in _SECONDS:
        raise ValueError(f"{text!r} is not a duration (such as 30s, 5m or 1.5h)")
    return float(match[1]) * _SECONDS[match[2].lower()]


def format_size(size_bytes: float) -> str:
    """Formats bytes for people, in decimal units: 1.23 GB."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def format_rate(bytes_per_s: float) -> str:
    """Formats bytes per second for people."""
    return f"{format_size(bytes_per_s)}/s"


def format_duration(seconds: float) -> str:
    """Formats seconds for people: 2.8 us, 42 ms, 0.42 s, 12.3 s, 4m05s, 2h13m."""
    rounded = float(f"{seconds:.3g}")
    if 0 < rounded < 0.001:
        us = rounded * 1e6
        return f"{us:.0f} us" if us >= 10 else f"{us:.1f} us" if us >= 0.1 else "under 0.1 us"
    if 0 < rounded < 0.1:
        return f"{rounded * 1000:.3g} ms"
    if rounded < 100:
        return f"{rounded:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_share(share: float) -> str:
    """Formats a share for people; a small share does not become 0 %, and a nearly whole one does not become 100 %."""
    value = 100 * share
    if 0 < value < 1:
        return "under 1 %"
    if 99 < value < 100:
        return f"{min(value, 99.9):.1f} %"
    return f"{value:.0f} %"


def format_number(count: int, one: str, many: str | None = None) -> str:
    """Formats a number with its noun: `1 file`, `2,000 files`."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"
