"""Tells which entries of a directory are complete after everything was killed, whether a generation has them or not.

Owns a file beside the directory, with the entries that were complete when the agent last looked. One that came after
that look is complete if all of its kind got their names by renames.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpcstage.checkpoint.entries import CompleteEntries, kind_of, leads_to, mark_of
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.job.known import newest_known, newest_manifest
from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace
from hpcstage.checkpoint.job.plain import described, described_run, is_there, shown_in
from hpcstage.procio import boot_id
from hpcstage.writing import replace_text


class CompletedNote:
    """The file of one run."""

    def __init__(self, place: CheckpointPlace, charter: CheckpointCharter, entries: CompleteEntries) -> None:
        """The entries that are complete now are those of the start. Raises OSError."""
        self._path = place.completed
        self._entries = entries
        self._revision = -1
        self._renamed: list[str] = []
        for earlier in map(CheckpointPlace, map(Path, charter.earlier)):
            entries.by_rename.update(dict.fromkeys(_said(earlier)["renamed"], True))
        self._began = self._marks()
        self.note()

    def note(self) -> None:
        """Notes what is complete, if that is not noted yet. What cannot be written down is as good as not seen."""
        renamed = sorted(kind for kind, is_renamed in self._entries.by_rename.items() if is_renamed)
        if self._entries.revision != self._revision or renamed != self._renamed:
            said = {"boot": boot_id(), "began": self._began, "complete": self._marks()}
            with suppress(OSError):
                replace_text(self._path, json.dumps({**said, "renamed": renamed}), 0o600)
                self._revision, self._renamed = self._entries.revision, renamed

    def _marks(self) -> dict[str, str]:
        return {name: mark for name, (mark, is_complete) in self._entries.states().items() if is_complete}


def completed_since(place: CheckpointPlace) -> list[str]:
    """Returns the complete entries of a killed run's directory that neither its newest generation has as they are nor
    its start put there. After a start of the machine nobody knows: what was written may not have reached the disk."""
    said, newest, tree = _said(place), newest_known(place), os.fspath(place.tree)
    if said.get("boot") != boot_id() or not place.tree.is_dir():
        return []
    saved = [] if newest is None else [one for one in times_of(newest) if is_there(place.tree, newest, one)]
    known = {*saved, *began_with(place)}
    found, links = list[str](), dict[str, str]()
    for name in (name for name in shown_in(place.tree) if name not in known):
        mark, goal = mark_of(place.tree, name), leads_to(tree, name)
        if goal is not None:
            links[name] = goal
        elif mark == said["complete"].get(name) or kind_of(name) in said["renamed"]:
            found.append(name)
    return found + [name for name, goal in links.items() if goal in {"", *found, *known}]


def began_with(place: CheckpointPlace) -> list[str]:
    """Returns the entries that lay in a killed run's directory at its start and are as they were then."""
    return [name for name, mark in _said(place)["began"].items() if mark_of(place.tree, name) == mark]


def is_behind(place: CheckpointPlace, target: Path) -> bool:
    """Tells whether the target has a newer generation than a run left, and one that the run did not begin with: another
    run made it."""
    drained, newest = described(target), newest_manifest(place.base)
    if drained is None or (newest is not None and drained.manifest.created_ns <= newest.created_ns):
        return False
    by = described_run(target)
    return by != CheckpointCharter.load(place).run_id and place.origins().get(by, 0) < drained.manifest.created_ns


def _said(place: CheckpointPlace) -> dict[str, Any]:
    said: dict[str, Any] = {"began": {}, "complete": {}, "renamed": []}
    try:
        return {**said, **json.loads(place.completed.read_text())}
    except (OSError, ValueError, TypeError):
        return said
