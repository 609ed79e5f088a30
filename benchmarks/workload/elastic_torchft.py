"""Does what `elastic_steps.py` does with torchft: each process is a replica group of one.

Usage: elastic_torchft.py DIRECTORY STEP_SECONDS.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found, unused-ignore]

LIMIT = timedelta(seconds=5)
"""Of collectives and of heartbeats: torchft's own default for the latter."""


def main() -> None:
    """Steps until the process is killed."""
    directory, step_s = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    host = os.environ["ELASTIC_HOST"]
    weights = torch.zeros(16)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=1,
        load_state_dict=lambda state: weights.copy_(state["weights"]),
        state_dict=lambda: {"weights": weights},
        replica_id=host,
        timeout=LIMIT,
        quorum_timeout=timedelta(seconds=60),
    )
    with (directory / f"{host}-{os.getpid()}.steps").open("w", buffering=1) as notes:
        while True:
            manager.start_quorum()
            gradient = torch.ones(16)
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                weights += gradient
                notes.write(f"{time.time():.3f} {manager.num_participants()} {manager.current_step()}\n")
            time.sleep(step_s)


if __name__ == "__main__":
    main()
