"""Tells the daemon, before the first batch of an epoch, what the epoch will read, and when the epoch is over.

The module owns the numbers of streams and epochs. `_hpcstage_sampler` knows what an epoch reads, `_hpcstage_tables`
which file an index stands for.
"""

from __future__ import annotations

import os
import sys
import weakref
from functools import partial
from time import monotonic_ns

import _hpcstage_columns as columns  # type: ignore[import-not-found]
import _hpcstage_daemon as daemon  # type: ignore[import-not-found]
import _hpcstage_files as files  # type: ignore[import-not-found]
import _hpcstage_sampler as samplers  # type: ignore[import-not-found]
import _hpcstage_tables as tables  # type: ignore[import-not-found]
import _hpcstage_wire as wire  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

ASK_CAP_S = 1.0
HEAD_SAMPLES = 2048
HEAD_FROM_SAMPLES = 4096
COSTLY_SAMPLES = 65_536
"""The number of samples that are announced of a dataset whose table costs too much."""
MAP_STYLE = 0
ANNOUNCED_IN = (wire.STATE_STARTING, wire.STATE_SCANNING, wire.STATE_STAGING)


class PageHeader:
    """Reads the page's header. Raises OSError where there is no page."""

    def __init__(self, page: bytes) -> None:
        import mmap

        fd = os.open(page, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapped = mmap.mmap(fd, wire.PAGE_HEADER_BYTES, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self._words = memoryview(mapped).cast("I")

    @property
    def state(self) -> int:
        """Returns the daemon's state."""
        return int(self._words[wire.STATE_OFFSET // 4])

    @property
    def logging(self) -> bool:
        """Whether opens are to be logged."""
        return bool(self._words[wire.LOGGING_OFFSET // 4])


class _FollowedLoader:
    """A loader of this process: its stream numbers (one, unless iterators of it live side by side) and epochs."""

    def __init__(self, pid: int, *, lives: bool) -> None:
        self.pid = pid
        self.lives = lives
        """Whether this process notices when the loader goes."""
        self.free: list[int] = []
        self.epochs = 0
        self.expected: set[int] = set()
        """Streams that the daemon expects to go on."""


class _Run:
    """The state of one iterator; it must not hold the iterator."""

    def __init__(self, loader: _FollowedLoader, stream: int) -> None:
        self.loader = loader
        self.stream = stream
        self.pid = loader.pid
        self.epoch = 0
        self.announced = False
        self.formula = ""


class Epochs:
    """Announces the epochs of this process's loaders. Nothing that it does raises into the program."""

    def __init__(self, config: Any, counters: Any) -> None:
        self._orders = config.node_dir + b"/orders/"
        self._sock = config.sock
        self._roots = [os.fsdecode(source) for source, _ in config.maps]
        self._header = PageHeader(config.page)
        self._counters = counters
        self._hung_until_ns = 0
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._streams = 0
        self._loaders: dict[int, tuple[Any, _FollowedLoader]] = {}

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
            run = iterator.__dict__.get("_hpcstage_run")
            if run is not None:
                self._over(run, run.formula if run.loader.lives else "")
        except Exception:
            self._counters.count(wire.COUNTER_ERRORS, 1)

    def _begin(self, iterator: Any) -> None:
        run = self._run_of(iterator)
        run.epoch = run.loader.epochs
        run.loader.epochs += 1
        if not self._wanted() or isinstance(iterator._dataset, _in_memory()):
            return
        try:
            indices = samplers.peek(iterator._index_sampler, _generators(iterator), iterator._sampler_iter)
        except Exception:  # the sampler's own, which comes again when the program asks it
            indices = None
        if not indices:
            self._over(run, "")
            return
        run.formula = samplers.formula(iterator._index_sampler)
        self._announce(run, iterator._dataset, indices)

    def _wanted(self) -> bool:
        if monotonic_ns() < self._hung_until_ns:
            return False
        return self._header.state in ANNOUNCED_IN or self._header.logging

    def _run_of(self, iterator: Any) -> _Run:
        if self._pid != os.getpid():
            self._start()  # a forked child numbers its own
        run: _Run | None = iterator.__dict__.get("_hpcstage_run")
        if run is None or run.pid != self._pid:
            loader = self._loader_of(iterator)
            if not loader.free:
                self._streams += 1
                loader.free.append(self._streams)
            run = _Run(loader, loader.free.pop(0))
            iterator._hpcstage_run = run
            weakref.finalize(iterator, self._gone, run)
        return run

    def _loader_of(self, iterator: Any) -> _FollowedLoader:
        reference = iterator.__dict__.get("_hpcstage_loader")
        loader = reference() if reference is not None else None
        if loader is None:
            return _FollowedLoader(self._pid, lives=False)
        known = self._loaders.get(id(loader))
        if known is None or known[0]() is not loader:
            known = (weakref.ref(loader), _FollowedLoader(self._pid, lives=True))
            self._loaders[id(loader)] = known
            weakref.finalize(loader, self._loader_gone, id(loader), known[1])
        return known[1]

    def _announce(self, run: _Run, dataset: Any, indices: Any) -> None:
        table, table_name = self._table(dataset, indices)
        name = self._file_name(run)
        if sys.byteorder == "big":
            indices.byteswap()
        files.write(self._orders, name, iter([indices]))
        texts = b"\0".join((name, table_name, run.formula.encode()))
        numbers = (run.stream, 4), (run.epoch, 4), (table.columns if table_name else 0, 2), (0, 2)
        run.announced = True
        run.loader.expected.discard(run.stream)
        self._ask(wire.KIND_EPOCH, _packed(*numbers) + texts, ASK_CAP_S)

    def _file_name(self, run: _Run) -> bytes:
        return b"epoch-%d-%d-%d-%s" % (os.getpid(), run.stream, run.epoch, os.urandom(3).hex().encode())

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
            return table, files.write_table(self._orders, table, head)
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
        files.write(self._orders, file, iter([os.fsencode("\0".join(names))]))
        self._ask(wire.KIND_ORDER, file, ASK_CAP_S)

    def _gone(self, run: _Run) -> None:
        """Ends the epoch of an iterator that is no more."""
        try:
            if run.pid == os.getpid():
                run.loader.free.append(run.stream)
                self._over(run, "")
        except Exception:  # at the interpreter's end anything may be missing
            pass

    def _loader_gone(self, identity: int, loader: _FollowedLoader) -> None:
        """Ends the epochs that were expected of a loader that is no more."""
        try:
            if loader.pid == os.getpid():
                self._loaders.pop(identity, None)
                for stream in loader.expected:
                    self._send_end(stream, loader.epochs, "")
        except Exception:
            pass

    def _over(self, run: _Run, formula: str) -> None:
        if run.announced and run.pid == os.getpid():
            run.announced = False
            if formula:
                run.loader.expected.add(run.stream)
            self._send_end(run.stream, run.epoch, formula)

    def _send_end(self, stream: int, epoch: int, formula: str) -> None:
        numbers = (stream, 4), (epoch, 4), (0, 2), (wire.EPOCH_ENDED, 2)
        self._ask(wire.KIND_EPOCH, _packed(*numbers) + b"\0\0" + formula.encode(), 0)

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
