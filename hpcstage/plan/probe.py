"""A short measurement of source and local disk: what the forecast needs and nobody said.

Reads a sample of the dataset's own files, spread over the order, so that sizes and places are the job's: some by one
reader alone, some copied with as many transfers in flight as the copiers keep, the copies read back. Each file's cached
pages are dropped first (POSIX_FADV_DONTNEED), so that cache hits do not flatter; what the storage servers cache cannot
be dropped from here. Bounded in time even where the source hangs: its threads are daemons and are left behind.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpcstage.plan.manifest import Manifest
from hpcstage.plan.types import Rates

CHUNK_BYTES = 1 << 20
SAMPLE_FILES = 2000
FILE_LIMIT_BYTES = 32 << 20
"""Of a large file only its beginning is read."""
COPY_LIMIT_BYTES = 256 << 20
ALONE_SHARE = 0.3
"""Of the time limit; the copying takes up to half, reading back the rest."""
COPY_SHARE = 0.5
GRACE_S = 0.25
THREAD_COST_S = 50e-6
"""What a Python thread needs for a transfer besides waiting."""
FEW = 16
CACHED_S = 50e-6
"""A look-up that is faster was answered by this node."""


@dataclass(frozen=True)
class ProbeResult:
    """What was measured; unknown where it could not be."""

    rates: Rates
    seconds: float
    notes: tuple[str, ...]


@dataclass
class _Sums:
    """What one thread did."""

    files: int = 0
    size_bytes: int = 0
    open_s: float = 0.0
    read_s: float = 0.0
    write_s: float = 0.0
    last_s: float = 0.0
    """Monotonic time when its last transfer ended."""
    copies: list[str] = field(default_factory=list)


def probe(
    manifest: Manifest,
    ids: Sequence[int],
    local_dir: Path | None,
    *,
    transfers: int = 32,
    limit_s: float = 2.0,
) -> ProbeResult:
    """Measures. `ids` is the order; `local_dir` None: the source alone is measured."""
    started = time.monotonic()
    sample = _sample(manifest, ids)
    if not sample:
        return ProbeResult(_rates(None, None, None), 0.0, ("no files to probe with",))
    with _workplace(local_dir) as place:
        alone = _measure(sample[0::2], None, 1, limit_s * ALONE_SHARE)
        many = _measure(sample[1::2] or sample, place, _useful(alone, transfers), limit_s * COPY_SHARE)
        left_s = max(0.1, started + limit_s - time.monotonic())
        local = _read_back(many.copies, min(left_s, limit_s * (1 - ALONE_SHARE - COPY_SHARE)))
    notes = tuple(_notes(alone, many, local, place))
    return ProbeResult(_rates(alone, many, local), time.monotonic() - started, notes)


def _useful(alone: _Measured, transfers: int) -> int:
    """Threads that hide what one reader waits; where that is little, more would only get in each other's way."""
    if not alone.files:
        return transfers
    return max(2, min(transfers, int((alone.open_s + alone.read_s) / alone.files / THREAD_COST_S)))


# ---- the sample and where it goes


