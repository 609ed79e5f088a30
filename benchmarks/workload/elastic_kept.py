"""Does what `elastic_steps.py` does, with `hpcstage.torch.Elastic`: the processes outlive changes of the membership.

Usage: elastic_kept.py DIRECTORY STEP_SECONDS. A file `hold-HOST` has the process of that host hold Python's lock.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

from hpcstage.torch import Elastic, ElasticSampler

SAMPLES, EPOCHS = 10_000, 1000
FOR_EVER_S = 3600


def main() -> None:
    """Steps until the process is killed, or the epochs are over."""
    directory, step_s = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    inputs = torch.randn(SAMPLES, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sampler = ElasticSampler(data, 4)
    elastic = Elastic(model, optimizer, sampler)
    host = os.environ.get("ELASTIC_HOST", "host")
    holds = directory / f"hold-{host}"
    with (directory / f"{host}-{os.getpid()}.steps").open("w", buffering=1) as notes:

        def train(net: torch.nn.Module) -> None:
            for _ in elastic.epochs(EPOCHS):
                for batch, goals in DataLoader(data, batch_sampler=sampler):
                    optimizer.zero_grad()
                    loss = torch.nn.functional.mse_loss(net(batch), goals)
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    elastic.commit()
                    if holds.exists():
                        holds.unlink()
                        ctypes.PyDLL(None).sleep(FOR_EVER_S)
                    notes.write(f"{time.time():.3f} {elastic.world} {elastic.step}\n")
                    time.sleep(step_s)

        elastic.run(train)


if __name__ == "__main__":
    main()
