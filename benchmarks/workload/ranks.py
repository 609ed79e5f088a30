"""A training of several ranks on one machine: PyTorch, gloo on loopback, DistributedSampler, a file per sample.

    python started.py 4 ranks.py --data DIR --epochs 3 --timings FILE

Rank 0 writes when each epoch began and ended, and a digest of all losses and weights, bit by bit; if it is asked to,
also how many steps it has done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

INPUTS = 512


def train(given: argparse.Namespace) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    class Files(Dataset):  # type: ignore[type-arg]
        def __init__(self, root: Path) -> None:
            self.samples = sorted(entry.path for entry in os.scandir(root))

        def __len__(self) -> int:
            return len(self.samples)

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            with open(self.samples[index], "rb") as file:
                data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
            return data[:INPUTS].float() / 255, data.long().sum() % 10

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    model = nn.parallel.DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    dataset = Files(given.data)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, seed=given.seed)
    loader = DataLoader(dataset, batch_size=given.batch, sampler=sampler, num_workers=given.workers)
    digest, epochs = hashlib.sha256(), []
    tells = given.progress if dist.get_rank() == 0 else None
    for epoch in range(given.epochs):
        sampler.set_epoch(epoch)
        dist.barrier()
        began = time.time()
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            optimizer.step()
            digest.update(loss.detach().numpy().tobytes())
            if tells is not None:
                with tells.open("ab") as file:
                    file.write(b".")
            time.sleep(given.step_s)
        dist.barrier()
        epochs.append((began, time.time()))
    for value in model.module.state_dict().values():
        digest.update(value.numpy().tobytes())
    if dist.get_rank() == 0:
        given.timings.write_text(json.dumps({"epochs_s": epochs, "digest": digest.hexdigest()}))
    dist.destroy_process_group()


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--step-s", type=float, default=0.0, help="a pause per batch: a device that computes")
    parser.add_argument("--timings", type=Path, required=True)
    parser.add_argument("--progress", type=Path, help="a file that rank 0 makes a byte longer with each step")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
