"""Looks whether processes that are restarted on this host would find a state of the training, and tells the others.

The module looks into one directory, that of `hpcstage run --checkpoint`: what a program saves elsewhere nobody knows.
`seats` says the same of processes that outlive changes.
"""

from __future__ import annotations

import os
import threading

from hpcstage.elastic.membership.keeping import Keeper

DIRECTORY = "HPCSTAGE_CHECKPOINT"
"""The variable that names the directory in which the program keeps its states on this host."""
LOOK_S = 1.0
END_S = 1.0


class SavedLook:
    """Looks again and again, in a thread: a disk that hangs holds nobody up."""

    def __init__(self, keeper: Keeper, directory: str) -> None:
        self._keeper = keeper
        self._directory = directory
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic saved states", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, unless the disk hangs: then it ends with the process."""
        self._stopping.set()
        self._thread.join(END_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._keeper.tell_state(has_saved(self._directory))
            self._stopping.wait(LOOK_S)


def has_saved(directory: str) -> bool | None:
    """Returns whether a directory has something that a program has left there; None where nobody can tell."""
    try:
        return any(not name.startswith(".") for name in os.listdir(directory))
    except FileNotFoundError:
        return False
    except OSError:
        return None
