"""Guesses, when a loader is made, what it will read first, so that copying has an order before the first epoch begins.

The module owns the guess: what the sampler would give if the epoch began now. The guess is right where the sampler has
a seed or a generator of its own, and where the program draws nothing until then; what is announced when the epoch
begins takes its place. A wrong guess costs no more than copying by path does. The guess pays where a rank reads a part
of the dataset and the model takes time to build.
"""

from __future__ import annotations

import _hpcstage_sampler as samplers  # type: ignore[import-not-found]
import _hpcstage_tables as tables  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

SAMPLES = 4096


def guess(loader: Any, roots: Sequence[str]) -> list[str]:
    """Returns the files that the loader would read first; none where that is not known, or would cost too much."""
    indices = samplers.peek_first(loader._index_sampler, loader.generator, SAMPLES)
    table = tables.table_of(loader.dataset, roots) if indices else None
    if table is None or table.costly:
        return []
    return [name for name in table.take(list(indices)) if name]
