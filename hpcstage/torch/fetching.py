"""Loads batches by threads as PyTorch's fetcher loads them, and extends PyTorch's iterator of a loader without workers.

The module owns what a sample is to PyTorch: which parts a batch has, what is set around their loading, which errors
they raise.
"""

# ruff: noqa: ANN401 - datasets, indices and samples are of any type

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Subset
from torch.utils.data import dataloader as _dataloader

from hpcstage.torch import draws
from hpcstage.torch.threads import LoadingThreads, turn
from hpcstage.torch.units import Batch, Load

_utils: Any = getattr(_dataloader, "_utils", None)
_SingleIter: Any = getattr(_dataloader, "_SingleProcessDataLoaderIter", object)
_Fetcher: Any = getattr(getattr(_utils, "fetch", None), "_MapDatasetFetcher", object)


@dataclass(frozen=True)
class ThreadSettings:
    """Holds what a worker needs to know of its loader."""

    threads: int
    reproducible: bool
    """Whether samples draw from the global generators in turn."""


def available() -> bool:
    """Returns whether this PyTorch has the classes that are extended here."""
    return object not in (_SingleIter, _Fetcher)


class Loading:
    """Loads batches of one dataset, which are announced ahead and taken in order."""

    def __init__(self, dataset: Any, settings: ThreadSettings, pool: LoadingThreads, *, batched: bool) -> None:
        self._dataset = dataset
        self._pool = pool
        self._batched = batched
        self._separate = batched and _one_by_one(dataset)
        self._in_turn = settings.reproducible
        self._announced: deque[tuple[Any, Batch]] = deque()

    @property
    def has_enough(self) -> bool:
        """Whether what is announced beside the next batch keeps all threads busy."""
        ahead = sum(len(batch.units) for _, batch in islice(self._announced, 1, None))
        return ahead >= 2 * self._pool.threads

    def announce(self, index: Any) -> None:
        """Announces the batch (or sample) after those that are already announced."""
        around = _Around(in_turn=self._in_turn)
        self._announced.append((index, self._pool.announce([around.load(part) for part in self._parts(index)])))

    def take(self, index: Any, when_idle: Callable[[], object] | None = None) -> Any:
        """Returns what PyTorch's fetcher hands to `collate_fn`, and raises what PyTorch's fetcher raises."""
        if not self._announced or self._announced[0][0] is not index:
            self.forget()
            self.announce(index)
        _, batch = self._announced[0]
        try:
            values = self._pool.collect(batch, when_idle)
        finally:
            self._announced.popleft()
        return values if self._is_separate(index) else values[0]

    def forget(self) -> None:
        """Gives up what is announced: nobody will take it."""
        while self._announced:
            self._pool.give_up(self._announced.popleft()[1])

    def _is_separate(self, index: Any) -> bool:
        return self._separate and isinstance(index, (list, tuple))

    def _parts(self, index: Any) -> list[Load]:
        dataset = self._dataset
        if self._is_separate(index):
            return [functools.partial(operator.getitem, dataset, one) for one in index]
        if not self._batched:
            return [functools.partial(operator.getitem, dataset, index)]
        return [functools.partial(_whole, dataset, index)]


def _whole(dataset: Any, indices: Any) -> Any:
    """Loads a batch as a whole: of a dataset that fetches batches by itself, or of indices that can be gone through
    only once."""
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(indices)
    return [dataset[index] for index in indices]


def _one_by_one(dataset: Any) -> bool:
    """Returns whether the samples of a batch are asked for one by one."""
    if not getattr(dataset, "__getitems__", None):
        return True
    names = ("__getitem__", "__getitems__")
    if any(getattr(type(dataset), name, None) is not getattr(Subset, name, dataset) for name in names):
        return False
    return _one_by_one(dataset.dataset)


class _Around:
    """Sets, around the loading of a sample, what is set in the calling thread and would be different in a new one."""

    def __init__(self, *, in_turn: bool) -> None:
        self._in_turn = in_turn
        self._gradients = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        asked: Any = getattr(torch, "get_default_device", None)
        device = asked() if asked is not None else None
        self._device = device if device is not None and device.type != "cpu" else None

    def load(self, part: Load) -> Load:
        """Returns a load that does the same in any thread."""
        return functools.partial(self._load, part)

    def _load(self, part: Load) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self._inference))
            stack.enter_context(torch.set_grad_enabled(self._gradients))
            if self._device is not None:
                stack.enter_context(self._device)
            if self._in_turn:
                stack.enter_context(draws.TorchDraws(turn))
            return part()


class ThreadedFetcher(_Fetcher):  # type: ignore[misc]
    """Fetches from a map-style dataset as PyTorch's fetcher does, but by a pool of threads."""

    def __init__(self, dataset: Any, auto_collation: bool, collate_fn: Any, drop_last: bool, **own: Any) -> None:
        super().__init__(dataset, auto_collation, collate_fn, drop_last)
        self.loading = Loading(dataset, own["settings"], own["pool"], batched=auto_collation)
        self._when_idle: Callable[[], object] | None = own.get("when_idle")

    def fetch(self, possibly_batched_index: Any) -> Any:
        """Returns a batch, collated."""
        return self.collate_fn(self.loading.take(possibly_batched_index, self._when_idle))


class AheadIter(_SingleIter):  # type: ignore[misc]
    """PyTorch's iterator of a loader without workers; it asks the sampler ahead, as PyTorch does for workers."""

    def __init__(self, loader: Any, settings: ThreadSettings) -> None:
        super().__init__(loader)
        pool = LoadingThreads(settings.threads)
        parts = self._dataset, self._auto_collation, self._collate_fn, self._drop_last
        self._dataset_fetcher = ThreadedFetcher(*parts, settings=settings, pool=pool)
        self._ahead: deque[Any] = deque()
        self._over: Exception | None = None
        weakref.finalize(self, pool.close)

    def _next_index(self) -> Any:
        loading = self._dataset_fetcher.loading
        while self._over is None and not (len(self._ahead) > 1 and loading.has_enough):
            try:
                index = super()._next_index()
            except Exception as error:  # noqa: BLE001 - raised when its turn comes
                self._over = error
            else:
                loading.announce(index)
                self._ahead.append(index)
        if self._ahead:
            return self._ahead.popleft()
        try:
            assert self._over is not None
            raise self._over
        finally:
            self._over = None
