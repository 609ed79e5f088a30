"""Saves the state of a training while it goes on, and loads the newest one that is whole.

The module owns the names of checkpoints in a directory, how many are kept and when one is due. `saving` copies and
writes. A checkpoint protects against what happens to the program; the module does nothing for the case that its
directory is lost with the node.
"""

# ruff: noqa: ANN401 - a state is any nesting of values

from __future__ import annotations

import operator
import os
import re
import socket
import time
from pathlib import Path
from typing import Any, SupportsIndex

import torch

from hpcstage import stderr
from hpcstage.checkpoint.generations.files import LOCK, Files
from hpcstage.errors import HpcstageError, UsageError
from hpcstage.torch.checkpoints.entry import DamagedEntry, named_or_left, remove_entry, settle
from hpcstage.torch.checkpoints.entrynames import FileLock, hidden_name
from hpcstage.torch.checkpoints.saving import OF_PROCESS, LoadedState, Saver
from hpcstage.units import parse_duration

VARIABLE = "HPCSTAGE_CHECKPOINT"
_NAME = re.compile(r"step-([0-9]{8,})")
_MOST_BYTES = 256
"""The most that a lock says of who has it."""


class NothingToLoad(HpcstageError):
    """There are checkpoints, and none can be loaded."""


class DirectoryInUse(HpcstageError):
    """Another process saves to the same directory."""


class Checkpointer:
    """Saves the state of a training in the background.

    >>> import tempfile, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> directory = tempfile.TemporaryDirectory()
    >>> with Checkpointer(directory.name) as checkpointer:
    ...     checkpointer.save({"model": model.state_dict(), "epoch": 3}, step=1200)
    True
    >>> loaded = Checkpointer(directory.name).load()
    >>> loaded.step, loaded.state["epoch"], torch.equal(loaded.state["model"]["weight"], model.weight)
    (1200, 3, True)
    >>> directory.cleanup()

    * `directory`: where checkpoints stand, each a directory `step-00001200`; by default `$HPCSTAGE_CHECKPOINT`. It is
      made at the first save, for this user alone.
    * `every`: a number of steps (500), or a time as text ("10m"). `save` then does nothing unless one is due, so it may
      be called after each step. Without `every` each call saves.
    * `keep`: so many of the newest checkpoints stay, 2 by default, None for all. The one before goes only when the new
      one is on the disk and was read back.

    One process saves to a directory. With DistributedDataParallel that is rank 0; all ranks may load.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        every: SupportsIndex | str | None = None,
        keep: SupportsIndex | None = 2,
    ) -> None:
        self._keep = None if keep is None else _whole("keep option", keep)
        if self._keep is not None and self._keep < 1:
            raise ValueError("keep option should be at least 1, or None for all")
        self.directory = _directory(directory)
        self._every = _Interval(every)
        self._files = Files()
        self._saver = Saver(self._files)
        self._lock: FileLock | None = None

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def due(self, step: int) -> bool:
        """Tells whether `save` would save this step; it is not due while the state before is still being written.

        After a save that failed the next step is due, but not after a second one: each try takes the time of a copy.
        """
        if self._every.given and self._saver.busy:
            return False
        return self._every.over(step) or self._saver.failures == 1

    def save(self, state: Any, step: SupportsIndex, *, now: bool = False) -> bool:
        """Saves a state if it is due, or `now`. Returns whether it does, as soon as the state may change again.

        `state` is any nesting of dictionaries, lists and tuples with tensors, NumPy's arrays, numbers, strings and
        bytes; or a function that returns it, which is called only if the state is saved. A tensor that is named twice
        (tied weights) is saved once, and loaded as one; tensors that overlap otherwise are saved each for itself.

        The state is copied to memory that is used again for every save, and then written in the background. There is
        one such memory: while the state before is still being written, a save that is due by `every` is put off to the
        next call, and any other waits.

        Raises a TypeError that names what cannot be saved. Raises CheckpointNotSaved if the save before failed; this
        state is saved nonetheless.
        """
        step = _whole("step", step)
        if step < 0:
            raise ValueError("a step should not be negative")
        if not now and not self.due(step):
            self._saver.raise_failed()
            return False
        with OF_PROCESS.measured():
            self._open(step)
            if callable(state) and not isinstance(state, torch.nn.Module):
                state = state()
            before = self._saver.save(state, step, self._path(step), lambda: self._drop_older(step))
        self._every.saved(step)
        if before is not None:
            raise before
        return True

    def load(self, *, map_location: str | torch.device = "cpu", into: Any = None) -> LoadedState | None:
        """Loads the newest checkpoint that is whole: its `state` and `step`. Returns None where there is none.

        Every byte is verified; a damaged checkpoint is passed over for the one before. One that a killed process left
        whole, but without its name, is loaded as well. A line on standard error says either. `into` is a state like the
        one that was saved: its tensors get the values, and stand in the result. Tensors that it does not have are made
        on `map_location`.

        Raises NothingToLoad if all checkpoints are damaged, and a ValueError if a tensor of `into` does not fit.
        """
        self._saver.finish()
        damaged: list[str] = []
        for step in sorted(self._steps() | self._hidden_steps(), reverse=True):
            path = named_or_left(self._path(step))
            if path is None:  # a killed process only began it
                continue
            try:
                loaded = self._saver.load(path, torch.device(map_location), into)
            except DamagedEntry as error:
                damaged.append(f"{path} is damaged: {error.line()}")
                continue
            for line in damaged:
                stderr.say(f"{line}; {loaded.path.name} is loaded")
            if hidden_name(path.name):
                stderr.say(f"{path} is loaded: a process that was killed left it without its name")
            self._every.saved(loaded.step)
            return loaded
        if damaged:
            raise NothingToLoad("; ".join(damaged), "no older checkpoint is left")
        return None

    def newest_step(self) -> int | None:
        """Returns the step of the newest checkpoint that has its name, if there is one; it is not read."""
        return max(self._steps(), default=None)

    def wait(self) -> None:
        """Waits until the last state is safe in the directory and was read back. Raises CheckpointNotSaved if that
        failed."""
        self._saver.wait()

    def close(self) -> None:
        """Waits as `wait` does, and gives the memory back. A program that ends without it waits as well."""
        try:
            self._saver.release()
        finally:
            if not self._saver.busy:  # after Ctrl-C a state is still being written
                self._lock = None

    def _path(self, step: int) -> Path:
        return self.directory / f"step-{step:08}"

    def _steps(self) -> set[int]:
        """Returns the steps that have a checkpoint."""
        return {step for name in self._names() if (step := self._step_of(name)) is not None}

    def _hidden_steps(self) -> set[int]:
        """Returns the steps of which something is hidden: it is being written, or was left behind."""
        return {step for name in self._names() if (step := self._step_of(hidden_name(name) or "")) is not None}

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.directory)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _step_of(self, name: str) -> int | None:
        match = _NAME.fullmatch(name)
        return int(match[1]) if match and self._path(int(match[1])).name == name else None

    def _drop_older(self, step: int) -> None:
        """Drops what is older than the newest, now that this step is safe. Steps above it are of a training that went
        further: they are not counted and stay. Raises OSError if one cannot be dropped, after the others were."""
        below = sorted(found for found in self._steps() if found <= step)
        failed: list[OSError] = []
        for old in below[: -self._keep] if self._keep is not None else ():
            try:
                remove_entry(self._files, self._path(old))
            except FileNotFoundError:
                pass
            except OSError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    def _open(self, step: int) -> None:
        """Makes the directory this object's to save to, once, and ends what a killed process left there."""
        if self._lock is not None:
            return
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = self._locked()
        for left in sorted(self._hidden_steps()):
            if settle(self._files, self._path(left)):
                stderr.say(f"{self._path(left)} is whole and has its name: a process that was killed left it without")
        if (newest := max(self._steps(), default=0)) > step:
            there = f"{self._path(newest)} is of a training that went further than step {step}"
            stderr.say(f"{there}; it stays, and is what load() gives: remove it if it is not wanted")

    def _locked(self) -> FileLock:
        """Returns the lock that keeps other processes from saving to the directory. Raises DirectoryInUse."""
        path = self.directory / LOCK
        try:
            return FileLock(path, f"{socket.gethostname()}\n")
        except BlockingIOError as error:
            host = path.read_bytes()[:_MOST_BYTES].decode(errors="replace").strip()
            raise DirectoryInUse(
                f"another process or Checkpointer, on {host or 'some node'}, saves to {self.directory}",
                "let one rank save, or give each its own",
            ) from error


