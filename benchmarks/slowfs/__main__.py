"""The emulator itself: what it passes without limits, and whether its limits hold.

`python -m benchmarks.slowfs --check` measures; `python -m benchmarks.slowfs mount SOURCE MOUNTPOINT --bandwidth 100MB`
shows a directory as slow storage until interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.files import Place, drop_files, make_files, place
from benchmarks.harness import Bench, Figure, Options, at_least, at_most, options_of, parser
from benchmarks.programs import flatout, read_flat_out
from benchmarks.storage import Load, Storage
from hpcstage.emulator import Settings, Slowfs
from hpcstage.units import parse_size

MB = 1e6
_FILE_BYTES = 100_000
_BIG_BYTES = 256_000_000
_QUICK_BIG_BYTES = 32_000_000
_LATENCY_S = 0.002
_TOLERANCE = 0.03
_MIN_MB_PER_S = 500.0
_MIN_FILES_PER_S = 2000.0
_MAX_LOAD_CPU = 0.15


def main() -> int:
    """`mount`, or the measurements."""
    if sys.argv[1:2] == ["mount"]:
        return mount(sys.argv[2:])
    options = options_of(parser(__doc__).parse_args())
    flatout()
    bench = Bench("slowfs", options)
    with place(options) as where:
        measure(bench, options, where)
    bench.sheet("slowfs", ["cell", "MB/s", "files/s", "added ms", "load MB/s", "load's share of a core"], rows(bench))
    return bench.finish(figures(bench))


def measure(bench: Bench, options: Options, where: Place) -> None:
    """All samples."""
    small, big = where.memory / "small", where.memory / "big"
    names = make_files(small, 200 if options.quick else 2000, _FILE_BYTES, spread=0)
    make_files(big, 1, _QUICK_BIG_BYTES if options.quick else _BIG_BYTES, spread=0)
    cells: dict[str, Callable[[], dict[str, float]]] = {
        "unthrottled stream": lambda: stream(where, big, Settings()),
        "unthrottled files": lambda: small_files(where, small, names, Settings(), threads=4),
        "100 MB/s stream": lambda: stream(where, big, Settings(bandwidth_bytes_per_s=100 * MB)),
        "100 MB/s, 32 readers": lambda: small_files(
            where, small, names, Settings(bandwidth_bytes_per_s=100 * MB, data_latency_s=_LATENCY_S), threads=32
        ),
        "metadata 2 ms": lambda: metadata(where, small, names[:100]),
        "data 2 ms": lambda: data_latency(where, small, names[100:200]),
        "load virtual": lambda: loaded(where, big, Load(4, "virtual")),
        "load real": lambda: loaded(where, big, Load(4, "real")),
    }
    for cell, run in cells.items():
        if options.wants(cell):
            bench.measure(cell, {"slowfs": run}, options.rounds(5))


def stream(where: Place, data: Path, settings: Settings) -> dict[str, float]:
    """One reader of one large file."""
    with Storage(data, settings, where.memory) as storage:
        paths = [storage.path / entry for entry in os.listdir(data)]
        result = read_flat_out(paths, where.memory, 1)
        return {**result, "mb_per_s": result["bytes"] / result["seconds"] / MB, "server_cpu_s": storage.mount.cpu_s()}


def small_files(where: Place, data: Path, names: list[str], settings: Settings, threads: int) -> dict[str, float]:
    """Many files, several readers."""
    with Storage(data, settings, where.memory) as storage:
        before = storage.counters()
        result = read_flat_out([storage.path / name for name in names], where.memory, threads)
        asked = storage.counters() - before
        return {
            **result,
            "mb_per_s": result["bytes"] / result["seconds"] / MB,
            "files_per_s": result["files"] / result["seconds"],
            "counted_bytes_ratio": asked.read_bytes / result["bytes"],
            "counted_opens_ratio": asked.opens / result["files"],
            "server_cpu_s": storage.mount.cpu_s(),
        }


def metadata(where: Place, data: Path, names: list[str]) -> dict[str, float]:
    """What a cold stat takes more with the latency than without."""

    def stat(path: Path) -> None:
        path.stat()

    return _extra(where, data, names, Settings(metadata_latency_s=_LATENCY_S), stat)


def data_latency(where: Place, data: Path, names: list[str]) -> dict[str, float]:
    """What a read of one request takes more with the latency than without."""

    def read(path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            file.read(4096)

    return _extra(where, data, names, Settings(data_latency_s=_LATENCY_S), read)


def _extra(
    where: Place, data: Path, names: list[str], settings: Settings, touch: Callable[[Path], None]
) -> dict[str, float]:
    """The median over files, limits in turn on and off, on a mount of which nothing is cached."""
    times: dict[bool, list[float]] = {True: [], False: []}
    with Storage(data, Settings(), where.memory) as storage:
        for index, name in enumerate(names):
            slow = index % 2 == 0
            storage.mount.state.set(settings if slow else Settings())
            started_s = time.perf_counter()
            touch(storage.path / name)
            times[slow].append(time.perf_counter() - started_s)
    base = statistics.median(times[False])
    return {"added_ms": (statistics.median(times[True]) - base) * 1e3, "base_ms": base * 1e3}


def loaded(where: Place, data: Path, load: Load) -> dict[str, Any]:
    """One node's reading beside a competing node of weight 4, and what the competition costs the machine."""
    with Storage(data, Settings(bandwidth_bytes_per_s=100 * MB), where.memory, load) as storage:
        paths = [storage.path / entry for entry in os.listdir(data)]
        storage.load_on()
        time.sleep(0.5)  # the competing readers fill their queue
        drop_files(paths)
        before, cpu_s = storage.load_counters(), storage.load_cpu_s()
        started_s = time.monotonic()
        small = _read_some(paths[0], 16_000_000)
        took_s = time.monotonic() - started_s
        moved = storage.load_counters().read_bytes - before.read_bytes
        load_cpu_s = storage.load_cpu_s() - cpu_s
        storage.load_off()
        return {
            "seconds": took_s,
            "mb_per_s": small / took_s / MB,
            "load_mb_per_s": moved / took_s / MB,
            "load_cpu_share": load_cpu_s / took_s,
        }


