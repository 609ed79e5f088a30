"""Makes orders, sequences of ids, from lists, the manifest, a trace, or a file.

This module owns `order.bin` and turns paths into ids. A wrong order costs time, never correctness, so unknown paths are
counted and left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.plan.dataset.pathlist import PathList
from hpcstage.plan.dataset.roots import printable
from hpcstage.plan.types import ORDER_WORDS, Order
from hpcstage.writing import replacing

AUTO, MANIFEST, GIVEN, TRACE, SAMPLER = ORDER_WORDS
EXAMPLES = 3
_MAGIC = b"hpcstage order 2 "


class ListedOrder(NamedTuple):
    """An order, and the paths of lists that it lacks."""

    order: Order
    unknown: int = 0
    """Paths of the lists that are no file of the manifest and no directory of files."""
    examples: tuple[bytes, ...] = ()
    """The first of the unknown paths."""


def build(
    manifest: Manifest, setting: str | None, *, lists: Sequence[PathList] = (), trace: Order | None = None
) -> ListedOrder:
    """Returns the order with which a run starts, and which paths of the lists the manifest lacks.

    `setting` is `manifest`, `given`, `trace`, `sampler` (the order is by path until a sampler announces one), the name
    of a list, which is then among `lists`, or `auto` (or None): a list if there is one, else a trace, else by path.
    """
    listed = from_paths(manifest, (path for item in lists for path in item.paths), GIVEN)
    if lists and setting not in (MANIFEST, TRACE, SAMPLER):
        return listed
    if trace is not None and setting in (None, AUTO, TRACE):
        return listed._replace(order=trace)
    return listed._replace(order=Order(MANIFEST, array("I", range(len(manifest)))))


def from_ids(ids: Iterable[int], files: int, provenance: str) -> Order:
    """Makes an order of ids; leaves out repeated ids after the first, and ids that the manifest lacks."""
    seen = bytearray(files)
    kept = array("I")
    for file_id in ids:
        if 0 <= file_id < files and not seen[file_id]:
            seen[file_id] = 1
            kept.append(file_id)
    return Order(provenance, kept)


def from_paths(manifest: Manifest, paths: Iterable[bytes], provenance: str) -> ListedOrder:
    """Makes an order of absolute paths: duplicates stand at their first place, a directory stands for its files."""
    seen = bytearray(len(manifest))
    ids = array("I")
    unknown = 0
    examples: list[bytes] = []
    find = manifest.find_source
    for path in paths:
        found = find(path)
        if found is not None:
            if not seen[found]:
                seen[found] = 1
                ids.append(found)
            continue
        below = manifest.ids_below(path)
        if not below:
            unknown += 1
            if len(examples) < EXAMPLES:
                examples.append(path)
        for file_id in below:
            if not seen[file_id]:
                seen[file_id] = 1
                ids.append(file_id)
    return ListedOrder(Order(provenance, ids), unknown, tuple(examples))


def missing_text(listed: ListedOrder, lists: Sequence[PathList]) -> str:
    """Says which entries of the lists name no file; empty if all do."""
    if not listed.unknown:
        return ""
    entries = sum(len(item.paths) for item in lists)
    more = ", ..." if listed.unknown > len(listed.examples) else ""
    names = ", ".join(map(printable, listed.examples)) + more
    what = f"{listed.unknown:,} of {entries:,} entries of {' and '.join(x.name for x in lists)}"
    return f"{what} name no file that can be staged: {names}"


MISSING_REMEDY = "correct the list, or go on: the others are staged"


def complete(order: Order, files: int) -> array[int]:
    """Returns all ids: the order's, then those that it leaves out, in the manifest's order."""
    if len(order.ids) == files:
        return order.ids
    seen = bytearray(files)
    for file_id in order.ids:
        seen[file_id] = 1
    return order.ids + array("I", (i for i in range(files) if not seen[i]))


def save(order: Order, path: Path) -> None:
    """Writes an order atomically: a line with its provenance, and the ids."""
    with replacing(path) as file:
        file.write(_MAGIC + order.provenance.encode() + b"\n")
        file.write(order.ids)


def load(path: Path, files: int | None = None) -> Order:
    """Reads what `save` wrote; ids must be below `files`. Raises UsageError if the file is not an order."""
    try:
        head, _, content = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise UsageError(
            f"cannot read the order {path}: {error.strerror}", "name a run directory of hpcstage"
        ) from None
    if head.startswith(_MAGIC) and len(content) % 4 == 0:
        ids = array("I", content)
        if files is None or not ids or max(ids) < files:
            return Order(head.removeprefix(_MAGIC).decode("utf-8", "replace"), ids)
    raise UsageError(f"{path} is damaged or not an order of hpcstage for this manifest", "start a new run")
