"""The states that a training has saved, for those that no rank has any more: in the directory of its checkpointer, and
in the one on the shared file system to which `hpcstage run --checkpoint` copies them.

The module owns which of them is newer. A node that is lost takes its own directory with it; what other nodes can
rebuild of it is copied to the shared one.
"""

from __future__ import annotations

import os

from hpcstage.elastic.seats import DRAINED
from hpcstage.torch.checkpointer import Checkpointer, NothingToLoad
from hpcstage.torch.saving import LoadedState


class SavedStates:
    """The saved states of one training, as this process can read them."""

    def __init__(self, own: Checkpointer | None) -> None:
        """`own` is the checkpointer of this training."""
        self._all = [] if own is None else [own]
        drained = os.environ.get(DRAINED)
        if own is not None and drained and os.path.realpath(drained) != os.path.realpath(own.directory):
            self._all.append(Checkpointer(drained))

    @property
    def patterns(self) -> list[str]:
        """The names of the checkpoints, for whoever looks whether there are any."""
        return [found.pattern for found in self._all]

    def load(self) -> LoadedState | None:
        """Loads the newest one, or one that is older if that is damaged. Returns None where there is none. Raises
        NothingToLoad if all are damaged."""
        damaged: NothingToLoad | None = None
        for found in sorted(self._all, key=lambda one: one.newest_step() or 0, reverse=True):
            try:
                loaded = found.load()
            except NothingToLoad as error:
                damaged = damaged or error
                continue
            if loaded is not None:
                return loaded
        if damaged is not None:
            raise damaged
        return None
