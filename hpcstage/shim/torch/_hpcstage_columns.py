"""Reads names out of the sequences that datasets keep them in: lists, arrays, data frames, Arrow-like columns.

The module owns the forms: which values are sequences that can be read without calling the program's own code, and where
in their entries the names are. It does not know what the names belong to.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Sequence, Union

    Reader = Callable[[Sequence[int]], list[Any]]
    Place = Union[int, str, None]

MAX_PLACES = 16
MAX_NAME = 4096


class Column:
    """Gives one name per sample. `place` is where the name is in an entry; None means that the entry is the name."""

    def __init__(self, read: Reader, place: Place) -> None:
        self._read = read
        self._place = place
        self.prefix = ""
        self.suffix = ""
        self.tidy = False
        """Whether names are spelt with dots that the daemon would not understand."""
        self.costly = False
        """Whether reading a name leaves something behind: a PathLike keeps its text."""

    def names(self, wanted: Sequence[int]) -> list[Any]:
        """Returns the names as the program has them: str, bytes, PathLike, or anything else where there is none."""
        rows = self._read(wanted)
        return rows if self._place is None else [row[self._place] for row in rows]

    def take(self, wanted: Sequence[int]) -> list[str]:
        """Returns the absolute names of these samples; a name is empty where there is none."""
        return self.joined(wanted).split("\0") if len(wanted) else []

    def joined(self, wanted: Sequence[int]) -> str:
        """Returns the same with NUL between the names."""
        names = self.names(wanted)
        try:
            return self._alike(names)
        except TypeError:
            plain = not (self.prefix or self.suffix or self.tidy)
            texts = [name if plain and type(name) is str else self.whole(name) for name in names]
            return "\0".join(["" if "\0" in text else text for text in texts])

    def _alike(self, names: list[Any]) -> str:
        """Makes of all names at once what `whole` makes of each. Raises TypeError where not all are spelt alike."""
        text = os.fsdecode(b"\0".join(names)) if names and isinstance(names[0], bytes) else "\0".join(names)
        if text.count("\0") != len(names) - 1:
            raise TypeError
        prefix, suffix = self.prefix, self.suffix
        if self.tidy:
            text, prefix = _tidied(text, len(names), prefix), ""
        elif (prefix or suffix) and ("\0\0" in "\0" + text + "\0" or (prefix and "\0/" in "\0" + text)):
            raise TypeError  # some are absolute already, or are none
        if not prefix and not suffix:
            return text
        return prefix + text.replace("\0", suffix + "\0" + prefix) + suffix

    def whole(self, name: Any) -> str:
        """Returns one name, made absolute."""
        text = as_text(name)
        if not text:
            return ""
        path = text if text[0] == "/" else self.prefix + text
        return os.path.normpath(path + self.suffix) if self.tidy else path + self.suffix


def _tidied(text: str, count: int, prefix: str) -> str:
    """Returns names that all begin with the same dots, without the dots and absolute."""
    text = "\0" + text
    end = max(text.find("\0", 1), 0) or len(text)
    head = text[: max(text.rfind("./", 0, end), text.rfind("//", 0, end)) + 2]
    if text.count(head) != count:
        raise TypeError
    begin = os.path.normpath(head[1:] if head[1:2] == "/" else prefix + head[1:])
    text = text.replace(head, "\0" + (begin if begin[-1:] == "/" else begin + "/"))
    if "./" in text or "//" in text:
        raise TypeError
    return text[1:]


def as_text(name: Any) -> str:
    """Returns a name as text, or nothing if it is none."""
    if not is_name(name):
        return ""
    text = os.fsdecode(name)
    return "" if "\0" in text else text


def is_name(value: Any) -> bool:
    """Returns whether a value can be a file's name."""
    if isinstance(value, (str, bytes)):
        return 0 < len(value) < MAX_NAME
    return isinstance(value, os.PathLike)


def reader(value: Any) -> Reader | None:
    """Returns how to read the entries of a sequence, or None if it is not one that is known."""
    if isinstance(value, (list, tuple)):
        plain = type(value).__getitem__ in (list.__getitem__, tuple.__getitem__)
        return _read_list(value) if plain else None
    package = type(value).__module__.split(".")[0]
    if package == "numpy" and getattr(value, "ndim", 0) in (1, 2) and value.dtype.kind in "USO":
        return _read_array(value)
    if package == "pandas" and hasattr(value, "iloc") and getattr(value, "ndim", 0) == 1:
        return _read_array(value.iloc)
    if callable(getattr(type(value), "to_pylist", None)) and callable(getattr(type(value), "take", None)):
        return _read_arrow(value)
    return None