class _Interval:
    """Says when a save is due."""

    def __init__(self, every: SupportsIndex | str | None) -> None:
        self.given = every is not None
        self._seconds = parse_duration(every) if isinstance(every, str) else None
        self._steps = None if every is None or isinstance(every, str) else _whole("every option", every)
        if self._steps is not None and self._steps < 1:
            raise ValueError("every option should be at least one step")
        self._last_step = 0
        self._last_s = time.monotonic()

    def over(self, step: int) -> bool:
        """Tells whether the interval is over: a multiple of the steps was passed, or the time."""
        if self._steps is not None:
            return step // self._steps > self._last_step // self._steps
        return self._seconds is None or time.monotonic() - self._last_s >= self._seconds

    def saved(self, step: int) -> None:
        """Begins the next interval."""
        self._last_step, self._last_s = step, time.monotonic()


def _directory(given: str | os.PathLike[str] | None) -> Path:
    found = os.fspath(given) if given is not None else os.environ.get(VARIABLE)
    if not found:
        raise UsageError(f"Checkpointer has no directory and ${VARIABLE} is not set", "give it a directory")
    return Path(found).absolute()


def _whole(name: str, number: SupportsIndex) -> int:
    """Returns a number as Python's own, which NumPy's are not; raises a TypeError for a float or a bool."""
    if isinstance(number, bool):
        raise TypeError(f"{name} should be a whole number, not {number}")
    try:
        return operator.index(number)
    except TypeError as error:
        raise TypeError(f"{name} should be a whole number, not {number!r}") from error
