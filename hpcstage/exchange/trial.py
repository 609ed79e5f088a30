"""Tries whether MPI connects the nodes, for `hpcstage doctor`: `python -m hpcstage.exchange.trial COUNT`.

Each process meets the others and leaves. That of rank 0 prints TRIED and the MPI library; one that fails prints why.
"""

from __future__ import annotations

import os
import signal
import sys

from hpcstage.exchange.transport.mpi import MpiWorld, WorldError
from hpcstage.protocol.exchangespec import OURS, TRIED

MEET_S = 15.0


def main(count: int) -> int:
    """Runs one process of `count`; returns its exit code."""
    signal.alarm(2 * int(MEET_S))
    try:
        world = MpiWorld(count)
        world.meet(MEET_S)
    except WorldError as error:
        if str(error):
            print(f"{OURS}{os.uname().nodename}: {': '.join(str(error).splitlines())}", flush=True)  # noqa: T201
        return 1
    if world.rank == 0:
        print(f"{TRIED}{world.version}", flush=True)  # noqa: T201
    world.finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
