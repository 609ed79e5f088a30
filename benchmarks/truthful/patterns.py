"""Patterns of a source that is slow at times, which the detector was not made for, and what the record says of each.

Owns the patterns. The program reads now and then, so that the copiers have the source to themselves.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from benchmarks.storage import Storage
from hpcstage.emulator import Settings

STEP_S = 0.05


@dataclass(frozen=True)
class Pattern:
    """What the source gives at each moment, as a share of its best."""

    name: str
    share: Callable[[float], float]
    is_slow: bool = True
    """Whether it is slow for a second or more at any time."""
    length_s: float = 14.0


def _turns(high_s: float, low_s: float, low: float) -> Callable[[float], float]:
    return lambda at_s: 1.0 if at_s % (high_s + low_s) < high_s else low


PATTERNS = (
    Pattern("steady", lambda _: 1.0, is_slow=False),
    Pattern("4 s each, a tenth", _turns(4, 4, 0.1)),
    Pattern("1.5 s each, a third", _turns(1.5, 1.5, 0.33)),
    Pattern("1.2 s of 6, a fifth", _turns(4.8, 1.2, 0.2)),
    Pattern("3 s of 4, half", _turns(1, 3, 0.5)),
    Pattern("down in steps", lambda at_s: (1.0, 0.7, 0.4, 0.2)[min(3, int(at_s / 4))]),
    Pattern("a ramp down", lambda at_s: max(0.2, 1 - at_s / 16)),
    Pattern("a ramp up", lambda at_s: min(1.0, 0.2 + at_s / 14)),
)


@contextmanager
def played(storage: Storage, pattern: Pattern, best: Settings) -> Iterator[None]:
    """Sets the source by the clock while the block runs."""
    over, began = threading.Event(), time.monotonic()

    def play() -> None:
        while not over.wait(STEP_S):
            share = pattern.share(time.monotonic() - began)
            storage.mount.state.set(replace(best, bandwidth_bytes_per_s=best.bandwidth_bytes_per_s * share))

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
