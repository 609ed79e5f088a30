"""Real PyTorch programs whose states change little or much between two checkpoints, and two ways to save a state.

Each program trains for real; what it learns does not matter. `torch.save` writes one file; `tensors` writes a directory
with one file for each tensor, under the tensor's name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LAYERS = 4
RANK = 8
HEAD = 100
EMBEDDING = 128
BATCH = 32
State = dict[str, Any]


class TrainedProgram:
    """A model, its optimizer and its batches."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Callable[[], Tensor]) -> None:
        self._model = model
        self._optimizer = optimizer
        self._batch = batch
        self._step = 0

    def train(self, steps: int) -> None:
        """Takes steps of the optimizer."""
        for _ in range(steps):
            self._optimizer.zero_grad()
            loss = self._model(self._batch()).square().mean()
            loss.backward()
            self._optimizer.step()
            self._step += 1

    def state(self) -> State:
        """What a program saves."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict(), "step": self._step}


class _Adapter(nn.Module):
    """A frozen layer with a trained product of two thin matrices beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, RANK, bias=False)
        self.up = nn.Linear(RANK, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


def frozen_body(width: int) -> TrainedProgram:
    """A frozen body and a head that Adam trains."""
    body = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)))
    head = nn.Linear(width, HEAD)
    model = nn.Sequential(body.requires_grad_(False), head)
    return TrainedProgram(model, torch.optim.Adam(head.parameters()), lambda: torch.randn(BATCH, width))


def top_layer(width: int) -> TrainedProgram:
    """A model of which Adam trains the top layer: about half of the state, with two thirds of that the optimizer's."""
    body = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS - 1)))
    top = nn.Linear(width, width)
    model = nn.Sequential(body.requires_grad_(False), top)
    return TrainedProgram(model, torch.optim.Adam(top.parameters()), lambda: torch.randn(BATCH, width))


def adapters(width: int) -> TrainedProgram:
    """Frozen layers with adapters of rank 8 that AdamW trains."""
    model = nn.Sequential(*(_Adapter(width) for _ in range(LAYERS)))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return TrainedProgram(model, torch.optim.AdamW(trained), lambda: torch.randn(BATCH, width))


def embedding(width: int) -> TrainedProgram:
    """An embedding that SGD trains with words of which few are common and many rare (Zipf)."""
    words = LAYERS * width * width // EMBEDDING
    table = nn.EmbeddingBag(words, EMBEDDING, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    weights = 1.0 / torch.arange(1, words + 1)
    order = torch.randperm(words)

    def batch() -> Tensor:
        drawn = torch.multinomial(weights, BATCH * 16, replacement=True)
        return order[drawn].reshape(BATCH, 16)

    return TrainedProgram(table, optimizer, batch)


def dense(width: int) -> TrainedProgram:
    """Layers that Adam trains, all of them: two thirds of the state are the optimizer's."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)))
    return TrainedProgram(model, torch.optim.Adam(model.parameters()), lambda: torch.randn(BATCH, width))


PROGRAMS: Mapping[str, Callable[[int], TrainedProgram]] = {
    "frozen body, Adam head": frozen_body,
    "adapters, AdamW": adapters,
    "top layer, Adam": top_layer,
    "embedding, SGD": embedding,
    "dense, Adam": dense,
}


def save_torch(state: State, directory: Path, name: str) -> None:
    """Saves a state by torch.save."""
    torch.save(state, directory / f"{name}.pt")


def save_tensors(state: State, directory: Path, name: str) -> None:
    """Saves a state as a file for each tensor, and one for the rest."""
    (directory / name).mkdir()
    rest = {}
    for key, value in _leaves(state, ""):
        if isinstance(value, Tensor):
            value.contiguous().numpy().tofile(directory / name / f"{key}.bin")
        else:
            rest[key] = repr(value)
    (directory / name / "rest.json").write_text(json.dumps(rest))


FORMS: Mapping[str, Callable[[State, Path, str], None]] = {"torch.save": save_torch, "tensors": save_tensors}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401  a state holds anything
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield from _leaves(below, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
