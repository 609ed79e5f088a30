"""Measures source and local disk for a short time, as far as the forecast needs rates that are not known.

The probe reads a sample of the dataset's own files, spread over the order, so that sizes and places are the job's. One
reader alone reads some of them, as the program would; the copiers that a run starts, with the run's settings, copy
others; one reader reads these copies back. Cached pages of a file are dropped before it is read, so that cache hits do
not make the source look faster; a node cannot drop what the storage servers cache. The time is bounded even where the
source hangs: copiers are killed, and a reader that hangs is left behind. It gives way to a program of the run that has
a large file of the dataset open: nothing more is read at the source from then on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.types import Rates
from hpcstage.preview.inputs import Copying
from hpcstage.protocol import nodedir
from hpcstage.reading import readable
from hpcstage.store.copier import PROBED_BYTES, CopierSettings
from hpcstage.store.copyfile import CHUNK_BYTES, Status
from hpcstage.store.counters import Totals
from hpcstage.store.directory import Store
from hpcstage.store.pool import CopierPool

SAMPLE_FILES = 2000
COPIED_BYTES, GIVEN_BYTES = 256 << 20, 1 << 30
"""The copiers get no further file once they have copied, or were given, this much."""
SCRATCH_BYTES = 32 << 20
"""The most that the copiers are given without a local directory, as temporary files may lie in memory."""
OWN_BYTES = 4 << 20
"""The size of the file that the probe writes itself where no copy was finished."""
ALONE_SHARE = 0.3
"""The share of the time limit for one reader alone; copying takes up to COPY_SHARE, reading back the rest."""
COPY_SHARE = 0.5
GRACE_S = 0.25
"""The time that transfers get to end after the limit."""
END_S = 0.1
"""The longest wait for a killed copier; one that hangs in the kernel is left to it."""
PACE_S = 0.01
CACHED_S = 50e-6
"""A look-up that is faster than this was answered by this node's cache."""
LEAST_READING = 0.05
LARGE_BYTES = 16 << 20
"""A program that has a larger file open goes on reading it, and the probe would slow it down."""
LOOK_EVERY_S = 0.05
LOOKING_SHARE = 0.1
"""Looks at what programs have open take at most this share of the time."""
GAVE_WAY = "the program already reads large files at the source: the probe gave way, so not all rates were measured"


@dataclass(frozen=True)
class ProbeResult:
    """The measured rates; those that could not be measured are None."""

    rates: Rates
    seconds: float
    notes: tuple[str, ...]


def probe(
    manifest: Manifest,
    ids: Sequence[int],
    local_dir: Path | None,
    copying: Copying,
    *,
    limit_s: float = 2.0,
    opened: Callable[[], Iterable[bytes]] = tuple,
) -> ProbeResult:
    """Measures the rates with files of the order `ids`; without `local_dir`, only those of the source. `opened` returns
    the paths of files of the dataset that programs of the run have open."""
    started = time.monotonic()
    sample = _sample(ids)
    if not sample:
        return ProbeResult(Rates(), 0.0, ("no files to probe with",))
    gives_way = _GivingWay(manifest, opened)
    if gives_way():
        return ProbeResult(Rates(), time.monotonic() - started, (GAVE_WAY,))
    copies, local, place, is_local, no_space = None, None, None, False, ""
    with contextlib.ExitStack() as stack:
        try:
            place, is_local = stack.enter_context(_workplace(local_dir))
            most_bytes = GIVEN_BYTES if is_local else SCRATCH_BYTES
            copies = stack.enter_context(_Copies(manifest, sample[1::2] or sample, place, copying, most_bytes))
        except OSError as error:
            no_space = f"there was no room for copies: {error.strerror}"
        alone = _read_alone([manifest.source_path(id_) for id_ in sample[0::2]], limit_s * ALONE_SHARE, gives_way)
        copied = Copied() if copies is None or gives_way() else copies.make(limit_s * COPY_SHARE, gives_way)
        left_s = max(0.1, started + limit_s - time.monotonic())
        read_s = min(left_s, limit_s * (1 - ALONE_SHARE - COPY_SHARE))
        if place is not None and is_local and (alone.opens or copied.size_bytes):
            local = _read_back(copied.paths or _own_file(place), read_s)
    rates = _rates(alone, copied, local, is_local=is_local)
    notes = _notes(alone, copied, local, is_local=is_local, no_space=no_space)
    return ProbeResult(rates, time.monotonic() - started, (GAVE_WAY,) if gives_way.has else tuple(notes))


