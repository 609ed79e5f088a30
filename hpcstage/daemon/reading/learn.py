"""What is learnt from the files that a program opens: which index of a dataset opened what, and the order of all. Pure.

Owns what is known of each dataset of the program (its key), whether a table that was announced holds, and the order of
first opens. How well an announced order was kept is in `kept`.

A sample's files are those that its process opened between the mark of its index and the next mark.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

NONE = 0xFFFFFFFF
"""No file, in a table's ids."""
JUDGED_AFTER = 32
"""So many samples that opened files decide whether a table holds."""
MOST_KEYS = 64
MOST_TOLD = 4
MOST_INDEX = 1 << 24
MOST_COLUMNS = 8
_GROWN_BY = 1 << 12


class Rows(Protocol):
    """The files of each sample of a dataset."""

    def row(self, index: int) -> Sequence[int]:
        """Ids of a sample's files, in the order in which they are opened; nothing for an unknown index."""


@dataclass(frozen=True)
class Table:
    """Announced: so many files per sample."""

    ids: Sequence[int]
    columns: int

    def row(self, index: int) -> Sequence[int]:
        """See Rows."""
        row = self.ids[index * self.columns : (index + 1) * self.columns]
        return [id_ for id_ in row if id_ != NONE]


@dataclass(frozen=True)
class Listed:
    """From a trace: any number of files per sample."""

    offsets: Sequence[int]
    ids: Sequence[int]

    def row(self, index: int) -> Sequence[int]:
        """See Rows."""
        if not 0 <= index < len(self.offsets) - 1:
            return ()
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class Learnt:
    """Observed. Arrays with a column for each file that a sample may have: a million samples of one file are 4 MB."""

    def __init__(self) -> None:
        self.samples = 0
        self._columns: list[array[int]] = []
        """Id + 1; 0: none."""

    def row(self, index: int) -> Sequence[int]:
        """See Rows."""
        if not self._columns or not 0 <= index < len(self._columns[0]):
            return ()
        marks = (column[index] for column in self._columns if index < len(column))
        return [mark - 1 for mark in marks if mark]

    def add(self, index: int, ids: Sequence[int]) -> None:
        """What a sample opened; only its first time counts."""
        if not ids or not 0 <= index < MOST_INDEX or self.row(index):
            return
        self.samples += 1
        for position, id_ in enumerate(ids[:MOST_COLUMNS]):
            if position == len(self._columns):
                self._columns.append(array("I"))
            column = self._columns[position]
            if index >= len(column):
                column.extend(bytes(index + _GROWN_BY - len(column)))
            column[index] = id_ + 1

    def listed(self) -> tuple[array[int], array[int]]:
        """Offsets and ids, as a trace keeps them."""
        offsets, ids = array("I", [0]), array("I")
        length = len(self._columns[0]) if self._columns else 0
        for index in range(length):
            ids.extend(self.row(index))
            offsets.append(len(ids))
        while len(offsets) > 1 and offsets[-1] == offsets[-2]:
            offsets.pop()
        return offsets, ids


@dataclass
class Dataset:
    """What is known of one of the program's datasets, or of several that have one key."""

    told: list[Rows] = field(default_factory=list)
    """Announced, or of a trace."""
    judged: int = 0
    agreed: int = 0
    learnt: Learnt = field(default_factory=Learnt)
    distinct: int = 0
    """So many of its samples were announced at once, at most."""
    wrong: bool = False
    """What was told proved wrong: no table is taken any more."""

    @property
    def settled(self) -> bool:
        """Whether it is known that what was told holds."""
        return bool(self.told) and self.judged >= JUDGED_AFTER

    @property
    def known(self) -> int:
        """Changes with all that is learnt."""
        return self.judged + self.learnt.samples

    @property
    def rows(self) -> Rows:
        """The best that is known."""
        return self.told[-1] if self.told else self.learnt

    @property
    def complete(self) -> bool:
        """Nothing more can be learnt that was announced."""
        if self.told:
            return self.judged >= min(JUDGED_AFTER, self.distinct)
        return self.learnt.samples >= self.distinct

    def tell(self, rows: Rows) -> None:
        """A table was announced."""
        if not self.wrong and not any(rows is known for known in self.told):
            self.told = [*self.told[1 - MOST_TOLD :], rows]

    def judge(self, index: int, ids: Sequence[int]) -> bool:
        """A sample was read. True if by it what was told proves wrong, and is dropped."""
        if self.settled:
            return False
        self.learnt.add(index, ids)
        if not self.told:
            return False
        self.judged += 1
        self.agreed += any(not set(ids).isdisjoint(rows.row(index)) for rows in self.told)
        if self.judged < JUDGED_AFTER:
            return False
        if 2 * self.agreed >= self.judged:
            self.learnt = Learnt()
            return False
        self.told, self.wrong = [], True
        return True


class Learner:
    """Follows the opens and marks of all processes. A process is a number, such as that of its slot."""

    def __init__(self, files: int) -> None:
        self.first = array("I")
        """Ids in the order in which they were opened first."""
        self.datasets: dict[int, Dataset] = {}
        """By key."""
        self.quiet = 0
        """So many opens and marks since anything new was learnt."""
        self._seen = bytearray(files)
        self._samples: dict[int, tuple[int, int, list[int]]] = {}
        """By process: key, index and files of the sample that it reads."""

    def dataset(self, key: int) -> Dataset:
        """What is known of a dataset; beyond the bound a new one is not kept."""
        found = self.datasets.get(key)
        if found is None:
            found = Dataset()
            if len(self.datasets) < MOST_KEYS:
                self.datasets[key] = found
        return found

    def opened(self, process: int, id_: int) -> None:
        """A process opened a file."""
        self.quiet += 1
        if not self._seen[id_]:
            self.quiet = 0
            self._seen[id_] = 1
            self.first.append(id_)
        sample = self._samples.get(process)
        if sample is not None and id_ not in sample[2] and len(sample[2]) < MOST_COLUMNS:
            sample[2].append(id_)

    def marked(self, process: int, key: int, index: int) -> int | None:
        """A process goes on to another sample (-1: to none). Returns the key of a table that by this proves wrong."""
        self.quiet += 1
        last = self._samples.pop(process, None)
        if index >= 0:
            self._samples[process] = (key, index, [])
        if last is None or not last[2]:
            return None
        dataset = self.dataset(last[0])
        known = dataset.known
        wrong = dataset.judge(last[1], last[2])
        if dataset.known != known:
            self.quiet = 0
        return last[0] if wrong else None

    def lost(self, process: int) -> None:
        """Something of a process was missed: which sample it reads is not known."""
        self._samples.pop(process, None)

    @property
    def files(self) -> int:
        """Of the manifest."""
        return len(self._seen)

    @property
    def complete(self) -> bool:
        """Every file was opened, and all that was announced is known."""
        return len(self.first) == len(self._seen) and all(d.complete for d in self.datasets.values())

    def tables(self) -> dict[int, tuple[Sequence[int], Sequence[int]]]:
        """Offsets and ids of what only opens can tell, by key: observed, or of a trace that holds."""
        found: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        for key, dataset in self.datasets.items():
            rows = dataset.rows
            if isinstance(rows, Listed):
                found[key] = (rows.offsets, rows.ids)
            elif isinstance(rows, Learnt) and rows.samples:
                found[key] = rows.listed()
        return found
