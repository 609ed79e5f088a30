"""What an open costs in this process, and what starting a Python from it costs. Prints one line of JSON.

    python opens.py OUTSIDE BELOW [STARTS]      two files: outside of any dataset, and below one

Nanoseconds are those of the fastest of many batches: what disturbs a batch only makes it slower.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

BATCHES = 300
OPENS = 1000


def os_open(path: str) -> None:
    """The bare call."""
    os.close(os.open(path, os.O_RDONLY))


def file_open(path: str) -> None:
    """What programs use."""
    open(path, "rb", buffering=0).close()


def costs_ns(calls: Sequence[tuple[Callable[[str], None], str]]) -> list[float]:
    """Of one open and close each. Batches take turns, so that all calls meet the machine at its quickest."""
    best = [float("inf")] * len(calls)
    for _ in range(BATCHES):
        for index, (call, path) in enumerate(calls):
            started_ns = time.perf_counter_ns()
            for _ in range(OPENS):
                call(path)
            best[index] = min(best[index], (time.perf_counter_ns() - started_ns) / OPENS)
    return best


def start_ms() -> float:
    """Starting an interpreter that does nothing."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return (time.perf_counter() - started_s) * 1e3


def main() -> None:
    """Measures and prints."""
    outside, below = sys.argv[1:3]
    starts = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    calls = {
        f"{name}_{call.__name__}_ns": (call, path)
        for name, path in (("outside", outside), ("below", below))
        for call in (os_open, file_open)
    }
    result: dict[str, object] = dict(zip(calls, costs_ns(list(calls.values())), strict=True))
    result["start_ms"] = [start_ms() for _ in range(starts)]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
