"""Finds, by shape, which files a dataset's samples are made of: index -> paths.

The module owns the search. It reads the dataset's attributes and calls nothing of the program's. What it finds is
believed only if a few of the files exist below a dataset of the job; the daemon checks it against what is really
opened.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from itertools import accumulate
from stat import S_ISLNK, S_ISREG
from types import ModuleType

import _hpcstage_columns as columns  # type: ignore[import-not-found]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator, Sequence

MAX_DEPTH = 4
MAX_BASES = 12
MAX_HOLDERS = 8
MAX_LSTATS = 96
MAX_COLUMNS = 8
MOST_COSTLY_ROWS = 200_000
SUFFIXES = (".jpg", ".JPEG", ".png", ".jpeg", ".npy", ".npz", ".pt", ".wav", ".flac", ".tif", ".txt", ".bin")


class _Rows:
    """Rows of names: `take` gives the absolute names of some samples, `columns` names per sample, sample by sample."""

    rows: int
    columns: int

    def take(self, wanted: Sequence[int]) -> list[str]:
        """Returns the names, empty where a sample has none."""
        raise NotImplementedError

    def joined(self, wanted: Sequence[int]) -> str:
        """Returns the same with NUL between the names."""
        return "\0".join(self.take(wanted))


class FileTable(_Rows):
    """The rows of the columns that were found."""

    def __init__(self, rows: int, found: list[Any]) -> None:
        self.rows = rows
        self.columns = len(found)
        self.costly = rows > MOST_COSTLY_ROWS and any(column.costly for column in found)
        """Whether it is too much to be read as a whole."""
        self._found = found

    def take(self, wanted: Sequence[int]) -> list[str]:
        if self.columns == 1:
            return list(self._found[0].take(wanted))
        flat = [""] * (len(wanted) * self.columns)
        for number, column in enumerate(self._found):
            flat[number :: self.columns] = column.take(wanted)
        return flat

    def joined(self, wanted: Sequence[int]) -> str:
        return str(self._found[0].joined(wanted)) if self.columns == 1 else super().joined(wanted)


class _Picked(_Rows):
    """Some rows of a table, in another order."""

    def __init__(self, inner: Any, indices: Any) -> None:
        self.rows = len(indices)
        self.columns = inner.columns
        self.costly = inner.costly
        self._inner = inner
        self._indices = indices

    def take(self, wanted: Sequence[int]) -> list[str]:
        return list(self._inner.take(columns.integers(self._indices, wanted)))


class _Joined(_Rows):
    """Tables one behind the other."""

    def __init__(self, inner: list[Any]) -> None:
        self.rows = sum(table.rows for table in inner)
        self.columns = max(table.columns for table in inner)
        self.costly = any(table.costly for table in inner)
        self._inner = inner

    def take(self, wanted: Sequence[int]) -> list[str]:
        width = self.columns
        flat = [""] * (len(wanted) * width)
        for table, places, rows in self._split(wanted):
            names = table.take(rows)
            for number in range(table.columns):
                column = names[number :: table.columns]
                if isinstance(places, range):
                    flat[places.start * width + number : places.stop * width : width] = column
                else:
                    for position, place in enumerate(places):
                        flat[place * width + number] = column[position]
        return flat

    def _split(self, wanted: Sequence[int]) -> Iterator[tuple[Any, Sequence[int], Sequence[int]]]:
        """Yields for each table the places of its rows in what is wanted, and the rows."""
        begins = [0, *accumulate(table.rows for table in self._inner)]
        if isinstance(wanted, range):
            for number, table in enumerate(self._inner):
                begin = begins[number]
                first, end = max(wanted.start, begin), min(wanted.stop, begin + table.rows)
                if first < end:
                    yield table, range(first - wanted.start, end - wanted.start), range(first - begin, end - begin)
            return
        places: list[list[int]] = [[] for _ in self._inner]
        for place, index in enumerate(wanted):
            places[bisect_right(begins, index) - 1].append(place)
        for number, table in enumerate(self._inner):
            some = places[number]
            if some:
                yield table, some, [wanted[place] - begins[number] for place in some]


def table_of(dataset: Any, roots: Sequence[str]) -> Any:
    """Returns the table of a dataset, or None. `roots` are the absolute paths of the job's datasets."""
    return _table(dataset, _Search(roots), 0)


