"""Saves one state after the other while the program goes on, and loads one: copies at once, writes in the background.

The module owns the thread that writes and what it may take: it runs at a low priority, and calls nothing of PyTorch, so
that PyTorch's own threads stay as they are. Which names checkpoints have is decided elsewhere.
"""

# ruff: noqa: ANN401 - a state is any nesting of values

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hpcstage import stderr
from hpcstage.checkpoint.generations.files import Files
from hpcstage.errors import HpcstageError
from hpcstage.protocol import saves
from hpcstage.torch.checkpoints import statetree
from hpcstage.torch.checkpoints.entry import (
    DamagedEntry,
    Description,
    check_entry,
    find_entry,
    read_image,
    settle,
    write_entry,
)
from hpcstage.torch.checkpoints.hostmemory import HostMemory

_NICENESS = 10
"""Next to two busy processors the thread still gets a tenth of one, and its work is less than a second per GB."""
_LOOK_S = 1.0
"""Ctrl-C that comes while a thread falls asleep does not wake it: it is seen when the wait is over."""


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
        self.files = files or Files()
        self.failures = 0
        """How many of the last states could not be written, one after the other."""
        self._memory = HostMemory()
        self._written = threading.Event()
        """Set unless a state is being written. The thread itself cannot tell: if Ctrl-C interrupts a join, Python takes
        the thread for ended (CPython's issue 90882)."""
        self._written.set()
        self._unraised: deque[CheckpointNotSaved] = deque()
        self._pid = os.getpid()

    @property
    def busy(self) -> bool:
        """Tells whether a state is still being written or read back."""
        return self._pid == os.getpid() and not self._written.is_set()

    def save(self, state: Any, step: int, path: Path, then: Callable[[], None]) -> CheckpointNotSaved | None:
        """Copies a state; returns when it may change. It is written in the background and read back, and `then` is
        called after that, if it is what was written.

        Waits for the state before, and returns its failure. Raises a TypeError that names what cannot be saved.
        """
        self.finish()
        flat = statetree.flattened(state)
        slots = self._memory.keep(flat.tensors)
        before = self._take_failed()

        def described() -> Description:
            return Description(step, flat.tree, tuple(statetree.names(flat.tree, len(slots.slots))), slots)

        self._start(lambda: self._write(path, described, then), f"hpcstage-{path.name}")
        return before

    def finish(self) -> None:
        """Waits until nothing is being written or read back; whether that worked is for `wait` and `raise_failed` to
        say."""
        if self._pid != os.getpid():
            raise CheckpointNotSaved("this process was forked from the one that saves checkpoints")
        while not self._written.wait(_LOOK_S):
            pass

    def wait(self) -> None:
        """Waits until the last state is on the disk and was read back. Raises CheckpointNotSaved, once, if that
        failed."""
        self.finish()
        self.raise_failed()

    def raise_failed(self) -> None:
        """Raises CheckpointNotSaved for a state that could not be written, once for each."""
        if (failed := self._take_failed()) is not None:
            raise failed

    def load(self, path: Path, device: torch.device, into: Any = None) -> LoadedState:
        """Loads a checkpoint; nothing of `into` changes before all of it was read and verified.

        Memory that is taken for it is given back, since this process may be one that never saves. Raises DamagedEntry,
        and a ValueError if `into` has tensors that do not fit.
        """
        self.finish()
        is_taken = self._memory.is_taken
        try:
            return self._loaded(path, device, into)
        finally:
            if not is_taken:
                self._memory.release()

    def release(self) -> None:
        """Gives the memory back, after what is being written. Raises what `wait` raises."""
        self.finish()
        self._memory.release()
        self.raise_failed()

    def _take_failed(self) -> CheckpointNotSaved | None:
        return self._unraised.popleft() if self._unraised else None

    def _loaded(self, path: Path, device: torch.device, into: Any) -> LoadedState:
        entry = find_entry(path)
        described = entry.description
        try:
            image = self._memory.shape(described.slots)
        except (ValueError, RuntimeError, TypeError) as error:
            raise DamagedEntry(f"its tensors cannot be made: {error}") from error
        read_image(self.files, entry, image)
        found = statetree.targets(described.tree, into) if into is not None else {}
        self._check(found, described)
        return LoadedState(self._copied(described.tree, found, device), described.step, path)

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

    def _start(self, write: Callable[[], None], name: str) -> None:
        """Begins to write in the background. Where no thread can be had the training waits for the writing instead."""
        begun = threading.Lock()

        def run(give_way: Callable[[], None]) -> None:
            if not begun.acquire(blocking=False):
                return
            try:
                give_way()
                write()
            finally:
                self._written.set()

        try:
            self._written.clear()
            threading.Thread(target=run, args=(_give_way,), name=name).start()
        except RuntimeError:  # too many processes, or the interpreter ends
            run(lambda: None)
        except BaseException:  # Ctrl-C: unless the thread was first, it finds the work taken
            if begun.acquire(blocking=False):
                self._written.set()
            raise

    def _write(self, path: Path, described: Callable[[], Description], then: Callable[[], None]) -> None:
        try:
            settle(self.files, path)
            replaced = write_entry(self.files, path, described(), self._memory.image)
            check_entry(self.files, path, replaced)
        except Exception as error:  # noqa: BLE001 - whatever it is, the program hears of it at its next save
            failed = CheckpointNotSaved(f"the checkpoint {path} was not saved", "training goes on without it")
            failed.__cause__ = error
            self.failures += 1
            self._unraised.append(failed)
            stderr.say(failed.line())
            return
        self.failures = 0
        try:
            then()
        except Exception as error:  # noqa: BLE001 - the state itself is safe
            stderr.say(f"{path} is saved, and older checkpoints could not be removed: {error}")


def _give_way() -> None:
    """Gives the calling thread a low priority."""
    with contextlib.suppress(OSError):
        niceness = min(19, os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)


_NODE_DIR = "HPCSTAGE_NODE_DIR"


class Standstill:
    """The time in which the saves of this process held up its training."""

    def __init__(self) -> None:
        self._pid, self._name = 0, ""
        self._saves = 0
        self._ns = 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Adds the time of one save, however it ends, to what is told."""
        began_ns = time.monotonic_ns()
        try:
            yield
        finally:
            if self._pid != os.getpid():  # what a forked process did not wait for is not its own
                self._pid, self._saves, self._ns = os.getpid(), 0, 0
                self._name = f"{self._pid}-{os.urandom(4).hex()}"  # in containers two processes may have one number
            self._saves += 1
            self._ns += time.monotonic_ns() - began_ns
            with contextlib.suppress(OSError):
                self._tell()

    def _tell(self) -> None:
        if node_dir := os.environ.get(_NODE_DIR):
            directory = f"{node_dir}/{saves.DIRECTORY}"
            with contextlib.suppress(FileExistsError):
                os.mkdir(directory, 0o700)
            fd = os.open(f"{directory}/{self._name}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.pwrite(fd, saves.SAVES.pack(self._saves, self._ns), 0)
            finally:
                os.close(fd)


OF_PROCESS = Standstill()
"""The saves of all checkpointers of this process."""
