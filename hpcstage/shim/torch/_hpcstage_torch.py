"""Hooks into PyTorch's DataLoader: how long training waits for batches, and what an epoch will read.

The module owns the patches of `_BaseDataLoaderIter`, which every loader of every kind uses. Batches, exceptions and
random states pass through unchanged. Each hook is set by itself: where PyTorch has changed, the others still work.
"""

from __future__ import annotations

import weakref
from time import monotonic_ns

import _hpcstage_attach  # type: ignore[import-not-found]
import _hpcstage_wire as wire  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

COPIED = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")


def patch(module: Any) -> None:
    """Patches torch.utils.data.dataloader."""
    counters = _hpcstage_attach.active
    epochs: Any = None
    try:
        epochs = _follow_epochs(module, counters) if _hpcstage_attach.settings.announces else None
    except Exception:
        counters.count(wire.COUNTER_ERRORS, 1)
    _measure_waits(module._BaseDataLoaderIter, counters, epochs)


def _replace(cls: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(cls, name)
    ours = make(original)
    for attribute in COPIED:
        setattr(ours, attribute, getattr(original, attribute))
    ours.__wrapped__ = original
    setattr(cls, name, ours)


def _measure_waits(iterator: Any, counters: Any, epochs: Any) -> None:
    step = counters.loader_step

    def make(original: Any) -> Any:
        def __next__(self: Any) -> Any:
            begin_ns = monotonic_ns()
            try:
                batch = original(self)
            except StopIteration:
                counters.count(wire.COUNTER_LOADER_EPOCHS, 1)
                if epochs is not None:
                    epochs.end(self)
                raise
            step(begin_ns, monotonic_ns(), getattr(self, "_num_workers", 0))
            return batch

        return __next__

    _replace(iterator, "__next__", make)


def _follow_epochs(module: Any, counters: Any) -> Any:
    """Hooks in the announcer of epochs and returns it. A new epoch is a new iterator of the sampler, or a reset."""
    import _hpcstage_epochs  # type: ignore[import-not-found]

    epochs = _hpcstage_epochs.Epochs(_hpcstage_attach.settings, counters)
    iterator = module._BaseDataLoaderIter

    def make_init(original: Any) -> Any:
        def __init__(self: Any, loader: Any) -> None:
            self._hpcstage_loader = weakref.ref(loader)
            original(self, loader)

        return __init__

    def make_reset(original: Any) -> Any:
        def _reset(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._hpcstage_begun = None
            return original(self, *args, **kwargs)

        return _reset

    def make_next_index(original: Any) -> Any:
        def _next_index(self: Any) -> Any:
            sampler_iter = self._sampler_iter
            if self.__dict__.get("_hpcstage_begun") is not sampler_iter:
                self._hpcstage_begun = sampler_iter
                epochs.begin(self)
            return original(self)

        return _next_index

    _replace(iterator, "__init__", make_init)
    _replace(iterator, "_reset", make_reset)
    _replace(iterator, "_next_index", make_next_index)
    return epochs