def _table(dataset: Any, search: _Search, depth: int) -> Any:
    """Returns one object per dataset, however often it is met."""
    if depth > MAX_DEPTH:
        return None
    if id(dataset) not in search.known:
        search.known[id(dataset)] = _found(dataset, search, depth)
    return search.known[id(dataset)]


def _found(dataset: Any, search: _Search, depth: int) -> Any:
    space = space_of(dataset)
    if isinstance(dataset, columns.torch_class("ConcatDataset")):
        inner = [_table(part, search, depth + 1) for part in space["datasets"]]
        return None if None in inner else _Joined(inner)
    rows = columns.length(dataset)
    if rows <= 0:
        return None
    indices, inner_one = indices_of(dataset, rows), inner_of(dataset)
    if indices is not None and (inner_one is not None or _is_frame(dataset)):
        inner_table = _table(inner_one, search, depth + 1) if inner_one is not None else _frame(space, search)
        return None if inner_table is None else _Picked(inner_table, indices)
    found = search.columns(dataset, rows)
    if found:
        return FileTable(rows, found)
    if inner_one is not None and columns.length(inner_one) == rows:
        return _table(inner_one, search, depth + 1)
    return None


def _frame(space: dict[str, Any], search: _Search) -> Any:
    """Returns the table behind the indices of a dataset of Hugging Face's, which holds both itself."""
    data = space.get("_data")
    rows = getattr(data, "num_rows", 0)
    found = search.columns_of([data], space, rows) if rows else []
    return FileTable(rows, found) if found else None


def space_of(dataset: Any) -> dict[str, Any]:
    """Returns the dataset's attributes, without calling anything of its own."""
    space = getattr(dataset, "__dict__", None)
    return space if isinstance(space, dict) else {}


def indices_of(dataset: Any, rows: int) -> Any:
    """Returns the choice of rows that a Subset or a relative of it makes, or None."""
    space = space_of(dataset)
    for name in ("indices", "_indices"):
        value = space.get(name)
        if value is not None and hasattr(type(value), "column_names"):
            value = value.column(0)
        if value is not None and columns.length(value) == rows and columns.are_integers(value):
            return value
    return None


def holders_of(dataset: Any) -> list[Any]:
    """Returns those objects in its attributes, of classes of the program's or a library's, that may hold the list in
    its place, such as a reader; no datasets, which are looked at by themselves."""
    kind = columns.torch_class("Dataset")
    values = {id(value): value for value in space_of(dataset).values()}.values()
    return [value for value in values if _is_holder(value) and not isinstance(value, kind)][:MAX_HOLDERS]


def _is_holder(value: Any) -> bool:
    if isinstance(value, (type, ModuleType)) or hasattr(type(value), "__get__"):
        return False
    return bool(space_of(value)) and not _is_frame(value)


def inner_of(dataset: Any) -> Any:
    """Returns the one dataset that it wraps, or None."""
    kind = columns.torch_class("Dataset")
    inner = [value for value in space_of(dataset).values() if isinstance(value, kind) or _is_frame(value)]
    return inner[0] if len(inner) == 1 else None


def _is_frame(value: Any) -> bool:
    """Returns whether it is shaped like a dataset of Hugging Face's: a table in `_data`, a choice of its rows in
    `_indices`."""
    space = space_of(value)
    return "_indices" in space and hasattr(type(space.get("_data")), "column_names")


