"""Takes samples of what was copied, what the program did and how many transfers ran: four a second, later one.

Owns the differences between two readings of the counters, not the counters.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hpcstage.daemon.copying.engine import Busy
from hpcstage.protocol.shim import COUNTERS, Counter
from hpcstage.record.parts.rows import Sample
from hpcstage.store.counters import Totals

MOST_SAMPLES = 100_000
FINE_S = 0.25
"""The length of the first samples: short enough to show slow periods of the source that last a second."""
FINE_SAMPLES = 4_000
"""The number of samples of this length; those after them are COARSE_S long."""
COARSE_S = 1.0
MOST_TIME_SHARE = 0.01
"""Taking samples takes at most this share of a processor, or comes once in COARSE_S: there may be thousands of
processes."""
LIMITED_SHARE = 0.25
_NO_SUMS = [0] * COUNTERS


@dataclass(frozen=True)
class Snapshot:
    """All counters at one moment."""

    totals: Totals
    sums: list[int]
    busy: Busy
    peer_bytes: int = 0


class Telemetry:
    """Turns readings of the counters into samples and owns the samples."""

    def __init__(self, read: Callable[[float], Snapshot], started: float) -> None:
        self.samples: list[Sample] = []
        self._read = read
        self._started = started
        self._at = started
        self._last = Snapshot(Totals(), _NO_SUMS, Busy(started))
        self._next = started + FINE_S

    def wake_after(self, now: float) -> float:
        """Returns the seconds until the next sample."""
        return max(0.0, self._next - now)

    def look(self, now: float) -> None:
        """Takes a sample if it is time."""
        if now >= self._next:
            begin = time.thread_time()
            self.tick(now)
            least_s = FINE_S if len(self.samples) < FINE_SAMPLES else COARSE_S
            every_s = min(COARSE_S, max(least_s, (time.thread_time() - begin) / MOST_TIME_SHARE))
            self._next = max(self._next + every_s, now + every_s / 2)

    def tick(self, now: float) -> None:
        """Ends the interval since the last tick and adds its sample."""
        length_s = now - self._at
        if length_s <= 0 or len(self.samples) >= MOST_SAMPLES:
            return
        reading = self._read(now)
        self.samples.append(_sample(self._last, reading, round(self._at - self._started, 4), round(length_s, 4)))
        self._last, self._at = reading, now


def _sample(last: Snapshot, now: Snapshot, start_s: float, length_s: float) -> Sample:
    old, new = last.totals, now.totals

    def shim(counter: Counter) -> int:
        return now.sums[counter] - last.sums[counter]

    sample = Sample(
        start_s=start_s,
        length_s=length_s,
        copied_bytes=new.bytes - old.bytes,
        copied_files=new.files - old.files,
        copy_open_ns=new.open_ns - old.open_ns,
        copy_read_ns=new.read_ns - old.read_ns,
        copy_write_ns=new.write_ns - old.write_ns,
        busy=round((now.busy.transfer_s - last.busy.transfer_s) / length_s, 3),
        shim_opens=shim(Counter.SOURCE_OPENS),
        shim_open_ns=shim(Counter.SOURCE_OPEN_NS),
        shim_bytes=shim(Counter.SOURCE_READ_BYTES),
        shim_read_ns=shim(Counter.SOURCE_READ_NS),
        local_bytes=shim(Counter.LOCAL_READ_BYTES),
        peer_bytes=now.peer_bytes - last.peer_bytes,
        loader_epochs=shim(Counter.LOADER_EPOCHS),
        loader_wait_ns=shim(Counter.LOADER_WAIT_NS),
    )
    held_back_s = now.busy.limited_s - last.busy.limited_s
    local_bound = sample.copy_write_ns > sample.copy_read_ns + sample.copy_open_ns
    sample.limited = held_back_s > LIMITED_SHARE * length_s or local_bound
    return sample
