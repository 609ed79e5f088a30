"""A bare ping-pong between two processes: `mpiexec -n 2 python -m benchmarks.pingpong SIZE COUNT one|many`.

Each message lies in a place of its own (`many`), as the files of a store do, or all are sent from and received into
the same place (`one`), which then stays in the processor's cache. Prints seconds and bytes of the best of three rounds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

ROUNDS = 3
_PAGE = 4096


def main() -> None:
    """Both processes."""
    from mpi4py import MPI

    size, count, places = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    sending, receiving = (_buffers(size, count if places == "many" else 1) for _ in range(2))
    seconds = min(_round(MPI, sending, receiving, count) for _ in range(ROUNDS))
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"seconds": seconds, "bytes": 2 * size * count}))


def _buffers(size: int, count: int) -> list[memoryview]:
    whole = memoryview(bytearray(size * count))
    for at in range(0, len(whole), _PAGE):
        whole[at] = 1
    return [whole[at : at + size] for at in range(0, len(whole), size)]


def _round(mpi: Any, sending: list[memoryview], receiving: list[memoryview], count: int) -> float:  # noqa: ANN401
    comm = mpi.COMM_WORLD
    comm.Barrier()
    start = time.perf_counter()
    for number in range(count):
        out, into = sending[number % len(sending)], receiving[number % len(receiving)]
        if comm.rank == 0:
            comm.Send([out, mpi.BYTE], 1)
            comm.Recv([into, mpi.BYTE], 1)
        else:
            comm.Recv([into, mpi.BYTE], 0)
            comm.Send([out, mpi.BYTE], 0)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
