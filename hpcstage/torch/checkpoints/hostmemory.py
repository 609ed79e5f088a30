"""Keeps a copy of a state's tensors in host memory that is allocated once and used again for every save.

The module owns that memory, which is the image of the file, so that writing copies nothing, and the place of each
tensor in it. Large tensors begin at a block of the generations (`checkpoint/generations`), which then finds those that
did not change wherever they stand; small ones are packed behind them. The places follow from the tensors' forms and
order alone, so a state that is saved again has them where they were.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hpcstage.checkpoint.generations.layout import BLOCK_BYTES

PAGE_BYTES = 4096
"""Writing past the page cache needs whole ones."""
_SMALL_ALIGNED_BYTES = 64
"""More than any type needs, and a line of the processor's cache."""


@dataclass(frozen=True)
class TensorSlot:
    """A tensor without its bytes, and their place."""

    dtype: str
    """The name of the type as an attribute of `torch`."""
    shape: tuple[int, ...]
    size_bytes: int
    offset: int = 0

    @property
    def end(self) -> int:
        """Returns the place behind its last byte."""
        return self.offset + self.size_bytes


@dataclass(frozen=True)
class TensorSlots:
    """The places of all tensors, in the order of the state."""

    slots: tuple[TensorSlot, ...]
    size_bytes: int
    """The size of the file: whole pages."""

    def runs(self) -> list[tuple[int, int]]:
        """Returns the parts that hold tensors, in whole pages: where they begin and end. Between them are holes."""
        made: list[tuple[int, int]] = []
        for slot in sorted((slot for slot in self.slots if slot.size_bytes), key=lambda slot: slot.offset):
            begin, end = slot.offset - slot.offset % PAGE_BYTES, slot.end + -slot.end % PAGE_BYTES
            if made and begin <= made[-1][1]:
                made[-1] = (made[-1][0], max(end, made[-1][1]))
            else:
                made.append((begin, end))
        return made


def slots_for(tensors: Iterable[TensorSlot]) -> TensorSlots:
    """Finds a place for each tensor. The order within the large and within the small ones is that of the state."""
    slots, end = [*tensors], 0
    for large, aligned in ((True, BLOCK_BYTES), (False, _SMALL_ALIGNED_BYTES)):
        for number, slot in enumerate(slots):
            if (slot.size_bytes >= BLOCK_BYTES) == large:
                slots[number] = replace(slot, offset=end + -end % aligned)
                end = slots[number].end
        end += -end % PAGE_BYTES
    return TensorSlots(tuple(slots), end)


_NO_SLOTS = TensorSlots((), 0)
_WIPEONFORK = 18
"""MADV_WIPEONFORK of Linux 4.14, which Python's mmap does not name."""


class HostMemory:
    """Memory for one image of a state. It grows when a state needs more, and is registered with CUDA where that is in
    use, so that copies from a GPU run at the speed of the bus."""

    def __init__(self) -> None:
        self._pages: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._slots = _NO_SLOTS
        self._places: list[torch.Tensor] = []
        self._pinned: bool | None = None
        """Whether CUDA knows the memory; None before it was asked."""
        self._unregister: weakref.finalize[..., HostMemory] | None = None

    @property
    def is_taken(self) -> bool:
        """Tells whether there is memory."""
        return self._pages is not None

    @property
    def image(self) -> memoryview:
        """Returns the image of the file."""
        return memoryview(self._pages)[: self._slots.size_bytes] if self._pages else memoryview(b"")

    def keep(self, tensors: Sequence[torch.Tensor]) -> TensorSlots:
        """Copies the tensors and returns their places. When it returns, all bytes are here."""
        if not self._fits(tensors) or self._to_be_pinned():
            slots = [TensorSlot(_name(t.dtype), tuple(t.shape), t.numel() * t.element_size()) for t in tensors]
            self.shape(slots_for(slots))
        with torch.no_grad():
            if tensors:
                torch._foreach_copy_(self._places, list(tensors), non_blocking=bool(self._pinned))
            for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
                torch.cuda.synchronize(device)
        return self._slots

    def shape(self, slots: TensorSlots) -> memoryview:
        """Makes the memory ready for these places and returns the image; bytes between tensors are zero then."""
        if slots.size_bytes > len(self._bytes) or self._to_be_pinned():
            self.release()
            self._take(slots.size_bytes)
        elif self._slots != slots:
            self._bytes.zero_()
        self._places = [self._place(slot) for slot in slots.slots]
        self._slots = slots
        return self.image

    def place(self, number: int) -> torch.Tensor:
        """Returns a tensor in the memory, which the next save overwrites."""
        return self._places[number]

    def release(self) -> None:
        """Gives the memory back."""
        if self._unregister is not None:
            self._unregister()
        self._pinned = self._unregister = None
        self._places, self._slots = [], _NO_SLOTS
        self._bytes, self._pages = torch.empty(0, dtype=torch.uint8), None

    def _fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Tells whether these tensors have the places of those before, one for one."""
        return len(tensors) == len(self._places) and all(
            tensor.shape == place.shape and tensor.dtype is place.dtype
            for tensor, place in zip(tensors, self._places, strict=True)
        )

    def _to_be_pinned(self) -> bool:
        """Tells whether CUDA came into use since the memory was taken."""
        return self._pinned is None and len(self._bytes) > 0 and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]

    def _take(self, size_bytes: int) -> None:
        if not size_bytes:
            return
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # of a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        _keep_from_forks(pages)
        self._pages, self._bytes = pages, torch.frombuffer(pages, dtype=torch.uint8)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._pinned = _registered(self._bytes)
        if self._pinned:
            self._unregister = weakref.finalize(self, _unregister, self._bytes, os.getpid())
            self._unregister.atexit = False  # the process takes the memory with it, and CUDA may have ended before

    def _place(self, slot: TensorSlot) -> torch.Tensor:
        dtype = getattr(torch, slot.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"this PyTorch has no type {slot.dtype}")  # noqa: TRY004
        if not slot.size_bytes:
            return torch.empty(slot.shape, dtype=dtype)
        return self._bytes[slot.offset : slot.end].view(dtype).view(slot.shape)


def _keep_from_forks(pages: mmap.mmap) -> None:
    """Has forked processes, such as a loader's workers, find zeros there: of shared pages, each that is then written
    would be copied once more. The addresses stay taken, so that a process that frees this object frees nothing else."""
    try:
        pages.madvise(_WIPEONFORK)
    except OSError:  # of an older kernel
        pages.madvise(mmap.MADV_DONTFORK)


def _registered(memory: torch.Tensor) -> bool:
    """Registers memory with CUDA; returns whether that worked."""
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(memory), 0)) == 0:  # type: ignore[no-untyped-call]
        return True
    # The next launch of a kernel reports the error as its own and thereby clears it: one that nobody waits for.
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.ones((), device="cuda")
    return False


def _unregister(memory: torch.Tensor, pid: int) -> None:
    """Undoes `_registered`. A forked process has no part in it, and must not call CUDA."""
    if os.getpid() == pid:
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
