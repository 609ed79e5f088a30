"""Finds what the target still has of a run though the local directory does not have it, and nobody saw it go.

Nothing is removed for that: where events were lost, or nobody watched for a time, absence proves nothing. It is named.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from hpcstage.outputs.facts import TargetEntry, ancestors
from hpcstage.outputs.ledger import Ledger

UNSEEN = "it is not in the local directory, and nobody saw it go"


def name_unseen(root: str, ledger: Ledger, is_there: Callable[[str, TargetEntry], bool]) -> None:
    """Adds to the findings what was removed or renamed unseen; of a directory its name alone. `is_there` tells whether
    the target has a name as this run left it, or was about to. Nothing is found below a directory that cannot be
    listed."""
    findings, entries, intents = ledger.findings, ledger.entries, ledger.intents
    told = {*findings.kept, *findings.beside.values(), *(one.name.rstrip("/") for one in ledger.undrained())}
    local = _Local(root)
    for name in sorted({*entries, *intents}):
        known = [entry for entry in (entries.get(name), intents.get(name)) if entry is not None]
        if any(entry.is_others for entry in known) or any(one in told for one in ancestors(name)) or "" in told:
            continue
        if not local.has(name) and any(is_there(name, entry) for entry in known):
            told.add(name)
            findings.kept[name] = UNSEEN


class _Local:
    """Knows what a local directory has; names below links are not its own."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._directories = {"": True}

    def has(self, name: str) -> bool:
        return self._is_directory(name.rpartition("/")[0]) and os.path.lexists(f"{self._root}/{name}")

    def _is_directory(self, name: str) -> bool:
        if name not in self._directories:
            path = f"{self._root}/{name}"
            is_one = self._is_directory(name.rpartition("/")[0]) and os.path.isdir(path) and not os.path.islink(path)
            self._directories[name] = is_one
        return self._directories[name]
