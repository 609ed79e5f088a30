"""Finds what a command left in its checkpoint directory and that is in no generation, and puts it beside the others.

Owns its names in the target, NAME.RUN-ID: nothing is lost, and no resume takes it for a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from hpcstage.checkpoint.generations.manifest import GenerationManifest
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.keeping.draining import EntryDrain
from hpcstage.checkpoint.keeping.facts import CheckpointCharter, UndrainedEntry, reason
from hpcstage.checkpoint.keeping.plain import (
    described,
    is_carried,
    is_same,
    is_there,
    note_torn,
    place_copies,
    shown_in,
    size_of,
)
from hpcstage.errors import HpcstageError


def leftovers(drain: EntryDrain, newest: GenerationManifest | None) -> list[str]:
    """Returns the entries of the directory that neither the newest generation here nor that of the target has as they
    are."""
    drained = described(drain.target)
    known = [one for one in (newest, None if drained is None else drained.manifest) if one is not None]
    with suppress(OSError):
        names = shown_in(drain.tree)
        return [name for name in names if not any(_has(drain, one, name) for one in known)]
    return []


def place_leftovers(
    drain: EntryDrain, names: Sequence[str], charter: CheckpointCharter
) -> tuple[list[UndrainedEntry], dict[str, str]]:
    """Copies entries to the target, those that it does not hold as they are. Returns what could not be copied, and the
    new names."""
    missing: list[UndrainedEntry] = []
    beside: dict[str, str] = {}
    for name in names:
        try:
            charter.check_target()
            if is_carried(drain.tree, name) and not is_same(drain.tree, drain.target, name):
                beside[name] = _placed(drain, name)
        except (OSError, HpcstageError) as error:
            missing.append(UndrainedEntry(name, reason(error)))
    return missing, beside


def _placed(drain: EntryDrain, name: str) -> str:
    """Copies an entry; returns its name in the target. Another one that stands there under such a name stays."""
    more = ""
    other = drain.aside(name)
    while not is_same(drain.tree, drain.target, name, other):
        if not place_copies(drain.tree, {name: other}, drain.target, only_new=True):
            break
        more += "~"
        other = drain.aside(name, more)
    if os.path.lexists(drain.target / name) and size_of(drain.tree / name) <= size_of(drain.target / name):
        note_torn(drain.target, other, name)  # a log that has grown is larger, and stays
    return other


def _has(drain: EntryDrain, manifest: GenerationManifest, name: str) -> bool:
    return name in times_of(manifest) and is_there(drain.tree, manifest, name)
