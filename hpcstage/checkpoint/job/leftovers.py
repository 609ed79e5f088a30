"""Copies to the target what is in no generation: complete entries under their names, all else as NAME.RUN-ID.

Nothing is lost, and no resume takes what may be half-written for a checkpoint.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from hpcstage.checkpoint.job.place import CheckpointPlace, UndrainedEntry, reason
from hpcstage.checkpoint.job.plain import (
    copy_entries,
    described,
    give_name,
    is_carried,
    is_same,
    is_there,
    newest_ns,
    note_beside,
    note_torn,
    size_of,
)
from hpcstage.errors import HpcstageError
from hpcstage.upload.making import Making
from hpcstage.upload.target import Target


def place_completed(
    place: CheckpointPlace, names: Sequence[str], target: Target
) -> tuple[list[UndrainedEntry], dict[str, str]]:
    """Copies complete entries under their names, of which the target has no newer ones of somebody else. Returns what
    could not be copied, and the names of what lies beside."""
    root, known_as = Path(target.root), target.run.tree
    before = described(root)

    def placed(name: str) -> str:
        if is_same(place.tree, root, name, known_as=known_as):
            return name
        is_ours = before is not None and is_there(root, before.manifest, name)
        with Making(target) as making:
            if not copy_entries(place.tree, [name], making.path, known_as=known_as):
                return name
            time_ns = math.inf if is_ours else newest_ns(making.path / name)
            return give_name(making, name, target.run.suffix, time_ns)

    return _placed(names, placed)


def place_leftovers(
    place: CheckpointPlace, names: Sequence[str], target: Target
) -> tuple[list[UndrainedEntry], dict[str, str]]:
    """Copies entries that may be half-written, those that the target does not hold as they are. Returns what could not
    be copied, and the new names."""
    root, known_as = Path(target.root), target.run.tree

    def has(name: str, there: str) -> bool:
        return is_same(place.tree, root, name, there, known_as)

    def placed(name: str) -> str:
        if not is_carried(place.tree, name) or has(name, name):
            return name
        other = next(o for o in target.names_beside(name) if not target.look(o) or has(name, o))
        note_beside(root, other)
        if target.look(other) is None:
            with Making(target) as making:
                copied = copy_entries(place.tree, [name], making.path, known_as=known_as)
                if copied and making.give(name, [other]) is None:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(root / other))
        if os.path.lexists(root / name) and size_of(place.tree / name) <= size_of(root / name):
            note_torn(root, other, name)  # a log that has grown is larger, and stays
        return other

    return _placed(names, placed)


def _placed(names: Sequence[str], placed: Callable[[str], str]) -> tuple[list[UndrainedEntry], dict[str, str]]:
    """Returns what could not be placed, and the other names that entries got."""
    missing: list[UndrainedEntry] = []
    beside: dict[str, str] = {}
    for name in names:
        try:
            if (other := placed(name)) != name:
                beside[name] = other
        except (OSError, HpcstageError) as error:
            missing.append(UndrainedEntry(name, reason(error)))
    return missing, beside


def bytes_of(place: CheckpointPlace, names: Iterable[str]) -> int:
    """Returns the bytes of entries of the directory, as far as they are there."""
    found = 0
    for name in names:
        with suppress(OSError):
            found += size_of(place.tree / name)
    return found
