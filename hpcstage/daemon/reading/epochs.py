"""Maps what loaders announced to ids and makes one order of all loaders: work that may run in a helper.

Owns the form of an EPOCH message and the files behind it: indices, tables of paths, and what was made of them.
`announcements` decides when this runs, `ordering` which order is followed.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcstage.daemon.reading import arrays
from hpcstage.daemon.reading.ahead import Positions, positions
from hpcstage.daemon.reading.streams import NONE, Stream, Table, Who, merge
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.spelling import Spelling
from hpcstage.protocol.shim import EPOCH, EPOCH_ENDED

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Announced:
    """An EPOCH message: a loader begins an epoch, or is done with one."""

    who: Who
    columns: int
    ended: bool
    name: str
    table: str


def parse(pid: int, payload: bytes) -> Announced | None:
    """Returns what a message says; None if it is malformed. Its names can lead to no file outside of orders/."""
    texts = payload[EPOCH.size :].split(b"\0")
    if len(payload) < EPOCH.size or len(texts) != 2:
        return None
    number, columns, flags = EPOCH.unpack_from(payload)
    name, table = (text.decode(errors="replace") for text in texts)
    if any(not is_name(text) for text in (name, table) if text):
        return None
    return Announced(Who(pid, number), columns, bool(flags & EPOCH_ENDED), name, table)


def is_name(text: str) -> bool:
    """Returns whether the text is the name of a file, without a directory, that does not begin with a dot."""
    return bool(text) and "/" not in text and "\0" not in text and not text.startswith(".")


@dataclass(frozen=True)
class Mapped:
    """An announced epoch in ids."""

    ids: Sequence[int]
    where: Positions


@dataclass
class MappingJob:
    """The announcements to map and what is needed for it; a forked helper has it all in memory."""

    manifest: Manifest
    orders: Path
    announced: list[Announced]
    streams: list[Stream]
    """The loaders that are alive."""
    wrong: Collection[str]
    """The names of tables that proved wrong."""
    waits: Callable[[int], bool]
    tables: dict[str, Table]
    """By name: the tables that are mapped already."""


@dataclass
class MappingOutcome:
    """The result of a job."""

    mapped: list[Mapped | None] = field(default_factory=list)
    """One for each announcement; None: its files could not be read."""
    order: Sequence[int] = ()
    """The waiting ids of all loaders."""
    tables: dict[str, Table] = field(default_factory=dict)
    """By name: the tables that this job mapped."""


def work(job: MappingJob) -> MappingOutcome:
    """Maps the announcements of a job and makes the order of all loaders."""
    outcome = MappingOutcome()
    for one in job.announced:
        mapped = None
        with suppress(OSError, ValueError):
            mapped = _mapped(job, one, outcome)
        outcome.mapped.append(mapped)
    begun = {one.who for one in job.announced}
    orders = [stream.ids for stream in job.streams if stream.who not in begun]
    orders += [mapped.ids for mapped in outcome.mapped if mapped is not None]
    outcome.order = merge(orders, job.waits, len(job.manifest))
    return outcome


def _table(job: MappingJob, name: str, columns: int, outcome: MappingOutcome) -> Table:
    known = job.tables.get(name) or outcome.tables.get(name)
    if known is None:
        known = outcome.tables[name] = Table(_table_ids(job.manifest, job.orders / name), columns)
    return known


def _mapped(job: MappingJob, one: Announced, outcome: MappingOutcome) -> Mapped:
    is_known = one.columns and one.table not in job.wrong
    rows = _table(job, one.table, one.columns, outcome) if is_known else Table((), 1)
    indices = array("I")
    indices.frombytes((job.orders / one.name).read_bytes())
    if sys.byteorder == "big":
        indices.byteswap()
    ids = _ids_of(indices, rows)
    return Mapped(ids, positions(ids, len(job.manifest)))


def _ids_of(indices: Iterable[int], rows: Table) -> array[int]:
    """Returns the files of samples in the order of `indices`, as far as they are known."""
    found = array("I")
    if rows.columns == 1:
        ids, known = rows.ids, len(rows.ids)
        found.extend(ids[index] for index in indices if index < known and ids[index] != NONE)
    else:
        for index in indices:
            found.extend(rows.row(index))
    return found


# ---- tables of paths


def _table_ids(manifest: Manifest, path: Path) -> array[int]:
    ids = array("I")
    find, spelt = manifest.find_source, Spelling(manifest)
    with open(path, "rb") as file:
        for name in _names(file):
            id_ = find(name) if name else None
            if id_ is None and name:
                id_ = find(spelt(name))
            ids.append(NONE if id_ is None else id_)
    return ids


def _names(file: Any) -> Iterator[bytes]:  # noqa: ANN401 - a binary file
    """Yields the NUL-separated names of a file, which it reads in pieces."""
    rest = b""
    while chunk := file.read(_CHUNK_BYTES):
        *names, rest = (rest + chunk).split(b"\0")
        yield from names
    yield rest


# ---- through a file, where a helper did it


def save(outcome: MappingOutcome, path: Path) -> bytes:
    """Writes an outcome to a file. The bytes that it returns only say that it did."""
    numbers: dict[str, Sequence[int]] = {"order": outcome.order}
    for position, one in enumerate(outcome.mapped):
        if one is not None:
            names = (f"ids{position}", f"starts{position}", f"places{position}")
            numbers.update(zip(names, (one.ids, one.where.starts, one.where.places), strict=True))
    for name, table in outcome.tables.items():
        numbers[f"table {name}"] = table.ids
    facts = {
        "mapped": [one is not None for one in outcome.mapped],
        "columns": {name: table.columns for name, table in outcome.tables.items()},
    }
    arrays.save(path, facts, numbers)
    return b"saved"


def load(path: Path) -> MappingOutcome:
    """Maps what `save` wrote. Raises OSError or ValueError for any other file."""
    facts, numbers = arrays.load(path)
    outcome = MappingOutcome(order=numbers["order"])
    for position, is_mapped in enumerate(facts["mapped"]):
        if not is_mapped:
            outcome.mapped.append(None)
            continue
        ids = numbers[f"ids{position}"]
        where = Positions(ids, numbers[f"starts{position}"], numbers[f"places{position}"])
        outcome.mapped.append(Mapped(ids, where))
    outcome.tables = {name: Table(numbers[f"table {name}"], columns) for name, columns in facts["columns"].items()}
    return outcome