def _sample(manifest: Manifest, ids: Sequence[int]) -> list[bytes]:
    """Paths at even distances over the order, those at the far ends not last."""
    count = min(SAMPLE_FILES, len(ids))
    places = [i * len(ids) // count for i in range(count)]
    # Whatever time allows shall be spread over the whole: take them in bit-reversed turns.
    turns = sorted(range(count), key=lambda i: int(f"{i:016b}"[::-1], 2))
    return [manifest.source_path(ids[places[i]]) for i in turns]


@contextlib.contextmanager
def _workplace(local_dir: Path | None) -> Iterator[str | None]:
    place = None
    if local_dir is not None:
        with contextlib.suppress(OSError):
            place = tempfile.mkdtemp(prefix=".hpcstage-probe-", dir=local_dir)
    try:
        yield place
    finally:
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


# ---- measuring


@dataclass
class _Measured:
    """The sums of all threads over one phase."""

    files: int
    size_bytes: int
    open_s: float
    read_s: float
    write_s: float
    wall_s: float
    in_flight: int
    hung: int
    copies: list[str]


def _measure(paths: Sequence[bytes], place: str | None, threads: int, limit_s: float) -> _Measured:
    """Transfers files until the time is over; threads that hang are left behind."""
    started = time.monotonic()
    deadline_s = started + limit_s
    source = _Shared(paths, COPY_LIMIT_BYTES)
    sums = [_Sums() for _ in range(min(threads, len(paths)))]
    workers = [
        threading.Thread(target=_transfer_all, args=(source, place, deadline_s, mine, number), daemon=True)
        for number, mine in enumerate(sums)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(max(0.0, deadline_s + GRACE_S - time.monotonic()))
    hung = sum(worker.is_alive() for worker in workers)
    return _summed(sums, started, hung)


def _summed(sums: list[_Sums], started: float, hung: int) -> _Measured:
    wall_s = max([s.last_s for s in sums if s.files] or [started]) - started
    return _Measured(
        files=sum(s.files for s in sums),
        size_bytes=sum(s.size_bytes for s in sums),
        open_s=sum(s.open_s for s in sums),
        read_s=sum(s.read_s for s in sums),
        write_s=sum(s.write_s for s in sums),
        wall_s=wall_s,
        in_flight=len(sums),
        hung=hung,
        copies=[path for s in sums for path in s.copies],
    )


class _Shared:
    """Hands out paths to threads until the byte limit is reached."""

    def __init__(self, paths: Sequence[bytes], limit_bytes: int) -> None:
        self._paths = iter(paths)
        self._left_bytes = limit_bytes
        self._lock = threading.Lock()

    def take(self, used_bytes: int) -> bytes | None:
        with self._lock:
            self._left_bytes -= used_bytes
            return next(self._paths, None) if self._left_bytes > 0 else None


def _transfer_all(source: _Shared, place: str | None, deadline_s: float, sums: _Sums, number: int) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    used = 0
    for turn in itertools.count():
        path = source.take(used) if time.monotonic() < deadline_s else None
        if path is None:
            return
        before = sums.size_bytes
        target = None if place is None else f"{place}/{number}-{turn}"
        with contextlib.suppress(OSError):
            _transfer(path, target, deadline_s, sums, buffer)
        used = sums.size_bytes - before


def _transfer(path: bytes, target: str | None, deadline_s: float, sums: _Sums, buffer: memoryview) -> None:
    """One file: counted as a whole only if it was read as far as it should; bytes count in any case."""
    start = time.monotonic()
    _look_up(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.fstat(fd)
        opened = time.monotonic()
        out = -1 if target is None else os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            sums.write_s += time.monotonic() - opened
            _pump(fd, out, deadline_s, sums, buffer)
        finally:
            if out >= 0:
                os.close(out)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    sums.open_s += opened - start
    sums.files += 1
    sums.last_s = time.monotonic()
    if target is not None:
        sums.copies.append(target)


def _look_up(path: bytes) -> None:
    """Pays for looking the name up as the program will, which comes when what the scan left in caches is gone.

    A name that is still cached is replaced by one beside it that does not exist, which costs the storage the same.
    """
    start = time.monotonic()
    os.stat(path)
    if time.monotonic() - start < CACHED_S:
        with contextlib.suppress(OSError):
            os.stat(path + b".hpcstage-probe")


def _pump(fd: int, out: int, deadline_s: float, sums: _Sums, buffer: memoryview) -> None:
    done = 0
    now = time.monotonic()
    while done < FILE_LIMIT_BYTES:
        count = os.readv(fd, [buffer])
        after = time.monotonic()
        sums.read_s += after - now
        now = after
        if count == 0:
            return
        done += count
        sums.size_bytes += count
        if out >= 0:
            os.write(out, buffer[:count])
            now = time.monotonic()
            sums.write_s += now - after
        if now > deadline_s:
            return


def _read_back(copies: Sequence[str], limit_s: float) -> _Measured | None:
    """Reads copies from the disk, not from memory, as far as they could be written through in half the time."""
    if not copies:
        return None
    half_s = time.monotonic() + limit_s / 2
    written = []
    for path in copies:
        if time.monotonic() > half_s:
            break
        with contextlib.suppress(OSError):
            _write_through(path)
            written.append(os.fsencode(path))
    return _measure(written, None, 1, limit_s / 2) if written else None


def _write_through(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


# ---- from sums to rates


def _rates(alone: _Measured | None, many: _Measured | None, local: _Measured | None) -> Rates:
    sources: dict[str, str] = {}
    values: dict[str, float | None] = dict.fromkeys(
        (
            "source_bytes_per_s", "source_files_per_s", "reader_file_s", "reader_bytes_per_s",
            "local_bytes_per_s", "local_file_s", "copy_bytes_per_s", "copy_files_per_s",
        )
    )  # fmt: skip

    def note(measured: _Measured, how: str, found: dict[str, float | None]) -> None:
        values.update(found)
        text = f"probe: {how}, {measured.files} files"
        sources.update(dict.fromkeys(found, text))

    if alone is not None and alone.files:
        note(alone, "one reader", _alone_rates(alone, "reader"))
    if many is not None and many.files and many.wall_s > 0:
        note(many, f"{many.in_flight} in flight", _parallel_rates(many))
    if local is not None and local.files:
        note(local, "copies read back", _alone_rates(local, "local"))
    if many is not None and many.in_flight < FEW:
        _not_slower_than_one(values)
    return Rates(**values, sources=sources)


def _not_slower_than_one(values: dict[str, float | None]) -> None:
    """Where the source is so fast that few threads pay, it is they that make several transfers slower than one."""
    many, one = values["source_bytes_per_s"], values["reader_bytes_per_s"]
    if many is not None and one is not None and many < one:
        values["source_bytes_per_s"] = one


def _alone_rates(found: _Measured, name: str) -> dict[str, float | None]:
    rate = found.size_bytes / found.read_s if found.size_bytes and found.read_s > 0 else None
    # Without content there is only the time per file, and reading to the end belongs to it.
    per_file = found.open_s / found.files if rate else (found.open_s + found.read_s) / found.files
    return {f"{name}_file_s": per_file, f"{name}_bytes_per_s": rate}


def _parallel_rates(found: _Measured) -> dict[str, float | None]:
    files_per_s, bytes_per_s = found.files / found.wall_s, found.size_bytes / found.wall_s or None
    rates: dict[str, float | None] = {"copy_files_per_s": files_per_s, "copy_bytes_per_s": bytes_per_s}
    # Had the threads not written, they would have read for the whole time.
    reading = (found.open_s + found.read_s) / max(1e-9, found.open_s + found.read_s + found.write_s)
    rates["source_files_per_s"] = files_per_s / max(reading, 0.05)
    rates["source_bytes_per_s"] = bytes_per_s / max(reading, 0.05) if bytes_per_s else None
    return rates


def _notes(alone: _Measured, many: _Measured, local: _Measured | None, place: str | None) -> Iterator[str]:
    hung = alone.hung + many.hung
    if hung:
        yield f"{hung} transfers did not end within the probe's time: the source is slow or hangs"
    if not alone.files or not many.files:
        yield "the sample could not be read"
    if place is None:
        yield "no local directory to write to: the local disk was not measured"
    elif local is not None:
        yield f"local: {local.files} copies, written through to the disk first, then read by one reader"