class _GivingWay:
    """Tells whether the probe gives way to a program. Owns the looks, which take time, so there is one now and then."""

    def __init__(self, manifest: Manifest, opened: Callable[[], Iterable[bytes]]) -> None:
        self.has = False
        """Whether the probe gave way; it does not begin again."""
        self._manifest = manifest
        self._opened = opened
        self._may_be_large = max(manifest.sizes, default=0) > LARGE_BYTES
        self._next = 0.0

    def __call__(self) -> bool:
        """Looks if it is time; returns whether the probe gives way."""
        now = time.monotonic()
        if self._may_be_large and not self.has and now >= self._next:
            self.has = any(map(self._is_large, self._opened()))
            self._next = now + max(LOOK_EVERY_S, (time.monotonic() - now) / LOOKING_SHARE)
        return self.has

    def _is_large(self, path: bytes) -> bool:
        id_ = self._manifest.find_source(path)
        return id_ is not None and self._manifest.size(id_) > LARGE_BYTES


# ---- the sample and where it goes


def _sample(ids: Sequence[int]) -> list[int]:
    """Returns ids at even distances over the order, in a sequence whose every beginning is spread over it."""
    count = min(SAMPLE_FILES, len(ids))
    places = [i * len(ids) // count for i in range(count)]
    # The time limit may cut the sample anywhere: in bit-reversed sequence, each beginning is spread over the order.
    turns = sorted(range(count), key=lambda i: int(f"{i:016b}"[::-1], 2))
    return [ids[places[i]] for i in turns]


@contextlib.contextmanager
def _workplace(local_dir: Path | None) -> Iterator[tuple[Path, bool]]:
    """Makes a directory for copies, among temporary files where `local_dir` takes none; yields whether it took it."""
    try:
        if local_dir is None:
            raise FileNotFoundError
        place, is_local = tempfile.mkdtemp(prefix=".hpcstage-probe-", dir=local_dir), True
    except OSError:
        place, is_local = tempfile.mkdtemp(prefix="hpcstage-probe-"), False
    try:
        yield Path(place), is_local
    finally:
        shutil.rmtree(place, ignore_errors=True)


# ---- one reader alone


@dataclass
class AloneReading:
    """The sums of one reader. A file that the time limit cut short counts by its open and by the bytes it gave."""

    opens: int = 0
    size_bytes: int = 0
    open_s: float = 0.0
    read_s: float = 0.0
    hung: int = 0


def _read_alone(paths: Sequence[bytes], limit_s: float, gives_way: Callable[[], bool] = lambda: False) -> AloneReading:
    """Reads files until the time is over or the probe gives way; a reader that hangs is left behind, with what it had
    read until then."""
    deadline_s = time.monotonic() + limit_s
    found = AloneReading()

    def is_over() -> bool:
        return time.monotonic() >= deadline_s or gives_way()

    reader = threading.Thread(target=_read_all, args=(paths, is_over, found), daemon=True)
    reader.start()
    reader.join(limit_s + GRACE_S)
    return replace(found, hung=int(reader.is_alive()))


def _read_all(paths: Sequence[bytes], is_over: Callable[[], bool], found: AloneReading) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for path in paths:
        if is_over():
            return
        with contextlib.suppress(OSError):
            _read_one(path, is_over, found, buffer)


def _read_one(path: bytes, is_over: Callable[[], bool], found: AloneReading, buffer: memoryview) -> None:
    start = time.monotonic()
    _look_up(path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.fstat(fd)
        found.opens += 1
        found.open_s += time.monotonic() - start
        done, count = 0, 1
        while count and done < PROBED_BYTES and not is_over():
            before = time.monotonic()  # the look whether to give way is no reading
            count = os.readv(fd, [buffer])
            found.read_s += time.monotonic() - before
            done += count
            found.size_bytes += count
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _look_up(path: bytes) -> None:
    """Looks the name up as the program will, which opens the file when the caches have lost what the scan left there.

    Where the name is still cached, a missing name beside it is looked up, too, which costs the storage the same.
    """
    start = time.monotonic()
    os.stat(path)
    if time.monotonic() - start < CACHED_S:
        with contextlib.suppress(OSError):
            os.stat(path + b".hpcstage-probe")


def _read_back(copies: Sequence[bytes], limit_s: float) -> AloneReading | None:
    """Reads copies from the disk, not from memory: those that could be written through in half of the time."""
    half_s = time.monotonic() + limit_s / 2
    written = []
    for path in copies:
        if time.monotonic() > half_s:
            break
        with contextlib.suppress(OSError):
            _write_through(path)
            written.append(path)
    return _read_alone(written, limit_s / 2) if written else None


def _own_file(place: Path) -> tuple[bytes, ...]:
    """Writes a file to be read back in the place of copies. Returns its path; nothing where it could not be written."""
    path = place / "own"
    with contextlib.suppress(OSError):
        path.write_bytes(os.urandom(CHUNK_BYTES) * (OWN_BYTES // CHUNK_BYTES))
        return (os.fsencode(path),)
    return ()


def _write_through(path: bytes) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


# ---- the copiers


@dataclass(frozen=True)
class Copied:
    """The sums of all copiers."""

    files: float = 0.0
    """Whole files; of one that was copied in part, that part."""
    size_bytes: int = 0
    wall_s: float = 0.0
    reading: float = 1.0
    """The part of the time in which the copiers asked the source for as much as they may at once."""
    in_flight: int = 0
    hung: int = 0
    paths: tuple[bytes, ...] = ()
    """The copies."""


class _Copies:
    """Copies made by the copiers of a run in a directory of the probe's own. It owns the copiers, which are forked at
    once, as no thread may run then."""

    def __init__(self, manifest: Manifest, ids: Sequence[int], place: Path, copying: Copying, most_bytes: int) -> None:
        """`most_bytes` is the most that the copiers are given."""
        self._most_bytes = most_bytes
        entries = [manifest.entry(id_) for id_ in ids]
        self._manifest = Manifest.build(manifest.datasets, entries)
        found = (self._manifest.find(entry.dataset, entry.path) for entry in entries)
        self._waiting = deque(id_ for id_ in found if id_ is not None)
        self._store = Store(place)
        self._store.make()
        path = place / nodedir.MANIFEST
        self._manifest.save(path)
        self._rate = copying.max_rate_bytes_per_s
        settings = CopierSettings(place, path, copying.transfers, self._rate, nice=copying.nice, is_probe=True)
        self._pool = CopierPool(settings, copying.copiers)
        self._pool.open_manifest()  # the copiers start their threads while one reader is measured

    def __enter__(self) -> _Copies:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close(END_S)

    def make(self, limit_s: float, gives_way: Callable[[], bool]) -> Copied:
        """Copies files for so long. Transfers that have begun then get a short time to end, and are killed. Where the
        probe gives way, they are killed at once, and nothing counts: what is copied beside a program tells little."""
        pool, waiting, begun, done = self._pool, self._waiting, set[int](), list[int]()
        in_flight, given_bytes, bytes_at_deadline = 0, 0, -1
        started = now = last = time.monotonic()
        while now < started + limit_s + GRACE_S and (pool.assigned or waiting):
            if gives_way():
                pool.close(END_S)
                return Copied()
            copied_bytes = pool.stats.totals().bytes
            if now >= started + limit_s or copied_bytes >= COPIED_BYTES or not pool.slots:
                waiting.clear()
                bytes_at_deadline = copied_bytes if bytes_at_deadline < 0 else bytes_at_deadline
            while waiting and pool.assigned < pool.slots and self._may_give(given_bytes, now - started):
                size_bytes = min(PROBED_BYTES, self._manifest.size(waiting[0]))
                if given_bytes + size_bytes > self._most_bytes:
                    waiting.clear()
                    break
                given_bytes += size_bytes
                begun.add(waiting[0])
                pool.assign(waiting.popleft())
            pool.flush()
            in_flight = max(in_flight, min(pool.transfers, pool.assigned))
            for fd in readable(pool.fds(), PACE_S):
                for result in pool.receive(fd):
                    begun.discard(result.id)
                    done += [result.id] if result.status is Status.OK else []
                last = time.monotonic()
            now = time.monotonic()
        unfinished, totals = pool.assigned, pool.stats.totals()
        pool.close(END_S)  # so that no copier reads or writes while the copies are read back
        wall_s = (now if unfinished else last) - started
        whole = sum(min(1.0, PROBED_BYTES / max(1, self._manifest.size(id_))) for id_ in done)
        parts = sum(pool.stats.read_of(id_) / max(1, self._manifest.size(id_)) for id_ in begun)
        return Copied(
            files=whole + parts,
            size_bytes=totals.bytes,
            wall_s=wall_s,
            reading=self._reading(totals, in_flight * wall_s),
            in_flight=in_flight,
            hung=unfinished if totals.bytes == bytes_at_deadline else 0,
            paths=tuple(self._store.path(self._manifest.store_path(id_)) for id_ in done),
        )

    def _may_give(self, given_bytes: int, elapsed_s: float) -> bool:
        """Returns whether the cap lets the copiers have another file now."""
        return self._rate is None or given_bytes < self._rate * (elapsed_s + PACE_S)

    def _reading(self, totals: Totals, most_s: float) -> float:
        """Returns `Copied.reading`; `most_s` are the seconds of all transfers, if each was at the source all the time.

        Where threads take turns, the source is busy while others write; without turns they read or write. A cap keeps
        them from either.
        """
        source_s, write_s = (totals.open_ns + totals.read_ns) / 1e9, totals.write_ns / 1e9
        busy, share = source_s / max(1e-9, most_s), source_s / max(1e-9, source_s + write_s)
        return min(1.0, max(LEAST_READING, busy, share if self._rate is None else 0.0))


# ---- from sums to rates


def _rates(alone: AloneReading, copied: Copied, local: AloneReading | None, *, is_local: bool) -> Rates:
    values: dict[str, float | None] = {}
    sources: dict[str, str] = {}

    def note(how: str, found: dict[str, float | None]) -> None:
        values.update(found)
        sources.update(dict.fromkeys(found, f"probe: {how}"))

    if alone.opens:
        note(f"one reader, {alone.opens} files", _alone_rates(alone, "reader"))
    if (copied.size_bytes or copied.files) and copied.wall_s > 0:
        files_per_s, bytes_per_s = copied.files / copied.wall_s or None, copied.size_bytes / copied.wall_s or None
        found = {"source_files_per_s": files_per_s and files_per_s / copied.reading}
        found["source_bytes_per_s"] = _not_slower_than_one(bytes_per_s and bytes_per_s / copied.reading, alone)
        if is_local:
            found |= {"copy_files_per_s": files_per_s, "copy_bytes_per_s": bytes_per_s}
        note(f"{copied.in_flight} in flight, {len(copied.paths) or 'parts of'} files", found)
    elif alone.size_bytes and alone.read_s > 0:
        note("one reader, nothing was copied", {"source_bytes_per_s": alone.size_bytes / alone.read_s})
    if local is not None and local.opens:
        how = f"copies read back, {local.opens} files" if copied.paths else "a file of its own, read back"
        note(how, _alone_rates(local, "local"))
    return Rates(**values, sources=sources)


def _not_slower_than_one(bytes_per_s: float | None, alone: AloneReading) -> float | None:
    """Returns the source's rate, which is at least that of one reader: where the source is so fast that the copiers
    wait for processors, several transfers may be slower than one."""
    one = alone.size_bytes / alone.read_s if alone.read_s > 0 else 0.0
    return None if bytes_per_s is None else max(bytes_per_s, one)


def _alone_rates(found: AloneReading, name: str) -> dict[str, float | None]:
    rate = found.size_bytes / found.read_s if found.size_bytes and found.read_s > 0 else None
    # Files without content have only a time per file, which includes reading to their end.
    per_file = found.open_s / found.opens if rate else (found.open_s + found.read_s) / found.opens
    return {f"{name}_file_s": per_file, f"{name}_bytes_per_s": rate}


def _notes(
    alone: AloneReading, copied: Copied, local: AloneReading | None, *, is_local: bool, no_space: str
) -> Iterator[str]:
    hung = alone.hung + copied.hung
    if hung:
        yield f"{hung} transfers did not end within the probe's time: the source is slow or hangs"
    if no_space:
        yield no_space
    if not alone.opens or not (no_space or copied.size_bytes or copied.files):
        yield "the sample could not be read"
    if not is_local:
        yield "no local directory to write to: the local disk was not measured"
    elif local is None or not local.opens:
        yield "no copy could be read back: the local disk was not measured"
    elif copied.paths:
        yield f"local: {local.opens} copies, written through to the disk first, then read by one reader"
    else:
        yield "local: no copy ended within the probe's time; a file of the probe's own was written and read instead"
