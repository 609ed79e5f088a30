"""Gives all that an `accelerate.Accelerator` prepared as one state, for `Checkpointer`. Needs Accelerate.

`Accelerator.save_state` lets others save the models' weights only, and pickles optimizers, which are two thirds of the
bytes, where they are. The module therefore takes the objects themselves from the Accelerator.
"""

# ruff: noqa: ANN401 - an Accelerator is of a package that may be missing

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class AcceleratedState:
    """The models, optimizers, schedulers, scaler and registered objects of an Accelerator, with the random states.

        accelerated = AcceleratedState(accelerator)      # after accelerator.prepare(...)
        if loaded := checkpointer.load():
            accelerated.load_state_dict(loaded.state)
        ...
        if accelerator.is_main_process:
            checkpointer.save(accelerated.state_dict, step)

    It is for states that all processes share. With FSDP, DeepSpeed or Megatron each process has its part of the state:
    use Accelerate's own saver there. Random states are those of the process that saves.
    """

    def __init__(self, accelerator: Any) -> None:
        """Raises a ValueError where processes have different states."""
        kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
        if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
            raise ValueError(f"AcceleratedState saves states that all processes share, and this one is of {kind}")
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; its tensors are those of the program."""
        made: dict[str, Any] = {
            kind: [one.state_dict() for one in objects] for kind, objects in self._objects() if objects
        }
        made["accelerator_step"] = self._accelerator.step
        made["random"] = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            made["random"]["cuda"] = torch.cuda.get_rng_state_all()
        return made

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives the objects their states. Raises a ValueError if there are other objects than when it was saved."""
        for kind, objects in self._objects():
            saved = state.get(kind, [])
            if len(saved) != len(objects):
                raise ValueError(f"the checkpoint has {len(saved)} {kind}, and the Accelerator {len(objects)}")
            for one, its_state in zip(objects, saved, strict=True):
                one.load_state_dict(its_state)
        self._accelerator.step = state["accelerator_step"]
        random.setstate(state["random"]["python"])
        np.random.set_state(state["random"]["numpy"])
        torch.set_rng_state(state["random"]["torch"])
        if "cuda" in state["random"] and torch.cuda.device_count() == len(state["random"]["cuda"]):
            torch.cuda.set_rng_state_all(state["random"]["cuda"])

    def _objects(self) -> Iterator[tuple[str, list[Any]]]:
        accelerator = self._accelerator
        yield "models", [accelerator.unwrap_model(model) for model in accelerator._models]
        yield "optimizers", list(accelerator._optimizers)
        yield "schedulers", list(accelerator._schedulers)
        yield "scalers", [] if accelerator.scaler is None else [accelerator.scaler]
        yield "registered objects", list(accelerator._custom_objects)
