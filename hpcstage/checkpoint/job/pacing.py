"""Saves and brings to the target what a program completed, as it was then, within a share of a processor and a rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcstage.checkpoint.entries import mark_of
from hpcstage.checkpoint.generations.files import Files
from hpcstage.checkpoint.generations.state import FileTree, FoundState, StateChanged

SHARE = 0.5
"""The share of one processor that saving and draining may take while the command runs."""
_LOOK_S = 0.05


class ProcessorShare:
    """Delays work so that it takes no more than a share of a processor, until somebody hurries it."""

    def __init__(self, share: float, hurries: Callable[[], bool]) -> None:
        self._share = share
        self._hurries = hurries
        self._since_s = time.monotonic(), time.process_time()

    def begin(self) -> None:
        """Begins a piece of work: what was not used before is not saved up."""
        self._since_s = time.monotonic(), time.process_time()

    def __call__(self, _: int) -> None:
        """Waits, after some work, until the share is kept."""
        while not self._hurries():
            due_s = self._since_s[0] + (time.process_time() - self._since_s[1]) / self._share
            if time.monotonic() >= due_s:
                break
            time.sleep(min(_LOOK_S, max(0.0, due_s - time.monotonic())))

    def and_below(self, rate: Callable[[int], object] | None) -> Callable[[int], None]:
        """Returns a function that waits, after so many bytes, until the share and a rate are kept."""

        def wait(size_bytes: int) -> None:
            self(size_bytes)
            if rate is not None:
                rate(size_bytes)

        return wait


@dataclass(frozen=True)
class MarkedTree:
    """Entries of a directory for a generation, as they were when they were complete: `marks` are of then."""

    directory: Path
    marks: Mapping[str, str]

    def scan(self, files: Files) -> FoundState:
        """See StateSource. What the program writes afterwards, the commit finds; what it wrote before, this does."""
        found = FileTree(self.directory, sorted(self.marks)).scan(files)
        for name, mark in self.marks.items():
            if mark_of(self.directory, name) != mark:
                raise StateChanged(self.directory / name)
        return found
