"""Brings threads into a loader's worker processes.

The module owns the way into a worker: a multiprocessing context, which is PyTorch's own extension point, runs
hpcstage's code before PyTorch's loop. Nothing is changed in the main process; in the worker, which serves one loader,
the class of its fetcher is replaced. If something is missing in this PyTorch, its workers are used as they are.
"""

# ruff: noqa: ANN401 - queues, contexts and datasets are of any type

from __future__ import annotations

import contextlib
import inspect
import logging
import queue
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import dataloader as _dataloader

from hpcstage.torch import draws
from hpcstage.torch.fetching import Loading, ThreadedFetcher, ThreadSettings
from hpcstage.torch.threads import LoadingThreads, turn

_utils: Any = getattr(_dataloader, "_utils", None)
_worker_loop: Any = getattr(getattr(_utils, "worker", None), "_worker_loop", None)
_log = logging.getLogger(__name__)
_MAP_STYLE = 0
_NEEDED = {"dataset_kind", "index_queue"}


def available() -> bool:
    """Returns whether this PyTorch has what is used here."""
    return callable(_worker_loop) and set(inspect.signature(_worker_loop).parameters) >= _NEEDED


@contextlib.contextmanager
def with_threads(loader: Any, settings: ThreadSettings) -> Iterator[None]:
    """Makes the worker processes that the loader starts in this block load with threads."""
    given = loader.multiprocessing_context
    loader.multiprocessing_context = _Context(given or torch.multiprocessing.get_context(), settings)
    try:
        yield
    finally:
        loader.multiprocessing_context = given


class _Context(BaseContext):
    """Works as another context does, but for what a loader's worker does first."""

    def __init__(self, inner: Any, settings: ThreadSettings) -> None:
        self._inner = inner
        self._settings = settings

    def get_context(self, method: str | None = None) -> Any:
        return self._inner if method is None else self._inner.get_context(method)

    def get_start_method(self, allow_none: bool = False) -> Any:
        return self._inner.get_start_method(allow_none)

    def Process(self, *args: Any, target: Any = None, **options: Any) -> Any:
        first = WorkerLoop(target, self._settings) if target is _worker_loop else target
        return self._inner.Process(*args, target=first, **options)


@dataclass(frozen=True)
class WorkerLoop:
    """Runs in a worker process: PyTorch's loop, with a fetcher and a queue of hpcstage."""

    loop: Any
    settings: ThreadSettings

    def __call__(self, *args: Any) -> None:
        """Runs in the worker's main thread, before anything of PyTorch's."""
        pool = LoadingThreads(self.settings.threads, _as_many_as_here)
        try:
            args = self._prepared(args, pool)
        except Exception as error:  # noqa: BLE001 - then as PyTorch does it
            _log.warning("threads_per_worker has no effect: %r", error)
        try:
            self.loop(*args)
        finally:
            pool.close()

    def _prepared(self, args: tuple[Any, ...], pool: LoadingThreads) -> tuple[Any, ...]:
        given = inspect.signature(self.loop).bind(*args)
        if given.arguments["dataset_kind"] != _MAP_STYLE:
            return args
        if self.settings.reproducible and not draws.install(turn):
            raise RuntimeError("the generator of numpy.random is not NumPy's own")
        ahead = AheadQueue(given.arguments["index_queue"])
        given.arguments["index_queue"] = ahead

        def fetcher(*parts: Any) -> ThreadedFetcher:
            made = ThreadedFetcher(*parts, settings=self.settings, pool=pool, when_idle=ahead.look)
            ahead.loading = made.loading
            return made

        _utils.fetch._MapDatasetFetcher = fetcher  # create_fetcher looks it up there
        return given.args


def _as_many_as_here() -> None:
    """Applies the worker's limit to this thread: PyTorch limits a worker to one processor, but libraries keep the limit
    for each thread."""
    torch.set_num_threads(torch.get_num_threads())


class AheadQueue:
    """A worker's queue of batches to load, which announces those that already wait in it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._seen: deque[Any] = deque()
        self._at_border = False
        """Whether the last item seen is no batch: what follows it may belong to another epoch."""
        self.loading: Loading | None = None

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Returns the next item, as any queue does."""
        if not self._seen:
            self._see(self._inner.get(block, timeout))
        self.look()
        item = self._seen.popleft()
        self._at_border = self._at_border and bool(self._seen)
        return item

    def look(self) -> None:
        """Announces the batches that came in, as far as there are threads for them."""
        while not self._at_border and self.loading is not None and not self.loading.has_enough:
            try:
                item = self._inner.get(False)
            except queue.Empty:
                return
            self._see(item)

    def _see(self, item: Any) -> None:
        self._seen.append(item)
        self._at_border = not isinstance(item, tuple)
        if not self._at_border and self.loading is not None:
            self.loading.announce(item[1])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
