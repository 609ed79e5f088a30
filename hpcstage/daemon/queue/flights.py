"""Knows the transfers in flight, from the source and from other nodes, and reserves budget for them. Pure."""

from __future__ import annotations

from collections.abc import Callable

from hpcstage.daemon.queue.freebudget import FreeBudget
from hpcstage.daemon.queue.states import FileState, States

_FLYING, _STORED = FileState.FLYING, FileState.STORED


class Flights:
    """Owns when each transfer began. `read_of` returns the bytes that all transfers of an id have read until now."""

    def __init__(self, states: States, budget: FreeBudget, read_of: Callable[[int], int]) -> None:
        self.states = states
        self.budget = budget
        self.started: dict[int, float] = {}
        """By id: the time at which the transfer began."""
        self.asked: dict[int, bool] = {}
        """By id in flight that another node was asked for: whether a program waited for it then."""
        self.ahead: set[int] = set()
        """Ids that other nodes keep and were asked for while no program waited for them."""
        self._read_of = read_of
        self._read_before: dict[int, int] = {}

    def begin(self, id_: int, now: float) -> bool:
        """Begins a transfer. Returns False if there is no budget for it, which refuses the file."""
        if not self.budget.reserve(id_):
            self.states.move(id_, FileState.REFUSED)
            return False
        self.states.move(id_, _FLYING)
        self.started[id_] = now
        return True

    def begin_ask(self, id_: int, now: float) -> bool:
        """Begins a transfer from another node, as `begin` does."""
        is_requested = self.states.of(id_) is FileState.PROMOTED
        if not self.begin(id_, now):
            return False
        self.asked[id_] = is_requested
        if not is_requested and not self.states.keeps(id_):
            self.ahead.add(id_)
        return True

    def measure(self, id_: int) -> None:
        """Has `copied` count from now on."""
        self._read_before[id_] = self._read_of(id_)

    def copied(self, id_: int) -> int:
        """Returns the bytes of a file that its transfer has read."""
        return max(0, self._read_of(id_) - self._read_before.get(id_, 0))

    def took_s(self, id_: int, now: float) -> float:
        """Returns the seconds since a transfer began."""
        return now - self.started[id_]

    def needed(self) -> list[int]:
        """Returns the transfers whose copies are still of use."""
        return [id_ for id_ in self.started if self.states.of(id_) is FileState.FLYING]

    def end(self, id_: int) -> float | None:
        """Ends a transfer and gives its budget back. Returns when it began; None if it was not in flight. A file whose
        copy is still of use is FLYING until the caller gives it another state."""
        started = self.started.pop(id_, None)
        if started is not None:
            self.budget.release(id_)
            if self.asked:
                self.asked.pop(id_, None)
        return started

    def take_in(self, id_: int, size_bytes: int) -> None:
        """Takes in the copy of an id, which is in the store with this size."""
        self.budget.stored(id_, size_bytes, ahead=id_ in self.ahead)
        self.ahead.discard(id_)
        self.states.move(id_, _STORED)
        self.states.resize(id_, size_bytes)
