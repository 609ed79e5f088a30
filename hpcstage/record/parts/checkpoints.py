"""Defines the part of the record that says what became of the command's checkpoints. Light to import."""

from __future__ import annotations

from dataclasses import dataclass

from hpcstage.jsonform import Count, NotNegative, Seconds


@dataclass(frozen=True, kw_only=True)
class GenerationRow:
    """One state of the program that was saved on the local disk."""

    number: Count
    kind: str
    """How it was stored: full, or delta (what changed)."""
    why: str
    """Why it was stored so."""
    state_bytes: Count
    written_bytes: Count
    took_s: NotNegative
    """How long saving it took, beside the command."""
    protected: str = ""
    """In a run on several nodes the code by which it outlives the loss of nodes, or why it does not; empty: by none."""
    encode_s: Seconds = 0.0
    """How long making the parities took, beside the command."""


@dataclass(frozen=True, kw_only=True)
class StandstillPart:
    """The saves by `hpcstage.torch` in the process in which training stood still for them longest."""

    saves: Count
    seconds: Seconds
    """The time from the begin of a save until the training could go on, of all of them."""


@dataclass(frozen=True, kw_only=True)
class CheckpointsPart:
    """The checkpoints of the command: what was saved, and how."""

    protection: str
    """The losses that the checkpoints are protected against, for people."""
    restored: str = ""
    """The state in the local directory at the start; empty: none."""
    restored_s: Seconds = 0.0
    """How long the command waited for it."""
    saved_count: Count = 0
    saved: tuple[GenerationRow, ...] = ()
    """The last 100 states that were saved."""
    standstill: StandstillPart | None = None
    """Null: not measured, as no save came through `hpcstage.torch`."""
    refused: tuple[str, ...] = ()
    """States that could not be restored or saved, or are less protected than was asked, and why."""
    lost: tuple[str, ...] = ()
    """The nodes that were lost while the command ran."""

    @property
    def saving_s(self) -> float:
        """Returns how long saving the states in `saved` took."""
        return sum(row.took_s for row in self.saved)
