"""The terms on which a generation is written: whether it is full, its room on the disk, who hears of progress.

Pure but for what it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hpcstage.checkpoint.generations.layout import BLOCK_BYTES
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.errors import HpcstageError
from hpcstage.units import format_share, format_size


class NoRoom(HpcstageError):
    """A generation would take more of the disk than it may."""

    def __init__(self, needed_bytes: int, budget_bytes: int) -> None:
        what = f"a generation needs {format_size(needed_bytes)} or more of the disk, and may take"
        super().__init__(f"{what} {format_size(budget_bytes)}", "drop older generations, or give it more room")


def unheard(size_bytes: int) -> None:
    """Hears of progress, and does nothing."""


@dataclass(frozen=True)
class CommitTerms:
    """The bounds of a commit. Without anything said it may take what it needs."""

    budget_bytes: int | None = None
    """The most bytes of the disk that the generation may take: its data, table and manifest."""
    after_ns: int = 0
    """The generation is made after this time, whatever the clock says: another node made the state before."""
    full_why: str = ""
    """Why the generation is to need no older one; empty: it may."""
    progress: Callable[[int], None] = unheard
    """Called with the bytes that were just read and hashed, or written, every few MB; a commit that it ends by an error
    leaves nothing."""

    def check_room(self, needed_bytes: int) -> None:
        """Raises NoRoom if so many bytes are more than the generation may take."""
        if self.budget_bytes is not None and needed_bytes > self.budget_bytes:
            raise NoRoom(needed_bytes, self.budget_bytes)


@dataclass(frozen=True)
class GenerationPolicy:
    """The bounds of a store."""

    block_bytes: int = BLOCK_BYTES
    longest_chain: int = 16
    """The most older generations that a restore may need."""
    chain_states: float = 3.0
    """The most bytes that a restore may read, and that a chain may take on the disk, in sizes of the state."""
    delta_worth: float = 0.10
    """The least share of the state that a delta must save against a full generation."""
    always: GenerationKind | None = None
    """The kind that is taken wherever it is possible, whatever was measured."""


@dataclass(frozen=True)
class KindChoice:
    """A kind and why it was taken."""

    kind: GenerationKind
    reason: str


def choose(
    policy: GenerationPolicy, state_bytes: int, changed_bytes: int, chain_length: int, chain_bytes: int
) -> KindChoice:
    """Takes a delta if it saves enough and its chain stays within its bounds.

    A full generation stores `state_bytes`; the generation before has all of them but `changed_bytes`, and a restore of
    a delta would need `chain_length` older generations with `chain_bytes` of data.
    """
    share = format_share(changed_bytes / state_bytes) if state_bytes else "0 %"
    changed = f"{share} of the state changed"
    total_bytes = chain_bytes + changed_bytes
    full = partial(KindChoice, GenerationKind.FULL)
    if policy.always is GenerationKind.FULL:
        return full("every generation was asked to be full")
    if state_bytes - changed_bytes < policy.delta_worth * state_bytes and policy.always is None:
        return full(changed)
    if chain_length > policy.longest_chain:
        return full(f"a restore would need more than {policy.longest_chain} older generations")
    if total_bytes > policy.chain_states * state_bytes:
        most = f"{policy.chain_states:g} times the state"
        return full(f"a restore would read {format_size(total_bytes)}, more than {most}")
    return KindChoice(GenerationKind.DELTA, changed)
