"""Chooses how a generation is stored, from what was measured. Pure; the reason is a value of the report."""

from __future__ import annotations

from dataclasses import dataclass

from hpcstage.checkpoint.generations.layout import BLOCK_BYTES
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.checkpoint.generations.xor import ProbedXor
from hpcstage.units import format_duration, format_share, format_size


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
    xor_worth: float = 0.25
    """The least share of the state that an XOR must save against a delta. It takes a core a second or more for each GB,
    and as long again for each generation of its chain. Where the disk is measured to take the saved bytes in less time,
    there is no XOR."""
    always: GenerationKind | None = None
    """The kind that is taken wherever it is possible, whatever was measured."""


@dataclass(frozen=True)
class Measurement:
    """The measured values before a generation is written."""

    state_bytes: int
    """The bytes that a full generation stores."""
    changed_bytes: int | None
    """The bytes of the blocks that the generation before does not have; None where there is none to compare with."""
    xor: ProbedXor | None
    """How well the differences of changed blocks compress; None without a probe."""
    chain_length: int = 0
    """The older generations that a restore would need."""
    chain_bytes: int = 0
    """The bytes of their data."""
    hindrance: str = ""
    """Why there is nothing to compare with, or no probe."""
    written_bytes_per_s: float | None = None
    """The bytes that the disk takes in a second, as measured with blocks that were stored as they are."""


@dataclass(frozen=True)
class KindChoice:
    """A kind and why it was taken."""

    kind: GenerationKind
    reason: str
    width: int = 0
    """The width of an XOR's words."""


def may_be_xor(state_bytes: int, changed_bytes: int | None, policy: GenerationPolicy) -> bool:
    """Tells whether a probe may change the choice: an XOR saves at most all that changed."""
    if changed_bytes is None or policy.always is not None:
        return changed_bytes is not None and policy.always is GenerationKind.XOR
    return changed_bytes >= policy.xor_worth * state_bytes


def choose(measured: Measurement, policy: GenerationPolicy) -> KindChoice:
    """Takes the kind that writes least, as far as it saves enough and the chain stays within its bounds."""
    if measured.changed_bytes is None:
        return KindChoice(GenerationKind.FULL, measured.hindrance or "there is no generation before")
    if policy.always is GenerationKind.FULL:
        return KindChoice(GenerationKind.FULL, "every generation was asked to be full")
    found = _by_bytes(measured, measured.changed_bytes, policy)
    if found.kind is GenerationKind.FULL:
        return found
    return _bounded(found, measured, measured.changed_bytes, policy)


def _by_bytes(measured: Measurement, changed_bytes: int, policy: GenerationPolicy) -> KindChoice:
    share = format_share(changed_bytes / measured.state_bytes) if measured.state_bytes else "0 %"
    text = f"{share} of the state changed"
    if measured.xor is not None and policy.always is not GenerationKind.DELTA:
        why_not = _why_no_xor(measured, measured.xor, changed_bytes, policy)
        if not why_not or policy.always is GenerationKind.XOR:
            text += f", the differences compress to {format_share(measured.xor.share)} of it"
            return KindChoice(GenerationKind.XOR, text, measured.xor.width)
        why = f", the differences compress to {format_share(measured.xor.share)} of it, {why_not}"
    else:
        why = f"; {measured.hindrance}" if measured.hindrance else ""
    saved = measured.state_bytes - changed_bytes
    if saved >= policy.delta_worth * measured.state_bytes or policy.always is not None:
        return KindChoice(GenerationKind.DELTA, text + why)
    return KindChoice(GenerationKind.FULL, text + why)


def _why_no_xor(measured: Measurement, probed: ProbedXor, changed_bytes: int, policy: GenerationPolicy) -> str:
    """Returns why differences are not worth their time; nothing if they are."""
    saved_bytes = changed_bytes * (1 - probed.share)
    if saved_bytes < policy.xor_worth * measured.state_bytes:
        return "which saves too little"
    if measured.written_bytes_per_s is None:
        return ""
    takes_s, saves_s = changed_bytes * probed.seconds_per_byte, saved_bytes / measured.written_bytes_per_s
    if takes_s <= saves_s:
        return ""
    return f"which takes {format_duration(takes_s)} and saves {format_duration(saves_s)} of writing"


def _bounded(found: KindChoice, measured: Measurement, changed_bytes: int, policy: GenerationPolicy) -> KindChoice:
    """Puts a full generation in the place of one whose chain would be too long or too large."""
    if measured.chain_length > policy.longest_chain:
        return KindChoice(
            GenerationKind.FULL, f"a restore would need more than {policy.longest_chain} older generations"
        )
    share = measured.xor.share if found.kind is GenerationKind.XOR and measured.xor is not None else 1.0
    total = measured.chain_bytes + changed_bytes * share
    if total > policy.chain_states * measured.state_bytes:
        most = f"{policy.chain_states:g} times the state"
        return KindChoice(GenerationKind.FULL, f"a restore would read {format_size(total)}, more than {most}")
    return found
