"""A small simulator of a source whose bandwidth all readers share, seen as the daemon's samples would show it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcstage.record.parts.rows import Sample

MB = 1e6


@dataclass(frozen=True)
class Source:
    """First come, first served, one block at a time; each open and read also costs a latency."""

    bytes_per_s: float = 200 * MB
    open_s: float = 0.002
    read_s: float = 0.0005
    block: float = 1 * MB


def samples_of(
    source: Source,
    sizes: Callable[[int], float],
    seconds: float,
    competitors: Callable[[float], int],
    *,
    in_flight: int = 16,
    noise: float = 0.0,
    seed: int = 0,
) -> list[Sample]:
    """Event by event: `in_flight` transfers of files of `sizes(k)` bytes, `competitors(t)` readers of whole blocks."""
    rng = random.Random(seed)
    bins = [Sample(float(second), 1.0, busy=in_flight) for second in range(int(seconds))]
    events: list[tuple[float, int, int, float, float]] = []  # time, tie, transfer (< 0: competitor), left, asked
    free_s, tie, files = 0.0, 0, 0
    for transfer in range(in_flight):
        heapq.heappush(events, (rng.random() * 0.01, transfer, transfer, 0.0, 0.0))
    active: set[int] = set()
    tie = in_flight
    next_check = 0.0
    while events:
        now = events[0][0]
        if now >= seconds:
            break
        while next_check <= now:
            wanted = competitors(next_check)
            for number in range(1, wanted + 1):
                if -number not in active:
                    active.add(-number)
                    tie += 1
                    heapq.heappush(events, (next_check, tie, -number, source.block, next_check))
            next_check += 0.05
        now, _, who, left, _asked = heapq.heappop(events)
        tie += 1
        if who < 0:
            if -who > competitors(now):
                active.discard(who)
                continue
            free_s = max(free_s, now) + source.block / source.bytes_per_s * _jitter(rng, noise)
            heapq.heappush(events, (free_s + source.read_s, tie, who, source.block, now))
            continue
        second = min(int(now), len(bins) - 1)
        if left <= 0:
            left = sizes(files)
            files += 1
            bins[second].copied_files += 1
            bins[second].copy_open_ns += int(source.open_s * 1e9)
            heapq.heappush(events, (now + source.open_s * _jitter(rng, noise), tie, who, left, now))
            continue
        block = min(left, source.block)
        free_s = max(free_s, now) + block / source.bytes_per_s * _jitter(rng, noise)
        done = free_s + source.read_s
        if done < seconds:
            bins[int(done)].copied_bytes += int(block)
            bins[int(done)].copy_read_ns += int((done - now) * 1e9)
        heapq.heappush(events, (done, tie, who, left - block, now))
    return bins


def _jitter(rng: random.Random, noise: float) -> float:
    return max(0.2, rng.gauss(1.0, noise)) if noise else 1.0


def fluid(
    seconds: int, loads: Sequence[tuple[float, float, float]], *, level: float, noise: float, rng: random.Random
) -> list[Sample]:
    """Second by second: `level` bytes/s, less the loss of each (start, end, loss), times noise."""
    samples = []
    for second in range(seconds):
        factor = 1.0
        for start, end, loss in loads:
            inside = max(0.0, min(end, second + 1) - max(start, second))
            factor -= loss * inside
        value = level * factor * max(0.05, rng.gauss(1, noise))
        samples.append(
            Sample(float(second), 1.0, copied_bytes=int(value), copied_files=int(value / 1e3) + 1, busy=16.0)
        )
    return samples
