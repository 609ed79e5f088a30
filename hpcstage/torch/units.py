"""Describes batches of samples that are being loaded: what is done, what raised, whose turn it is. No thread, no lock.

The module owns the rule of turns. Callers hold the pool's lock where they read or change what several threads see.
"""

from __future__ import annotations

import contextvars
import enum
from collections.abc import Callable
from typing import Any

Load = Callable[[], Any]


class GivenUp(BaseException):
    """Unwinds a sample that nobody waits for any more, or that is to be loaded again."""


class UnitState(enum.Enum):
    """Says how far a sample is."""

    NEW = enum.auto()
    RUNNING = enum.auto()
    TO_REPEAT = enum.auto()
    """The sample was told to unwind; it becomes new when it has."""
    DONE = enum.auto()


class Unit:
    """One sample of a batch."""

    __slots__ = ("batch", "context", "error", "load", "place", "state", "value", "wait_for_turn")

    def __init__(self, batch: Batch, place: int, load: Load, wait_for_turn: Callable[[Unit], None]) -> None:
        self.wait_for_turn = wait_for_turn
        self.batch = batch
        self.place = place
        self.load: Load | None = load
        self.context = contextvars.copy_context()
        self.state = UnitState.NEW
        self.value: Any = None
        self.error: BaseException | None = None

    @property
    def has_turn(self) -> bool:
        """Whether its batch is the one that is waited for, and all samples before it are loaded."""
        return self.batch.current and not self.batch.given_up and self.batch.ready == self.place

    def finish(self, value: object, error: BaseException | None) -> None:
        """Notes that the sample was loaded, or raised."""
        self.state = UnitState.DONE
        self.value, self.error = value, error
        self.load = None
        self.batch.advance()


class Batch:
    """Holds samples that are waited for together."""

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.current = False
        """Whether it is the batch that is waited for: all batches before it are over."""
        self.given_up = False
        self.ready = 0
        """The number of samples, counted from the first, that are loaded."""

    @property
    def settled(self) -> bool:
        """Whether it is known what comes of the batch: all samples, or the error of the first that has one."""
        return self.ready == len(self.units) or self.units[self.ready].error is not None

    def advance(self) -> None:
        """Counts the samples that are loaded. A sample behind an error is never counted, and so never has its turn."""
        while self.ready < len(self.units):
            unit = self.units[self.ready]
            if unit.state is not UnitState.DONE or unit.error is not None:
                return
            self.ready += 1

    def values(self) -> list[Any]:
        """Returns the samples in order. Raises the error of the first sample that has one."""
        error = self.units[self.ready].error if self.ready < len(self.units) else None
        if error is None:
            return [unit.value for unit in self.units]
        try:
            raise error
        finally:
            del error  # its traceback holds this frame
