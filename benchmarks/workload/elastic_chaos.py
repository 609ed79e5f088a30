"""Trains with `hpcstage.torch.Elastic` on staged files until a file `stop` exists; each process notes its newest step.

Usage: elastic_chaos.py DATA WORK STEP_SECONDS. `WORK/now-PID` holds the newest step of a process, `WORK/model-RANK.pt`
in the end the weights. `task` makes what is trained, and `follow` trains the same in one process, as the ledger says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from hpcstage.elastic.sampleledger import lineage
from hpcstage.torch import Elastic, ElasticSampler
from hpcstage.torch.elastic.scaling import RateCourse, ScaledRate

WARMUP_STEPS, BATCH, INPUTS, SEED = 10, 2, 6, 3
LEAST_EPOCHS = 2


class Files(Dataset[Any]):
    """Samples that follow from the bytes of files."""

    def __init__(self, directory: Path) -> None:
        """Names the files; they are read when their samples are."""
        self.samples = sorted(os.fspath(path) for path in directory.rglob("*.bin"))

    def __len__(self) -> int:
        """Returns the number of files."""
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns one sample."""
        found = Path(self.samples[index]).read_bytes()[:INPUTS]
        inputs = torch.tensor(list(found), dtype=torch.float64) / 128 - 1
        return inputs, inputs.sum(0, keepdim=True)


def task() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Returns a model and what trains it."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(INPUTS, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def follow(agreed: Path, data: Files) -> dict[str, torch.Tensor]:
    """Returns the weights of a training without faults and with the memberships of a ledger: the samples of each step,
    at the learning rate of its membership, in one process."""
    ids: dict[int, list[int]] = {}
    courses: dict[int, RateCourse] = {}
    sampler = ElasticSampler(data, BATCH, seed=SEED)
    for head, steps in lineage(agreed):
        place = head.begins
        course = courses.get(place.step, RateCourse()).turned(head.world, place.step, WARMUP_STEPS, scales=True)
        for step in steps:
            epoch = step.place.epoch - (not step.place.position)  # which may have ended behind the step
            begin = place.position if place.epoch == epoch else 0
            place = step.place
            sampler.begin(epoch=epoch, position=begin, rank=0, world=head.world)
            ids[place.step], courses[place.step] = list(sampler.share(begin).whole), course
    model, optimizer = task()
    done = 0
    rate = ScaledRate(optimizer, lambda: done, WARMUP_STEPS, scales=True)
    samples = [data[index] for index in range(len(data))]
    inputs, outputs = (torch.stack([sample[part] for sample in samples]) for part in (0, 1))
    for number in range(1, max(ids) + 1):
        rate.course = courses[number]
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[ids[number]]), outputs[ids[number]])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        done = number
    return model.state_dict()


def main() -> None:
    """Trains until it is told to stop."""
    data, work, step_s = Files(Path(sys.argv[1])), Path(sys.argv[2]), float(sys.argv[3])
    model, optimizer = task()
    sampler = ElasticSampler(data, BATCH, seed=SEED)
    elastic = Elastic(model, optimizer, sampler, warmup_steps=WARMUP_STEPS)
    job, node = os.environ["CHAOS_JOB"], os.environ.get("HPCSTAGE_VIRTUAL_NODE", "0")
    note = os.open(work / f"now-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)

    def say() -> None:
        newest = {"job": job, "node": int(node), "pid": os.getpid(), "world": elastic.world, "step": elastic.step}
        os.pwrite(
            note, json.dumps({**newest, "generation": elastic.generation, "at": time.time()}).ljust(256).encode(), 0
        )

    def train(net: torch.nn.Module) -> None:
        stop = torch.zeros(1)
        while not stop.item() or elastic.epoch < LEAST_EPOCHS:
            for _ in elastic.epochs(elastic.epoch + 1):
                for inputs, outputs in DataLoader(data, batch_sampler=sampler):
                    optimizer.zero_grad()
                    torch.nn.functional.mse_loss(net(inputs), outputs).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    elastic.commit()
                    say()
                    time.sleep(step_s)
            stop[0] = float((work / "stop").exists())
            dist.all_reduce(stop, dist.ReduceOp.MAX)

    elastic.run(train)
    torch.save(model.state_dict(), work / f"model-{elastic.rank}.pt")


if __name__ == "__main__":
    main()
