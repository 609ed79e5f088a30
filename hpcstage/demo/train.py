"""The demonstration's training program: an ordinary one, which knows nothing of hpcstage.

It reads one file per sample, trains a small network on them, prints its losses, and writes its weights. Reads happen
when a sample is needed (num_workers=0), as in the program of the paper that runtime staging comes from.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 32
CLASSES = 10


class DemoFiles(Dataset[tuple[torch.Tensor, int]]):
    """One sample per file: the first bytes are the image, the name says the class."""

    def __init__(self, names: list[Path], slow_source_bytes_per_s: float) -> None:
        self.names = names
        self.seconds_per_byte = 1 / slow_source_bytes_per_s if slow_source_bytes_per_s else 0.0
        self.source_device = names[0].parent.stat().st_dev

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        name = self.names[index]
        with name.open("rb") as file:
            data = bytearray(file.read())
            if self.seconds_per_byte and os.fstat(file.fileno()).st_dev == self.source_device:
                time.sleep(len(data) * self.seconds_per_byte)
        image = torch.frombuffer(data, dtype=torch.uint8, count=3 * SIDE * SIDE)
        return image.reshape(3, SIDE, SIDE).float() / 255, int(name.parent.name)


def network() -> nn.Module:
    """Returns a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4),
        nn.Flatten(), nn.Linear(128 * (SIDE // 4) ** 2, CLASSES),
    )  # fmt: skip


def train(loader: DataLoader[tuple[torch.Tensor, int]], epochs: int) -> nn.Module:
    """Trains plainly; prints the mean loss of each epoch."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        total = 0.0
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            optimizer.step()
            total += float(loss.detach())
        print(f"epoch {epoch}: loss {total / len(loader):.17g}", flush=True)  # noqa: T201  the program's own output
    return model


def main() -> None:
    """Trains as the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--files", type=int, default=0, help="use only so many files")
    parser.add_argument("--slow-source", type=float, default=0.0, help="without FUSE: wait as if the source gave this")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    names = sorted(arguments.data.rglob("*.bin"))[: arguments.files or None]
    loader = DataLoader(DemoFiles(names, arguments.slow_source), batch_size=20)
    model = train(loader, arguments.epochs)
    torch.save(model.state_dict(), arguments.weights)


if __name__ == "__main__":
    main()