class _Search:
    """Looks for columns whose names exist; asks the file system a bounded number of times."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.known: dict[int, Any] = {}
        """Tables by the identity of their datasets, which live as long as this search."""
        self._roots = tuple(root.rstrip("/") + "/" for root in roots)
        self._left = 0
        self._real: dict[str, str] = {}
        """Directories of names, and where they lead."""

    def columns(self, dataset: Any, rows: int) -> list[Any]:
        """Returns the columns of a dataset, in the order of its attributes; else those of an object that it has."""
        space = space_of(dataset)
        found = self.columns_of([dataset, *space.values()], space, rows)
        for holder in [] if found else holders_of(dataset):
            own = space_of(holder)
            found = self.columns_of(list(own.values()), {**space, **own}, rows)
            if found:
                break
        return found

    def columns_of(self, values: list[Any], space: dict[str, Any], rows: int) -> list[Any]:
        """Returns the columns among some values; `space` has the directories that names may be relative to."""
        probes = sorted({0, rows // 3, 2 * rows // 3, rows - 1})
        unique = {id(value): value for value in values}.values()
        candidates = [column for value in unique for column in columns.columns_in(value, rows, probes)]
        bases = _bases(space) if candidates else []
        found = self._existing(candidates, probes, bases, [""])
        return found or self._existing(candidates, probes, bases, _suffixes(space))

    def _existing(self, candidates: list[Any], probes: list[int], bases: list[str], suffixes: list[str]) -> list[Any]:
        self._left = MAX_LSTATS
        found: dict[tuple[str, ...], Any] = {}
        for column in candidates:
            if self._settle(column, probes, bases, suffixes):
                found.setdefault(tuple(column.take(probes)), column)
        return list(found.values())[:MAX_COLUMNS]

    def _settle(self, column: Any, probes: list[int], bases: list[str], suffixes: list[str]) -> bool:
        """Finds the directory and the suffix with which the column's names exist. Returns whether there are such."""
        names = [columns.as_text(name) for name in column.names(probes)]
        present = [name for name in names if name]
        if not present or (suffixes != [""] and "." in os.path.basename(present[0])):
            return False
        column.tidy = any("./" in name or "//" in name for name in present)
        column.costly = any(isinstance(name, os.PathLike) for name in column.names(probes))
        absolute = present[0][0] == "/"
        for suffix in suffixes:
            for base in [""] if absolute else bases:
                column.prefix, column.suffix = base and base + "/", suffix
                if all(self._exists(column.whole(name)) for name in present):
                    return True
        return False

    def _exists(self, path: str) -> bool:
        if self._left <= 0 or not (path.startswith(self._roots) or self._leads_below(path)):
            return False
        self._left -= 1
        try:
            mode = os.lstat(path).st_mode
        except (OSError, ValueError):
            return False
        return S_ISREG(mode) or S_ISLNK(mode)

    def _leads_below(self, path: str) -> bool:
        """Returns whether a path of another spelling leads below a dataset; the daemon looks where."""
        directory = os.path.dirname(path)
        if directory not in self._real:
            self._left -= directory.count("/")
            try:
                self._real[directory] = os.path.realpath(directory) + "/"
            except (OSError, ValueError):
                self._real[directory] = ""
        if self._real[directory].startswith(self._roots):
            return True
        self._left -= 1
        try:
            return os.path.islink(path) and os.path.realpath(path).startswith(self._roots)
        except (OSError, ValueError):
            return False


def _texts(space: dict[str, Any]) -> list[str]:
    texts = [columns.as_text(value) for value in list(space.values()) if columns.is_name(value)]
    return [text for text in texts if text][:MAX_BASES]


def _bases(space: dict[str, Any]) -> list[str]:
    """Returns directories that the names may be relative to: the dataset's own, those below them, the working
    directory."""
    texts = _texts(space)
    bases = [os.path.abspath(text) for text in texts]
    bases += [os.path.abspath(os.path.join(a, b)) for a in texts for b in texts if a is not b and b[0] != "/"]
    try:
        bases.append(os.getcwd())
    except OSError:
        pass
    return list(dict.fromkeys(base.rstrip("/") for base in bases))


def _suffixes(space: dict[str, Any]) -> list[str]:
    own = [text if text[0] == "." else "." + text for text in _texts(space) if len(text) < 8 and "/" not in text]
    return list(dict.fromkeys([*own, *SUFFIXES]))