def _read_some(path: Path, size_bytes: int) -> int:
    """Keeps several requests outstanding, as the kernel's read-ahead does."""
    done = 0
    with path.open("rb", buffering=0) as file:
        while done < size_bytes and (piece := file.read(1 << 20)):
            done += len(piece)
    return done


def rows(bench: Bench) -> list[list[float | str | None]]:
    """The table: medians."""
    keys = ("mb_per_s", "files_per_s", "added_ms", "load_mb_per_s", "load_cpu_share")
    cells = dict.fromkeys(sample["cell"] for sample in bench.samples)
    return [[cell, *(bench.median(cell, "slowfs", key) for key in keys)] for cell in cells]


def figures(bench: Bench) -> list[Figure]:
    """Throttles within 3 %, and no bottleneck without them."""
    median = bench.median
    asked = [
        at_least("unthrottled, one stream", median("unthrottled stream", "slowfs", "mb_per_s"), _MIN_MB_PER_S, "MB/s"),
        at_least(
            "unthrottled, 100 kB files",
            median("unthrottled files", "slowfs", "files_per_s"),
            _MIN_FILES_PER_S,
            "files/s",
        ),
        *(_within(bench, cell, "mb_per_s", 100.0) for cell in ("100 MB/s stream", "100 MB/s, 32 readers")),
        *(_within(bench, cell, "added_ms", 2.0) for cell in ("metadata 2 ms", "data 2 ms")),
        *(_within(bench, cell, "mb_per_s", 20.0) for cell in ("load virtual", "load real")),
        at_most(
            "a real load of 80 MB/s costs of a core", median("load real", "slowfs", "load_cpu_share"), _MAX_LOAD_CPU
        ),
    ]
    for key in ("counted_bytes_ratio", "counted_opens_ratio"):
        value = median("unthrottled files", "slowfs", key)
        asked.append(at_most(f"{key} exact", None if value is None else abs(value - 1), 0.0))
    return asked


def _within(bench: Bench, cell: str, key: str, aim: float) -> Figure:
    value = bench.median(cell, "slowfs", key)
    error = None if value is None else abs(value / aim - 1)
    return at_most(f"{cell}: off by", error, _TOLERANCE)


def mount(words: list[str]) -> int:
    """Shows a directory as slow storage until SIGINT or SIGTERM."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.slowfs mount")
    made.add_argument("source", type=Path)
    made.add_argument("mountpoint", type=Path)
    made.add_argument("--bandwidth", type=parse_size, default=0, metavar="SIZE", help="bytes per second")
    made.add_argument("--metadata-latency-ms", type=float, default=0)
    made.add_argument("--data-latency-ms", type=float, default=0)
    made.add_argument("--load-weight", type=float, default=0, help="competing load against 1: 4 leaves a fifth")
    given = made.parse_args(words)
    settings = Settings(
        bandwidth_bytes_per_s=given.bandwidth,
        metadata_latency_s=given.metadata_latency_ms / 1e3,
        data_latency_s=given.data_latency_ms / 1e3,
        load_weight=given.load_weight,
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    with Slowfs(given.source, settings, mountpoint=given.mountpoint) as slow:
        print(f"{given.source} is at {slow.path}; settings and counters: {slow.state.path}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0


if __name__ == "__main__":
    sys.exit(main())
