"""Trains a classifier with `hpcstage.torch.Elastic`; a step takes a calibrated time.

Usage: elastic_epochs.py DIRECTORY STEP_SECONDS SEED EPOCHS. The first rank writes `ended.json` with the accuracy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from hpcstage.torch import Elastic, ElasticSampler

CLASSES, INPUTS, SAMPLES, BATCH = 10, 20, 3200, 16
SPREAD = 2.6
"""Of the samples of a class around its centre: classes overlap, so that accuracy stays far below 100 %."""


def made(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns samples of all classes."""
    centres = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(0)) * 1.5
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    return centres[labels] + SPREAD * torch.randn(count, INPUTS, generator=draw), labels


def main() -> None:
    """Trains to the end."""
    directory, step_s, seed, epochs = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = TensorDataset(*made(SAMPLES, 1))
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, 32), torch.nn.ReLU(), torch.nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    sampler = ElasticSampler(data, BATCH, seed=seed)
    elastic = Elastic(model, optimizer, sampler, warmup_steps=20)
    host = os.environ["ELASTIC_HOST"]
    late = steps = 0
    with (directory / f"{host}-{os.getpid()}.epochs").open("w", buffering=1) as notes:

        def train(net: torch.nn.Module) -> None:
            nonlocal late, steps
            for epoch in elastic.epochs(epochs):
                position, due_s = sampler.position, time.monotonic()
                for inputs, labels in DataLoader(data, batch_sampler=sampler):
                    due_s += step_s
                    optimizer.zero_grad()
                    torch.nn.functional.cross_entropy(net(inputs), labels).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    elastic.commit()
                    position += sampler.step_size(position)
                    wait_s = due_s - time.monotonic()
                    steps, late = steps + 1, late + (wait_s < 0)
                    time.sleep(max(0.0, wait_s))
                    due_s = max(due_s, time.monotonic())
                    if elastic.rank == 0:
                        notes.write(f"{time.time():.3f} {elastic.world} {epoch + position / SAMPLES:.6f}\n")

        elastic.run(train)
    if elastic.rank == 0:
        inputs, labels = made(4000, 2)
        with torch.no_grad():
            share = (model(inputs).argmax(1) == labels).double().mean().item()
        found = {"accuracy": 100 * share, "late": late, "steps": steps}
        path = directory / "ended.json.new"
        path.write_text(json.dumps(found))
        path.replace(directory / "ended.json")


if __name__ == "__main__":
    main()
