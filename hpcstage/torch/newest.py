"""Brings all ranks of a membership to the newest state: that of a rank, else a saved one, else the program's first.

The module owns which state counts. `committed` says what a state is, `handover` moves it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hpcstage.errors import UsageError
from hpcstage.torch.committed import CommittedState
from hpcstage.torch.handover import hand_over
from hpcstage.torch.savedstates import SavedStates


@dataclass(frozen=True)
class _Newest:
    """What the ranks have, seen by all of them alike."""

    step: int
    source: int | None
    """The first rank that has the newest state, if one has any."""
    is_same: bool
    """Whether all have it."""


class NewestState:
    """Finds the newest state for one rank's own."""

    def __init__(self, state: CommittedState, saved: SavedStates) -> None:
        self._state = state
        self._saved = saved

    def bring(self) -> None:
        """Brings the ranks of the process group to the newest state that one of them has; all call it."""
        state = self._state
        state.put_buffers_back()
        found = self._look()
        if found.source is None:
            self.load_saved()
            found = self._look()
        if found.source is None or not found.is_same:
            source = found.source or 0
            is_source = dist.get_rank() == source
            given = hand_over(state.to_state() if is_source else None, source)
            if not is_source:
                state.load(given)
        state.is_there = state.is_there or found.step > 0

    def load_saved(self) -> None:
        """Loads the newest checkpoint, if there is one. Raises UsageError if there is none, and no state either."""
        loaded = self._saved.load()
        if loaded is not None:
            self._state.load(loaded.state)
            self._state.is_there = True
        elif self._state.is_torn:
            raise UsageError("a step was not committed, and no rank has the state before it", "call commit behind step")

    def _look(self) -> _Newest:
        place = self._state.place
        mine = torch.tensor([place.step, place.epoch, place.position, int(self._state.is_good)])
        all_of = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of, mine)
        found = [tuple(one.tolist()) for one in all_of]
        good = [one[:3] for one in found if one[3]]
        if not good:
            return _Newest(0, None, is_same=False)
        best = max(good, key=lambda one: (one[0], one[1]))
        return _Newest(int(best[0]), found.index((*best, 1)), all(one == (*best, 1) for one in found))
