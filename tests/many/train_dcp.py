"""Trains a small network on virtual nodes and saves each step with torch.distributed.checkpoint, every rank its shards
in the directory of its node; started by torchrun. Goes on from the newest step that is there. Writes the weights."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

STEPS = 6


def newest(place: Path, ranks: int) -> int:
    """Returns the newest step of which all shards are there; -1 for none."""
    found = [path.parent for path in place.glob("step*/.metadata")]
    return max((int(path.name[4:]) for path in found if len(list(path.glob("*.distcp"))) == ranks), default=-1)


def main(place: Path, stop_after: int, out: Path) -> None:
    """The program."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = newest(place, ranks) + 1
    if first:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=place / f"step{first - 1}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(torch.load(place / f"step{first - 1}" / "optimizer.pt"))
    print("from", first, flush=True)
    for step in range(first, STEPS):
        generator = torch.Generator().manual_seed(step * ranks + rank)
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=generator)).square().mean().backward()
        for parameter in model.parameters():  # buckets of DistributedDataParallel differ in the first step of a process
            dist.all_reduce(parameter.grad)
        optimizer.step()
        made = place / f".step{step}.{os.environ['HPCSTAGE_TEST_NODE']}"
        made.mkdir(exist_ok=True)
        dcp.save({"model": model.state_dict()}, checkpoint_id=made)
        if rank == 0:
            torch.save(optimizer.state_dict(), made / "optimizer.pt")
        dist.barrier()
        if int(os.environ["HPCSTAGE_TEST_LEADS"]):
            made.rename(place / f"step{step}")
        dist.barrier()
        if step == stop_after:
            if rank == 0:
                Path(f"{out}.up").touch()
            time.sleep(90)
    if rank == 0:
        torch.save(model.state_dict(), out)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo's may hold up the end


if __name__ == "__main__":
    checkpoint, nodes, own = sys.argv[1], int(sys.argv[2]), int(os.environ["RANK"])
    node = own % nodes
    os.environ["HPCSTAGE_TEST_NODE"] = str(node)
    os.environ["HPCSTAGE_TEST_LEADS"] = str(int(own < nodes))
    main(Path(checkpoint.replace(".v0.", f".v{node}.")), int(sys.argv[3]), Path(sys.argv[4]))
