"""Tells the daemon, before the first batch of an epoch, what the epoch will read, and when the epoch is over.

The module owns the numbers of streams, and the files below orders/ that hold what is announced: indices, and tables of
NUL-separated absolute names, sample by sample. `_hpcstage_sampler` knows what an epoch reads, `_hpcstage_tables` which
file an index stands for.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import partial
from time import monotonic_ns
from zlib import crc32

import _hpcstage_columns as columns  # type: ignore[import-not-found]
import _hpcstage_daemon as daemon  # type: ignore[import-not-found]
import _hpcstage_sampler as samplers  # type: ignore[import-not-found]
import _hpcstage_tables as tables  # type: ignore[import-not-found]
import _hpcstage_wire as wire  # type: ignore[import-not-found]
from _hpcstage_mapping import mapped  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

ASK_CAP_S = 1.0
HEAD_SAMPLES = 2048
HEAD_FROM_SAMPLES = 4096
COSTLY_SAMPLES = 65_536
"""The number of samples that are announced of a dataset whose table costs too much."""
PIECE_SAMPLES = 8192
"""A table is written in pieces of so many, to take little memory."""
MAX_PROBES = 64
MAP_STYLE = 0
ANNOUNCED_IN = (wire.STATE_STARTING, wire.STATE_SCANNING, wire.STATE_STAGING)


class PageHeader:
    """Reads the page's header. Raises OSError where there is no page."""

    def __init__(self, page: bytes) -> None:
        fd = os.open(page, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._words = mapped(fd, wire.PAGE_HEADER_BYTES).cast("I")
        finally:
            os.close(fd)

    @property
    def state(self) -> int:
        """Returns the daemon's state."""
        return int(self._words[wire.STATE_OFFSET // 4])

    @property
    def logging(self) -> bool:
        """Whether opens are to be logged."""
        return bool(self._words[wire.LOGGING_OFFSET // 4])


class _Stream:
    """What one iterator reads; it must not hold the iterator."""

    def __init__(self, pid: int, number: int) -> None:
        self.pid = pid
        self.number = number
        self.announced = False


class Epochs:
    """Announces the epochs of this process's loaders. Nothing that it does raises into the program."""

    def __init__(self, config: Any, counters: Any) -> None:
        self._orders = config.node_dir + b"/orders/"
        self._sock = config.sock
        self._roots = [os.fsdecode(source) for source, _ in config.maps]
        self._header = PageHeader(config.page)
        self._counters = counters
        self._hung_until_ns = 0
        self._streams = 0

    def begin(self, iterator: Any) -> None:
        """Announces an epoch; called when its first index is about to be asked for."""
        try:
            if iterator._dataset_kind == MAP_STYLE:
                self._begin(iterator)
        except Exception:
            self._counters.count(wire.COUNTER_ERRORS, 1)

    def end(self, iterator: Any) -> None:
        """Notes that an epoch was read to its end."""
        try:
            stream = iterator.__dict__.get("_hpcstage_stream")
            if stream is not None:
                self._over(stream)
        except Exception:
            self._counters.count(wire.COUNTER_ERRORS, 1)

    def _begin(self, iterator: Any) -> None:
        if not self._wanted() or isinstance(iterator._dataset, _in_memory()):
            return
        stream = self._stream_of(iterator)
        try:
            indices = samplers.peek(iterator._index_sampler, _generators(iterator), iterator._sampler_iter)
        except Exception:  # the sampler's own, which comes again when the program asks it
            indices = None
        if indices:
            self._announce(stream, iterator._dataset, indices)
        else:
            self._over(stream)

    def _wanted(self) -> bool:
        if monotonic_ns() < self._hung_until_ns:
            return False
        return self._header.state in ANNOUNCED_IN or self._header.logging

    def _stream_of(self, iterator: Any) -> _Stream:
        stream: _Stream | None = iterator.__dict__.get("_hpcstage_stream")
        if stream is None or stream.pid != os.getpid():  # a forked child numbers its own
            self._streams += 1
            stream = iterator._hpcstage_stream = _Stream(os.getpid(), self._streams)
            weakref.finalize(iterator, self._gone, stream)
        return stream

    def _announce(self, stream: _Stream, dataset: Any, indices: Any) -> None:
        table, table_name = self._table(dataset, indices)
        name = b"epoch-%d-%d-%s" % (stream.pid, stream.number, os.urandom(4).hex().encode())
        if sys.byteorder == "big":
            indices.byteswap()
        write(self._orders, name, iter([indices]))
        stream.announced = True
        head = _packed((stream.number, 4), (table.columns if table_name else 0, 2), (0, 2))
        self._ask(wire.KIND_EPOCH, head + name + b"\0" + table_name, ASK_CAP_S)

    def _table(self, dataset: Any, indices: Any) -> tuple[Any, bytes]:
        """Writes the dataset's table; returns the table and its name, or neither where it is not known or costs too
        much."""
        try:
            table = tables.table_of(dataset, self._roots)
            if table is None:
                return None, b""
            if table.costly:
                self._send_head(table, indices, COSTLY_SAMPLES)
                return None, b""
            head = partial(self._send_head, table, indices, HEAD_SAMPLES)
            return table, write_table(self._orders, table, head)
        except Exception:  # the order is worth announcing without it
            self._counters.count(wire.COUNTER_ERRORS, 1)
            return None, b""

    def _send_head(self, table: Any, indices: Any, samples: int) -> None:
        """Announces the first samples, so that copying in the right order begins before the table is written and
        read."""
        if table.rows <= HEAD_FROM_SAMPLES:
            return
        names = [name for name in table.take(list(indices[:samples])) if name]
        file = b"epoch-%d-head-%s" % (os.getpid(), os.urandom(3).hex().encode())
        write(self._orders, file, iter([os.fsencode("\0".join(names))]))
        self._ask(wire.KIND_ORDER, file, ASK_CAP_S)

    def _gone(self, stream: _Stream) -> None:
        """Ends the epoch of an iterator that is no more."""
        try:
            self._over(stream)
        except Exception:  # at the interpreter's end anything may be missing
            pass

    def _over(self, stream: _Stream) -> None:
        if stream.announced and stream.pid == os.getpid():
            stream.announced = False
            head = _packed((stream.number, 4), (0, 2), (wire.EPOCH_ENDED, 2))
            self._ask(wire.KIND_EPOCH, head + b"\0", 0)

    def _ask(self, kind: int, payload: bytes, cap_s: float) -> None:
        if monotonic_ns() < self._hung_until_ns:
            return
        if daemon.ask(self._sock, kind, payload, cap_s) == wire.REASON_TIMEOUT and cap_s:
            self._hung_until_ns = monotonic_ns() + daemon.HUNG_PAUSE_NS


def _generators(iterator: Any) -> list[Any]:
    reference = iterator.__dict__.get("_hpcstage_loader")
    return [getattr(reference() if reference is not None else None, "generator", None)]


def _in_memory() -> Any:
    return columns.torch_class("TensorDataset")


def _packed(*numbers: tuple[int, int]) -> bytes:
    return b"".join(value.to_bytes(size, "little") for value, size in numbers)


# ---- files below orders/


def write_table(directory: bytes, table: Any, before: Callable[[], None]) -> bytes:
    """Writes a table unless it is there, and returns its name. Calls `before` if it has to be written."""
    name = table_name(table)
    if not os.access(directory + name, os.F_OK):
        before()
        write(directory, name, pieces(table))
    return name


def table_name(table: Any) -> bytes:
    """Returns a name that is the same for all processes that have the same table."""
    sample = "\0".join(table.take(spread(table.rows)))
    return b"table-%d-%d-%08x" % (table.rows, table.columns, crc32(os.fsencode(sample)))


def spread(rows: int) -> list[int]:
    """Returns the first place, the last, and up to 64 places evenly between."""
    return sorted({0, rows - 1, *range(0, rows, max(1, rows // MAX_PROBES))}) if rows > 0 else []


def pieces(table: Any) -> Iterator[bytes]:
    """Yields the bytes of a table."""
    between = b""
    for begin in range(0, table.rows, PIECE_SAMPLES):
        wanted = range(begin, min(begin + PIECE_SAMPLES, table.rows))
        yield between + os.fsencode(table.joined(wanted))
        between = b"\0"


def write(directory: bytes, name: bytes, pieces: Iterator[Any]) -> None:
    """Writes a file that is whole under its name, or not there at all. Threads, and processes that have one pid in
    containers of their own, may write one table at once; they write the same."""
    temporary = directory + b".%s-" % os.urandom(4).hex().encode() + name
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        try:
            for piece in pieces:
                _write_all(fd, memoryview(piece).cast("B"))
        finally:
            os.close(fd)
        os.rename(temporary, directory + name)
    except BaseException:
        os.unlink(temporary)
        raise


def _write_all(fd: int, data: Any) -> None:
    while data:
        data = data[os.write(fd, data) :]
