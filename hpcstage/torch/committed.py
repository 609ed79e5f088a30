"""The state of a training as it was committed last: what other ranks get, and what a training goes on from.

The module owns the state's parts and form, and the copy of the buffers, which a forward pass changes before its step
counts. Parameters and the optimizer's state change in a step only: one that has begun and is not committed makes the
state torn.
"""

# ruff: noqa: ANN401 - models and optimizers are whatever the program has

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from hpcstage.elastic.ledger import Step
from hpcstage.torch.scaledrate import RateCourse


@dataclass(frozen=True)
class Reached:
    """How far the training is."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    """The samples of the epoch that count."""
    rate: RateCourse = field(default_factory=RateCourse)

    def to_state(self) -> dict[str, Any]:
        """Returns plain values."""
        return {"step": self.step, "epoch": self.epoch, "position": self.position, **asdict(self.rate)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Reached:
        """Reads what `to_state` returned."""
        own = {name: state[name] for name in ("step", "epoch", "position")}
        return cls(**own, rate=RateCourse(**{name: value for name, value in state.items() if name not in own}))


class CommittedState:
    """The state of a model, its optimizer and its scheduler, and how far the training is."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self._buffers: list[torch.Tensor] = []
        self.place = Reached()
        self.last: Step | None = None
        """The step that was committed last."""
        self.is_there = False
        """Whether this is more than what the program began with."""
        self.is_torn = False
        """Whether a step has begun that is not committed."""
        optimizer.register_step_pre_hook(lambda *_: self._tear())

    @property
    def is_good(self) -> bool:
        """Whether others may get it."""
        return self.is_there and not self.is_torn

    def commit(self, ids: Sequence[int], rate: RateCourse, generation: int) -> Step:
        """Takes the step that is done in a generation, with the samples of all ranks, and returns it."""
        place = self.place
        self.place = replace(place, step=place.step + 1, position=place.position + len(ids), rate=rate)
        self.last = Step(self.place.step, self.place.epoch, tuple(ids), generation)
        self.is_there, self.is_torn = True, False
        self._keep_buffers()
        return self.last

    def end_epoch(self) -> None:
        """Goes on to the next epoch."""
        self.place = replace(self.place, epoch=self.place.epoch + 1, position=0)

    def to_state(self) -> dict[str, Any]:
        """Returns all of it."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "place": self.place.to_state(),
            "last": None if self.last is None else {**asdict(self.last), "ids": list(self.last.ids)},
        }

    def load(self, state: dict[str, Any]) -> None:
        """Takes what `to_state` returned."""
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self.place = Reached.from_state(state["place"])
        last = state["last"]
        self.last = None if last is None else Step(**{**last, "ids": tuple(last["ids"])})
        self.is_torn = False
        self._keep_buffers()

    def put_buffers_back(self) -> None:
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
