"""Says where each tensor of a state stands in host memory, which is also its place in the checkpoint's file. Pure.

Large tensors begin at a block of the generations (`checkpoint/generations`), which then finds those that did not change
wherever they stand; small ones are packed behind them. The places follow from the tensors' forms and order alone, so a
state that is saved again has them where they were.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hpcstage.checkpoint.generations.layout import BLOCK_BYTES

PAGE_BYTES = 4096
"""Writing past the page cache needs whole ones."""
_SMALL_ALIGNED_BYTES = 64
"""More than any type needs, and a line of the processor's cache."""


@dataclass(frozen=True)
class Form:
    """A tensor without its bytes: its type, shape and size."""

    dtype: str
    """The name of the type as an attribute of `torch`."""
    shape: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True)
class TensorSlot:
    """A tensor's form and place."""

    form: Form
    offset: int

    @property
    def end(self) -> int:
        """Returns the place behind its last byte."""
        return self.offset + self.form.size_bytes


@dataclass(frozen=True)
class TensorSlots:
    """The places of all tensors, in the order of the state."""

    slots: tuple[TensorSlot, ...]
    size_bytes: int
    """The size of the file: whole pages."""

    def runs(self) -> list[tuple[int, int]]:
        """Returns the parts that hold tensors, in whole pages: where they begin and end. Between them are holes."""
        made: list[tuple[int, int]] = []
        for slot in sorted((slot for slot in self.slots if slot.form.size_bytes), key=lambda slot: slot.offset):
            begin, end = slot.offset - slot.offset % PAGE_BYTES, slot.end + -slot.end % PAGE_BYTES
            if made and begin <= made[-1][1]:
                made[-1] = (made[-1][0], max(end, made[-1][1]))
            else:
                made.append((begin, end))
        return made


def slots_for(forms: Iterable[Form]) -> TensorSlots:
    """Finds a place for each tensor. The order within the large and within the small ones is that of the state."""
    forms = tuple(forms)
    offsets, end = [0] * len(forms), 0
    for large, aligned in ((True, BLOCK_BYTES), (False, _SMALL_ALIGNED_BYTES)):
        for number, form in enumerate(forms):
            if (form.size_bytes >= BLOCK_BYTES) == large:
                offsets[number] = end + -end % aligned
                end = offsets[number] + form.size_bytes
        end += -end % PAGE_BYTES
    return TensorSlots(tuple(map(TensorSlot, forms, offsets)), end)
