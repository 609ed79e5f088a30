"""Measures how long training waits for each batch of PyTorch's DataLoader.

Owns one patch: `_BaseDataLoaderIter.__next__`, where every loader of every kind hands out its batches. Batches,
exceptions and random states pass through unchanged.
"""

from __future__ import annotations

from time import monotonic_ns

import _hpcstage_attach  # type: ignore[import-not-found]
import _hpcstage_wire as wire  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def patch(module: Any) -> None:
    """Patches torch.utils.data.dataloader."""
    iterator = module._BaseDataLoaderIter
    original = iterator.__next__
    counters = _hpcstage_attach.active
    step = counters.loader_step

    def __next__(self: Any) -> Any:
        begin_ns = monotonic_ns()
        try:
            batch = original(self)
        except StopIteration:
            counters.count(wire.COUNTER_LOADER_EPOCHS, 1)
            raise
        step(begin_ns, monotonic_ns(), getattr(self, "_num_workers", 0))
        return batch

    for name in ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__"):
        setattr(__next__, name, getattr(original, name))
    __next__.__wrapped__ = original  # type: ignore[attr-defined]
    iterator.__next__ = __next__
