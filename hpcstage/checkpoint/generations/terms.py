"""The terms on which a generation is written: its room on the disk, whether it is still wanted, who hears of progress.

Owns the errors by which a commit ends early. Pure but for what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from hpcstage.errors import HpcstageError
from hpcstage.units import format_size


class CommitCancelled(HpcstageError):
    """A commit ended because it was asked to."""

    def __init__(self) -> None:
        super().__init__("saving a generation was cancelled", "the generations before are as they were")


class NoRoom(HpcstageError):
    """A generation would take more of the disk than it may."""

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        what = f"a generation needs {format_size(needed_bytes)} or more of the disk, and may take"
        super().__init__(f"{what} {format_size(budget_bytes)}", "drop older generations, or give it more room")


class CommitPhase(Enum):
    """The parts of a commit that take long."""

    READING = "reading"
    """The state is read and hashed."""
    WRITING = "writing"
    """The blocks that the generation stores itself are written."""


@dataclass(frozen=True)
class CommitProgress:
    """How far a commit is in one phase."""

    phase: CommitPhase
    done_bytes: int
    total_bytes: int


def _never() -> bool:
    return False


def _unheard(_: CommitProgress) -> None:
    pass


@dataclass(frozen=True)
class CommitTerms:
    """The bounds of a commit. Without anything said it may take what it needs."""

    budget_bytes: int | None = None
    """The most bytes of the disk that the generation may take: its data, table and manifest."""
    after_ns: int = 0
    """The generation is made after this time, whatever the clock says: another node made the state before."""
    full_why: str = ""
    """Why the generation is to need no older one; empty: it may."""
    is_cancelled: Callable[[], bool] = _never
    """Asked every few MB; a commit that is cancelled leaves nothing."""
    progress: Callable[[CommitProgress], None] = _unheard

    def step(self, progress: CommitProgress) -> None:
        """Tells how far the commit is. Raises CommitCancelled."""
        if self.is_cancelled():
            raise CommitCancelled
        self.progress(progress)

    def check_room(self, needed_bytes: int) -> None:
        """Raises NoRoom if so many bytes are more than the generation may take."""
        if self.budget_bytes is not None and needed_bytes > self.budget_bytes:
            raise NoRoom(needed_bytes, self.budget_bytes)


class CommitMeter:
    """Adds up the bytes of one phase of a commit."""

    def __init__(self, terms: CommitTerms, phase: CommitPhase, total_bytes: int) -> None:
        self._terms = terms
        self._phase = phase
        self._total_bytes = total_bytes
        self._done_bytes = 0

    def add(self, count: int) -> None:
        """Notes that so many more bytes are done. Raises CommitCancelled."""
        self._done_bytes += count
        self._terms.step(CommitProgress(self._phase, self._done_bytes, self._total_bytes))