def _read_list(value: Any) -> Reader:
    def read(wanted: Sequence[int]) -> list[Any]:
        if isinstance(wanted, range):
            return list(value[wanted.start : wanted.stop])
        return [value[index] for index in wanted]

    return read


def _read_array(value: Any) -> Reader:
    def read(wanted: Sequence[int]) -> list[Any]:
        rows = value[wanted.start : wanted.stop] if isinstance(wanted, range) else value[list(wanted)]
        return list(rows.tolist())

    return read


def _read_arrow(value: Any) -> Reader:
    def read(wanted: Sequence[int]) -> list[Any]:
        if isinstance(wanted, range):
            return _values(value.slice(wanted.start, len(wanted)))
        return _values(value.take(list(wanted)))

    return read


def _values(some: Any) -> list[Any]:
    """Returns the values of an Arrow-like column. Texts come several times faster by way of an array."""
    if str(getattr(some, "type", "")) in ("string", "large_string"):
        try:
            return list(some.to_numpy(zero_copy_only=False).tolist())
        except (AttributeError, TypeError):  # an older one
            pass
    return list(some.to_pylist())


def columns_in(value: Any, rows: int, probes: Sequence[int]) -> list[Column]:
    """Returns the columns of names that a value holds: one, or one per place in its entries. The probes are where to
    look."""
    found: list[Column] = []
    for sequence in _sequences(value):
        read = reader(sequence)
        if read is not None and length(sequence) == rows:
            found += [Column(read, place) for place in _places(read(list(probes)))]
    return found


def _sequences(value: Any) -> list[Any]:
    """Returns a value, or what it holds if it is a table or a dictionary of sequences."""
    if type(value) is dict:
        return list(value.values()) if len(value) <= MAX_PLACES else []
    package = type(value).__module__.split(".")[0]
    if package == "pandas" and getattr(value, "ndim", 0) == 2:
        return [value.iloc[:, number] for number in range(min(value.shape[1], MAX_PLACES))]
    if hasattr(type(value), "column_names") and callable(getattr(type(value), "column", None)):
        found = [value.column(name) for name in list(value.column_names)[:MAX_PLACES]]
        return [part for column in found for part in _parts(column)]
    return [value]


def _parts(column: Any) -> list[Any]:
    """Returns the fields of an Arrow column of structures: beside a name there may be all that is in the file."""
    flatten = getattr(column, "flatten", None)
    structured = callable(flatten) and str(getattr(column, "type", "")).startswith("struct<")
    return list(column.flatten())[:MAX_PLACES] if structured else [column]


def length(sequence: Any) -> int:
    """Returns the length of a sequence, or -1."""
    try:
        return len(sequence)
    except Exception:  # a dataset need not have one
        return -1


def _places(entries: list[Any]) -> list[Place]:
    """Returns where the names are: in the entries themselves, or at places of theirs."""
    if all(is_name(entry) or entry is None for entry in entries):
        return [None] if any(is_name(entry) for entry in entries) else []
    first = entries[0]
    places: list[Any] = []
    if isinstance(first, dict) and all(isinstance(entry, dict) for entry in entries):
        places = [key for key in first if all(key in entry for entry in entries)]
    elif all(isinstance(entry, (list, tuple)) and len(entry) == len(first) for entry in entries):
        places = list(range(len(first)))
    return [place for place in places[:MAX_PLACES] if all(is_name(entry[place]) for entry in entries)]


def integers(sequence: Any, wanted: Sequence[int]) -> list[int]:
    """Returns some numbers of a list, range, array, tensor or Arrow-like column of numbers, as integers."""
    return [int(number) for number in numbers(sequence, wanted)]


def numbers(sequence: Any, wanted: Sequence[int]) -> Sequence[Any]:
    """Returns the same numbers, of whatever type they are."""
    if hasattr(type(sequence), "to_pylist"):
        return _read_arrow(sequence)(wanted)
    if isinstance(wanted, range):
        some = sequence[wanted.start : wanted.stop]
    elif isinstance(sequence, (list, tuple, range)):
        some = [sequence[index] for index in wanted]
    else:
        some = sequence[list(wanted)]
    found: Sequence[Any] = some.tolist() if hasattr(some, "tolist") else some
    return found


def are_integers(sequence: Any) -> bool:
    """Returns whether the sequence begins with an integer of 0 or more."""
    try:
        return length(sequence) > 0 and integers(sequence, range(1))[0] >= 0
    except (TypeError, ValueError, IndexError, KeyError):
        return False


def torch_class(name: str) -> Any:
    """Returns a class of torch.utils.data, if it is loaded; else one of which nothing is an instance."""
    module = sys.modules.get("torch.utils.data")
    return getattr(module, name, _Nothing)


class _Nothing:
    pass
