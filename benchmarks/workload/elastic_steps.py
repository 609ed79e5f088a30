"""Makes steps that all ranks take part in, until a file exists, and notes when each was done.

Usage: elastic_steps.py DIRECTORY STEP_SECONDS. Each process writes `HOST-PID.steps`: a line a step, with the time, the
number of ranks, and the step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    """Steps until all ranks know that they should stop."""
    directory, step_s = Path(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    host = os.environ.get("ELASTIC_HOST", "host")
    with (directory / f"{host}-{os.getpid()}.steps").open("w", buffering=1) as notes:
        step, stop = 0, torch.zeros(1)
        while not stop.item():
            stop[0] = float((directory / "stop").exists())
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            step += 1
            notes.write(f"{time.time():.3f} {dist.get_world_size()} {step}\n")
            time.sleep(step_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
