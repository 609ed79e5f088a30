"""Saves one state after the other while the program goes on, and loads one: copies at once, writes in the background.

The module owns the thread that writes and what it may take: it runs at a low priority, and calls nothing of PyTorch, so
that PyTorch's own threads stay as they are. Which names checkpoints have is not its matter.
"""

# ruff: noqa: ANN401 - a state is any nesting of values

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcstage import stderr
from hpcstage.checkpoint.generations.files import Files
from hpcstage.errors import HpcstageError
from hpcstage.torch import statetree
from hpcstage.torch.entry import DamagedEntry, Description, find_entry, read_image, write_entry
from hpcstage.torch.hostmemory import HostMemory
from hpcstage.torch.slots import TensorSlots

_NICENESS = 10
"""Next to two busy processors the thread still gets a tenth of one, and its work is less than a second per GB."""


class CheckpointNotSaved(HpcstageError):
    """A checkpoint could not be written; the one before is as it was."""


@dataclass(frozen=True)
class LoadedState:
    """A checkpoint that was loaded."""

    state: Any
    step: int
    path: Path


class Saver:
    """Owns the memory for one state. A state is copied there at once and written from there by a thread of its own,
    which a program that ends waits for."""

    def __init__(self, files: Files | None = None) -> None:
        self._files = files or Files()
        self._memory = HostMemory()
        self._thread: threading.Thread | None = None
        self._failed: CheckpointNotSaved | None = None
        self._pid = os.getpid()

    @property
    def busy(self) -> bool:
        """Tells whether a state is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, state: Any, step: int, path: Path, then: Callable[[], None]) -> None:
        """Copies a state; returns when it may change. It is written in the background, and `then` is called after that.

        Waits for the state before. Raises what `wait` raises, and a TypeError that names what cannot be saved.
        """
        self.wait()
        flat = statetree.flattened(state)
        slots = self._memory.keep(flat.tensors)
        name = f"hpcstage-{path.name}"
        self._thread = threading.Thread(target=self._write, args=(flat.tree, slots, step, path, then), name=name)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the last state is on the disk. Raises CheckpointNotSaved, once, if it is not."""
        if self._pid != os.getpid():
            raise CheckpointNotSaved("this process was forked from the one that saves checkpoints")
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raises CheckpointNotSaved, once, if the last state could not be written."""
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def load(self, path: Path, device: torch.device, into: Any = None) -> LoadedState:
        """Loads a checkpoint; nothing of `into` changes before all of it was read and verified.

        Raises DamagedEntry, and a ValueError if `into` has tensors that do not fit.
        """
        self.wait()
        entry = find_entry(path)
        described = entry.description
        try:
            image = self._memory.shape(described.slots)
        except (ValueError, RuntimeError, TypeError) as error:
            raise DamagedEntry(f"its tensors cannot be made: {error}") from error
        read_image(self._files, entry, image)
        found = statetree.targets(described.tree, into) if into is not None else {}
        self._check(found, described)
        return LoadedState(self._copied(described.tree, found, device), described.step, path)

    def release(self) -> None:
        """Gives the memory back, after what is being written."""
        self.wait()
        self._memory.release()

    def _check(self, found: dict[int, list[torch.Tensor]], described: Description) -> None:
        for number, tensors in found.items():
            place = self._memory.place(number)
            for tensor in tensors:
                if (tensor.shape, tensor.dtype) != (place.shape, place.dtype):
                    saved = f"{described.names[number]} is {place.dtype} {tuple(place.shape)} in the checkpoint"
                    raise ValueError(f"{saved}, and {tensor.dtype} {tuple(tensor.shape)} in `into`")

    def _copied(self, tree: Any, found: dict[int, list[torch.Tensor]], device: torch.device) -> Any:
        """Returns the state with tensors of its own, or those of `into`."""
        made: dict[int, torch.Tensor] = {}

        def tensor(number: int) -> torch.Tensor:
            if number not in made:
                place, there = self._memory.place(number), found.get(number)
                for one in there or ():
                    one.copy_(place)
                made[number] = there[0] if there else torch.empty_like(place, device=device).copy_(place)
            return made[number]

        with torch.no_grad():
            return statetree.assembled(tree, tensor, lambda number: self._memory.place(number).numpy().tobytes())

    def _write(self, tree: Any, slots: TensorSlots, step: int, path: Path, then: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _lower())
        try:
            names = tuple(statetree.names(tree, len(slots.slots)))
            write_entry(self._files, path, Description(step, tree, names, slots), self._memory.image)
            then()
        except Exception as error:  # noqa: BLE001 - whatever it is, the program hears of it at its next save
            self._failed = _not_saved(path, error)
            stderr.say(self._failed.line())


def _lower() -> int:
    """Returns the thread's new niceness."""
    return min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


def _not_saved(path: Path, error: Exception) -> CheckpointNotSaved:
    failed = CheckpointNotSaved(f"the checkpoint {path} was not saved", "training goes on without it")
    failed.__cause__ = error
    return failed
