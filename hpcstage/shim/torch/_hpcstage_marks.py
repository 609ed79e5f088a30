"""Marks in the log of opens which sample the coming opens are for, while the daemon asks for that.

The module owns the list that marks each index as it is handed out, the identity (key) of a dataset within the job, and
this process's view of the page's header. Where a dataset fetches a whole batch by itself nothing can be marked.
"""

from __future__ import annotations

import os
import weakref
from operator import index as as_int
from zlib import crc32

import _hpcstage_columns as columns  # type: ignore[import-not-found]
import _hpcstage_tables as tables  # type: ignore[import-not-found]
import _hpcstage_wire as wire  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator

    Mark = Callable[[int, int], Any]

NONE = -1
_keys: dict[int, tuple[Any, int, int]] = {}
MAX_PROBES = 64
MAX_DEPTH = 4


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


class MarkedBatch(list):  # type: ignore[type-arg]
    """Holds a batch's indices: each is marked before it is handed out, and the end of them when the last was used."""

    __slots__ = ("_key", "_mark")

    def __init__(self, indices: Any, mark: Mark, key: int) -> None:
        super().__init__(indices)
        self._mark = mark
        self._key = key

    def __iter__(self) -> Iterator[Any]:
        mark, key = self._mark, self._key
        try:
            for index in list.__iter__(self):
                _marked(mark, key, index)
                yield index
        finally:
            _marked(mark, key, NONE)


def _marked(mark: Mark, key: int, index: Any) -> None:
    try:
        mark(key, as_int(index))
    except Exception:  # an index of the program's own kind
        pass


def patch(fetch: Any, mark: Mark, header: PageHeader) -> None:
    """Patches torch.utils.data._utils.fetch."""
    fetcher = fetch._MapDatasetFetcher
    original = fetcher.fetch

    def marked_fetch(self: Any, possibly_batched_index: Any) -> Any:
        if not header.logging:
            return original(self, possibly_batched_index)
        key = _key_for(self)
        if key < 0:
            return original(self, possibly_batched_index)
        if self.auto_collation:
            if isinstance(possibly_batched_index, (list, tuple)):
                possibly_batched_index = MarkedBatch(possibly_batched_index, mark, key)
            return original(self, possibly_batched_index)
        _marked(mark, key, possibly_batched_index)
        try:
            return original(self, possibly_batched_index)
        finally:
            _marked(mark, key, NONE)

    for name in ("__module__", "__name__", "__qualname__", "__doc__"):
        setattr(marked_fetch, name, getattr(original, name))
    marked_fetch.__wrapped__ = original  # type: ignore[attr-defined]
    fetcher.fetch = marked_fetch


def _key_for(fetcher: Any) -> int:
    """Returns the key of a fetcher's dataset, and keeps it there; -1 where the samples cannot be told apart."""
    key = fetcher.__dict__.get("_hpcstage_key")
    if key is None:
        try:
            key = key_of(fetcher.dataset) if _one_by_one(fetcher.dataset) else -1
        except Exception:
            key = -1
        fetcher._hpcstage_key = key
    return int(key)


def _one_by_one(dataset: Any) -> bool:
    """Returns whether the samples of a batch are fetched in the order of its list, each after its index was handed out.
    A Subset of a Subset takes all indices of the batch before it reads the first sample."""
    if not callable(getattr(dataset, "__getitems__", None)):
        return True
    subset = columns.torch_class("Subset")
    own = getattr(type(dataset), "__getitems__", None)
    if own is not getattr(subset, "__getitems__", subset):
        return False
    return not callable(getattr(dataset.dataset, "__getitems__", None))


def key_of(dataset: Any) -> int:
    """Returns the identity of a dataset within the job, the same in every process that has it. It is made from the
    dataset's class, its length and what tells datasets of one class apart, as far as that does not change by itself."""
    rows = columns.length(dataset)
    known = _keys.get(id(dataset))
    if known is not None and known[0]() is dataset and known[1] == rows:
        return known[2]
    key = crc32(repr(_identity(dataset, 0)).encode("utf-8", "surrogatepass"))
    try:
        _keys[id(dataset)] = (weakref.ref(dataset), rows, key)  # it may set attributes while it is read
    except TypeError:
        pass
    return key


def _identity(dataset: Any, depth: int) -> list[Any]:
    rows = columns.length(dataset)
    parts: list[Any] = ["%s.%s:%d" % (type(dataset).__module__, type(dataset).__qualname__, rows)]
    space = tables.space_of(dataset)
    for one in (space, *map(tables.space_of, tables.holders_of(dataset))):
        parts += _facts(one, rows)
    indices = tables.indices_of(dataset, rows) if rows > 0 else None
    if indices is not None:
        parts.append(columns.integers(indices, spread(rows)))
    inner = space.get("datasets") if depth < MAX_DEPTH else None
    if isinstance(inner, (list, tuple)):
        parts += [_identity(part, depth + 1) for part in inner[:MAX_PROBES]]
    one = tables.inner_of(dataset) if depth < MAX_DEPTH else None
    return parts + ([_identity(one, depth + 1)] if one is not None else [])


def _facts(space: dict[str, Any], rows: int) -> list[Any]:
    facts: list[Any] = []
    for name, value in space.items():
        if isinstance(value, (str, bool, os.PathLike)):
            facts.append((name, str(value)))
        elif isinstance(value, (list, tuple)) and len(value) == rows and columns.reader(value):
            facts.append((name, [columns.as_text(_first(value[place])) for place in (0, -1)]))
    return facts


def _first(entry: Any) -> Any:
    return entry[0] if isinstance(entry, (list, tuple)) and entry else entry


def spread(rows: int) -> list[int]:
    """Returns the first place, the last, and up to 64 places evenly between."""
    return sorted({0, rows - 1, *range(0, rows, max(1, rows // MAX_PROBES))}) if rows > 0 else []
