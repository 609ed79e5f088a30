"""Starts the ranks of a program as torchrun does, without a process of PyTorch's own in between.

python started.py RANKS PROGRAM [ARGUMENT...]
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def main() -> int:
    """All ranks, and the worst exit code."""
    count, program = int(sys.argv[1]), sys.argv[2:]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    common |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen([sys.executable, *program], env={**common, "RANK": str(rank)}) for rank in range(count)]
    print("started", flush=True)
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
