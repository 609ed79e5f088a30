"""Learns from the files that a program opens: which files an index of a dataset opens, and the order of all. Pure.

Owns what is known of each dataset of the program (by its key), whether an announced table is right, and the order of
first opens. How well an announced order was kept is in `adherence`.

A sample's files are those that its process opened between the mark of its index and the next mark.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

NONE = 0xFFFFFFFF
"""Stands for no file in a table's ids."""
JUDGED_AFTER = 32
"""The number of samples that opened files after which a table is judged to be right or wrong."""
MOST_KEYS = 64
MOST_TOLD = 4
MOST_INDEX = 1 << 24
MOST_COLUMNS = 8
_GROWN_BY = 1 << 12


class Rows(Protocol):
    """The files of each sample of a dataset."""

    def row(self, index: int) -> Sequence[int]:
        """Returns the ids of a sample's files in the order in which they are opened; nothing for an unknown index."""


@dataclass(frozen=True)
class Table:
    """An announced table, with `columns` files per sample."""

    ids: Sequence[int]
    columns: int

    def row(self, index: int) -> Sequence[int]:
        """See Rows."""
        row = self.ids[index * self.columns : (index + 1) * self.columns]
        return [id_ for id_ in row if id_ != NONE]


@dataclass(frozen=True)
class TracedTable:
    """A table from a trace, with any number of files per sample."""

    offsets: Sequence[int]
    ids: Sequence[int]

    def row(self, index: int) -> Sequence[int]:
        """See Rows."""
        if not 0 <= index < len(self.offsets) - 1:
            return ()
        return self.ids[self.offsets[index] : self.offsets[index + 1]]


class Learnt:
    """A table learnt from opens. It has an array for each file that a sample may have: a million samples of one file
    take 4 MB."""

    def __init__(self) -> None:
        self.samples = 0
        self._columns: list[array[int]] = []
        """By column and index: id + 1; 0 for no file."""

    def row(self, index: int) -> Sequence[int]:
        """See Rows."""
        if not self._columns or not 0 <= index < len(self._columns[0]):
            return ()
        marks = (column[index] for column in self._columns if index < len(column))
        return [mark - 1 for mark in marks if mark]

    def add(self, index: int, ids: Sequence[int]) -> None:
        """Adds the files that a sample opened; only its first time counts."""
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
        """Returns offsets and ids, as a trace stores them."""
        offsets, ids = array("I", [0]), array("I")
        length = len(self._columns[0]) if self._columns else 0
        for index in range(length):
            ids.extend(self.row(index))
            offsets.append(len(ids))
        while len(offsets) > 1 and offsets[-1] == offsets[-2]:
            offsets.pop()
        return offsets, ids


@dataclass
class LearntDataset:
    """Holds what is known of one of the program's datasets, or of several that share a key."""

    told: list[Rows] = field(default_factory=list)
    """Tables that were announced or came from a trace, the newest last."""
    judged: int = 0
    agreed: int = 0
    learnt: Learnt = field(default_factory=Learnt)
    distinct: int = 0
    """The most of its samples that were announced at once."""
    wrong: bool = False
    """Whether `told` proved wrong; no further table is taken then."""

    @property
    def settled(self) -> bool:
        """Whether the tables in `told` proved right."""
        return bool(self.told) and self.judged >= JUDGED_AFTER

    @property
    def known(self) -> int:
        """A number that changes whenever something is learnt."""
        return self.judged + self.learnt.samples

    @property
    def rows(self) -> Rows:
        """The best table that is known."""
        return self.told[-1] if self.told else self.learnt

    @property
    def complete(self) -> bool:
        """Whether nothing more can be learnt of the announced samples."""
        if self.told:
            return self.judged >= min(JUDGED_AFTER, self.distinct)
        return self.learnt.samples >= self.distinct

    def tell(self, rows: Rows) -> None:
        """Takes a table that was announced or came from a trace."""
        if not self.wrong and not any(rows is known for known in self.told):
            self.told = [*self.told[1 - MOST_TOLD :], rows]

    def judge(self, index: int, ids: Sequence[int]) -> bool:
        """Compares the files that a sample opened with `told`. Returns True if `told` thereby proves wrong and is
        dropped."""
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
    """Learns from the opens and marks of all processes. A process is a number, such as that of its slot."""

    def __init__(self, files: int) -> None:
        self.first = array("I")
        """Ids in the order in which they were first opened."""
        self.datasets: dict[int, LearntDataset] = {}
        """The program's datasets by key."""
        self.quiet = 0
        """The number of opens and marks since anything new was learnt."""
        self._seen = bytearray(files)
        self._samples: dict[int, tuple[int, int, list[int]]] = {}
        """By process: the key, index and files of the sample that it reads."""

    def dataset(self, key: int) -> LearntDataset:
        """Returns what is known of a dataset; a new one beyond MOST_KEYS is not remembered."""
        found = self.datasets.get(key)
        if found is None:
            found = LearntDataset()
            if len(self.datasets) < MOST_KEYS:
                self.datasets[key] = found
        return found

    def opened(self, process: int, id_: int) -> None:
        """Takes the open of a file by a process."""
        self.quiet += 1
        if not self._seen[id_]:
            self.quiet = 0
            self._seen[id_] = 1
            self.first.append(id_)
        sample = self._samples.get(process)
        if sample is not None and id_ not in sample[2] and len(sample[2]) < MOST_COLUMNS:
            sample[2].append(id_)

    def marked(self, process: int, key: int, index: int) -> int | None:
        """Takes the mark of a process that goes on to another sample (-1: to none). Returns the key of the dataset
        whose table thereby proves wrong, if any."""
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
        """Notes that records of a process were missed, so that the sample that it reads is not known."""
        self._samples.pop(process, None)

    @property
    def files(self) -> int:
        """The number of files in the manifest."""
        return len(self._seen)

    @property
    def complete(self) -> bool:
        """Whether every file was opened and all announced samples are known."""
        return len(self.first) == len(self._seen) and all(d.complete for d in self.datasets.values())

    def tables(self) -> dict[int, tuple[Sequence[int], Sequence[int]]]:
        """Returns, by key, offsets and ids of the tables that only opens can tell: those learnt, and those of a trace
        that have not proved wrong."""
        found: dict[int, tuple[Sequence[int], Sequence[int]]] = {}
        for key, dataset in self.datasets.items():
            rows = dataset.rows
            if isinstance(rows, TracedTable):
                found[key] = (rows.offsets, rows.ids)
            elif isinstance(rows, Learnt) and rows.samples:
                found[key] = rows.listed()
        return found
