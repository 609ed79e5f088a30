"""Chooses whether a generation stores all blocks or those that changed. Pure; the reason is a value of the report."""

from __future__ import annotations

from dataclasses import dataclass

from hpcstage.checkpoint.generations.layout import BLOCK_BYTES
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.units import format_share, format_size


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
class Measurement:
    """The measured values before a generation is written."""

    state_bytes: int
    """The bytes that a full generation stores."""
    changed_bytes: int | None
    """The bytes of the blocks that the generation before does not have; None where there is none to compare with."""
    chain_length: int = 0
    """The older generations that a restore would need."""
    chain_bytes: int = 0
    """The bytes of their data."""
    damage: str = ""
    """Why the generation before is none to compare with."""


@dataclass(frozen=True)
class KindChoice:
    """A kind and why it was taken."""

    kind: GenerationKind
    reason: str


def choose(measured: Measurement, policy: GenerationPolicy) -> KindChoice:
    """Takes a delta if it saves enough and its chain stays within its bounds."""
    if measured.changed_bytes is None:
        return KindChoice(GenerationKind.FULL, measured.damage or "there is no generation before")
    if policy.always is GenerationKind.FULL:
        return KindChoice(GenerationKind.FULL, "every generation was asked to be full")
    share = format_share(measured.changed_bytes / measured.state_bytes) if measured.state_bytes else "0 %"
    text = f"{share} of the state changed"
    saved = measured.state_bytes - measured.changed_bytes
    if saved < policy.delta_worth * measured.state_bytes and policy.always is None:
        return KindChoice(GenerationKind.FULL, text)
    if measured.chain_length > policy.longest_chain:
        why = f"a restore would need more than {policy.longest_chain} older generations"
        return KindChoice(GenerationKind.FULL, why)
    total = measured.chain_bytes + measured.changed_bytes
    if total > policy.chain_states * measured.state_bytes:
        most = f"{policy.chain_states:g} times the state"
        return KindChoice(GenerationKind.FULL, f"a restore would read {format_size(total)}, more than {most}")
    return KindChoice(GenerationKind.DELTA, text)
