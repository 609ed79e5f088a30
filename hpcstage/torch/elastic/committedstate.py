"""The state of a training as it was committed last, and how all ranks of a membership get the newest one.

The module owns the state's parts and form, the copy of the buffers, which a forward pass changes before its step
counts, and which state counts: that of a rank, else a saved one, else the program's first. Parameters and the
optimizer's state change in a step only: one that has begun and is not committed makes the state torn. States pass from
rank to rank through collectives of their group; nothing is pickled.
"""

# ruff: noqa: ANN401 - models and optimizers are whatever the program has

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist

from hpcstage.elastic.sampleledger import EpochPlace, Step
from hpcstage.elastic.seats import DRAINED
from hpcstage.errors import UsageError
from hpcstage.torch.checkpoints.checkpointer import Checkpointer, NothingToLoad
from hpcstage.torch.checkpoints.saving import LoadedState
from hpcstage.torch.checkpoints.statetree import assembled, flattened
from hpcstage.torch.elastic.scaling import RateCourse


class CommittedState:
    """The state of a model, its optimizer and its scheduler, and how far the training is, as one rank has it."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._buffers: list[torch.Tensor] = []
        self.place = EpochPlace()
        self.rate = RateCourse()
        self.is_there = False
        """Whether this is more than what the program began with."""
        self.is_torn = False
        """Whether a step has begun that is not committed."""
        optimizer.register_step_pre_hook(lambda *_: self._tear())

    @property
    def is_good(self) -> bool:
        """Whether others may get it."""
        return self.is_there and not self.is_torn

    def commit(self, samples: int, rate: RateCourse, generation: int) -> Step:
        """Takes the step that is done in a generation, with so many samples of all ranks, and returns it."""
        place = self.place
        self.place = EpochPlace(place.step + 1, place.epoch, place.position + samples, generation)
        self.rate = rate
        self.is_there, self.is_torn = True, False
        self._keep_buffers()
        return Step(self.place, samples)

    def end_epoch(self) -> None:
        """Goes on to the next epoch."""
        self.place = replace(self.place, epoch=self.place.epoch + 1, position=0)

    def to_state(self) -> dict[str, Any]:
        """Returns all of it."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "place": asdict(self.place),
            "rate": asdict(self.rate),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes what `to_state` returned."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self.place, self.rate = EpochPlace(**state["place"]), RateCourse(**state["rate"])
        self.is_torn = False
        self._keep_buffers()

    def bring(self, saved: SavedStates) -> None:
        """Brings the ranks of the process group to the newest state that one of them has; all call it."""
        self._put_buffers_back()
        source, are_same = self._look()
        if source is None:
            self.load_saved(saved)
            source, are_same = self._look()
        if not are_same:
            source = source or 0
            is_source = dist.get_rank() == source
            given = hand_over(self.to_state() if is_source else None, source)
            if not is_source:
                self.load(given)
        self.is_there = self.is_there or self.place.step > 0

    def load_saved(self, saved: SavedStates) -> None:
        """Loads the newest checkpoint, if there is one. Raises UsageError if there is none, and no state either."""
        loaded = saved.load()
        if loaded is not None:
            self.load(loaded.state)
            self.is_there = True
        elif self.is_torn:
            raise UsageError("a step was not committed, and no rank has the state before it", "call commit behind step")

    def _look(self) -> tuple[int | None, bool]:
        """Returns the first rank that has the newest state, if one has any, and whether all have it."""
        place = self.place
        mine = torch.tensor([place.step, place.epoch, place.generation, place.position, int(self.is_good)])
        all_of = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of, mine)
        found = [one.tolist() for one in all_of]
        good = [one for one in found if one[-1]]
        if not good:
            return None, False
        best = max(good)
        return found.index(best), all(one == best for one in found)

    def _put_buffers_back(self) -> None:
        """Undoes what forward passes have done since the last step that counts."""
        if self._buffers:
            with torch.no_grad():
                for kept, buffer in zip(self._buffers, self._model.buffers(), strict=True):
                    buffer.copy_(kept)

    def _keep_buffers(self) -> None:
        buffers = [*self._model.buffers()]
        if len(self._buffers) != len(buffers):
            self._buffers = [torch.empty_like(buffer) for buffer in buffers]
        with torch.no_grad():
            for kept, buffer in zip(self._buffers, buffers, strict=True):
                kept.copy_(buffer)

    def _tear(self) -> None:
        self.is_torn = True


def hand_over(state: Any, source: int) -> Any:
    """Returns the state of the rank `source`, on all ranks. Only there `state` is looked at."""
    is_source = dist.get_rank() == source
    flat = flattened(state) if is_source else None
    head = None
    if flat is not None:
        forms = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in flat.tensors]
        head = json.dumps({"tree": flat.tree, "tensors": forms}).encode()
    told = json.loads(_bytes_of(head, source))
    tensors: list[torch.Tensor] = []
    for number, (dtype, shape) in enumerate(told["tensors"]):
        given = flat.tensors[number].detach().to("cpu").contiguous() if flat is not None else _empty(dtype, shape)
        if given.numel():
            dist.broadcast(given.reshape(-1).view(torch.uint8), source)
        tensors.append(given)
    return state if is_source else assembled(told["tree"], tensors.__getitem__, lambda number: tensors[number].numpy())


def _bytes_of(head: bytes | None, source: int) -> bytes:
    length = torch.tensor([len(head or b"")])
    dist.broadcast(length, source)
    content = torch.empty(int(length), dtype=torch.uint8)
    if head is not None:
        content = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    dist.broadcast(content, source)
    return content.numpy().tobytes()


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    found = getattr(torch, dtype)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{dtype} is no type of a tensor")
    return torch.empty(shape, dtype=found)


class SavedStates:
    """The saved states of one training, as this process can read them."""

    def __init__(self, own: Checkpointer | None) -> None:
        """`own` is the checkpointer of this training."""
        self._all = [] if own is None else [own]
        drained = os.environ.get(DRAINED)
        if own is not None and drained:
            self._all.append(Checkpointer(drained))

    def are_there(self) -> bool | None:
        """Returns whether there is one; None where a directory cannot be read."""
        try:
            return any(found.newest_step() is not None for found in self._all)
        except OSError:
            return None

    def load(self) -> LoadedState | None:
        """Loads the newest one, or one that is older if that is damaged. Returns None where there is none. Raises
        NothingToLoad if all are damaged."""
        damaged: NothingToLoad | None = None
        for found in sorted(self._all, key=lambda one: one.newest_step() or 0, reverse=True):
            try:
                loaded = found.load()
            except NothingToLoad as error:
                damaged = damaged or error
                continue
            if loaded is not None:
                return loaded
        if damaged is not None:
            raise damaged
        return None
