"""Starts the ranks of a program as torchrun does, without a process of PyTorch's own in between.

python started.py RANKS PROGRAM [ARGUMENT...]
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

PORTS = range(15_000, 30_000)
"""Below those that the kernel gives to whoever asks for any: nobody takes one between our look and rank 0's."""


def free_port() -> int:
    """One that nobody listens on."""
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def main() -> int:
    """All ranks, and the exit code of the first that fails: the others are ended then, as they would wait for it."""
    count, program = int(sys.argv[1]), sys.argv[2:]
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen([sys.executable, *program], env={**common, "RANK": str(rank)}) for rank in range(count)]
    print("started", flush=True)
    code = 0
    with ThreadPoolExecutor(count) as waiting:
        for ended in as_completed([waiting.submit(rank.wait) for rank in ranks]):
            if ended.result() and not code:
                code = abs(ended.result())
                for rank in ranks:
                    rank.terminate()
    return code


if __name__ == "__main__":
    sys.exit(main())
