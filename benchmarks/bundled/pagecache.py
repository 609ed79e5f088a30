"""The machine's own page cache, limited by cgroup, over emulated storage that lets it be kept between opens.

Owns one sample: a fresh mount, a fresh group, a reader in it; the bytes that leave the storage and the time of each
epoch once the cache is full. Which pages are dropped is the kernel's business.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from benchmarks.bundled.limit import MemoryLimit
from benchmarks.programs import environment
from hpcstage.emulator import Settings, Slowfs

WARM_EPOCHS = 4
"""Before anything is counted; they are read at full speed."""
STORAGE = Settings(bandwidth_bytes_per_s=300e6, metadata_latency_s=0.0001, data_latency_s=0.0003)
_FULL_SPEED = replace(STORAGE, bandwidth_bytes_per_s=0, metadata_latency_s=0, data_latency_s=0)
_COUNTED_EVERY_S = 0.01
_READER_BYTES = 1 << 20
"""What the reader allocates after it joined."""
_FILE_BYTES = 2 << 10
"""What the kernel allocates for a file that it knows."""


@dataclass(frozen=True)
class Shelf:
    """Files on the storage."""

    source: Path
    names: Sequence[str]
    size_bytes: int

    def limit_bytes(self, share: float) -> int:
        """For a page cache of this share of all files."""
        return round(share * self.size_bytes) + _READER_BYTES + _FILE_BYTES * len(self.names)


def measure(
    shelf: Shelf, epochs: Sequence[Sequence[int]], share: float, scratch: Path, how: str = "plain"
) -> dict[str, Any]:
    """Reads epochs of indices; the first WARM_EPOCHS fill the cache. Values are means of the others.

    `how`: `plain`, or `read_file` of hpcstage.torch.
    """
    orders = scratch / "orders.jsonl"
    orders.write_text("".join(json.dumps([shelf.names[i] for i in order]) + "\n" for order in epochs))
    mountpoint = scratch / "shared"
    mountpoint.mkdir(exist_ok=True)
    with (
        MemoryLimit(shelf.limit_bytes(share)) as limit,
        Slowfs(shelf.source, _FULL_SPEED, mountpoint=mountpoint, keep_cache=True) as slow,
        _reader([slow.path, orders, limit.join, how]) as process,
    ):
        readings = _Readings(process, slow, limit)
        try:
            for _ in range(WARM_EPOCHS):
                readings.epoch()
            slow.state.set(STORAGE)
            found = [readings.epoch() for _ in range(len(epochs) - WARM_EPOCHS)]
        finally:
            process.kill()
    return {
        "seconds": statistics.fmean(seconds for seconds, _, _ in found),
        "misses": statistics.fmean(read for _, read, _ in found) / shelf.size_bytes,
        "held": statistics.fmean(cached for _, _, cached in found) / shelf.size_bytes,
        "epochs_s": [seconds for seconds, _, _ in found],
        "read_bytes": [read for _, read, _ in found],
    }


def _reader(words: Sequence[str | Path]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.bundled.reader", *map(str, words)]
    # Not the huge pages of the other programs: they would come out of the page cache's room.
    settings = {name: value for name, value in environment().items() if name != "GLIBC_TUNABLES"}
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings)


class _Readings:
    """Asks a reader for epochs."""

    def __init__(self, process: subprocess.Popen[str], slow: Slowfs, limit: MemoryLimit) -> None:
        assert process.stdin
        assert process.stdout
        self._ask: IO[str] = process.stdin
        self._answers: IO[str] = process.stdout
        self._slow = slow
        self._limit = limit
        self._answer()

    def epoch(self) -> tuple[float, int, int]:
        """Seconds, bytes that left the storage, bytes in the cache at the end."""
        before = self._slow.counters()
        self._ask.write("\n")
        self._ask.flush()
        seconds = float(self._answer())
        return seconds, (self._slow.counters() - before).read_bytes, self._limit.cached_bytes()

    def _answer(self) -> str:
        # The kernel weighs its lists by counts that it brings up to date every two seconds, and when they are asked
        # for. That is often in an epoch of minutes, and must be in one of less than a second.
        while not select.select([self._answers], [], [], _COUNTED_EVERY_S)[0]:
            self._limit.cached_bytes()
        line = self._answers.readline()
        if not line:
            raise RuntimeError("the reader ended early")
        return line
