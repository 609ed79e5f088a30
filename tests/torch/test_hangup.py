"""A collective whose peer is stopped ends when its connections are shut down."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import GLOO, wait_for

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROGRAM = """
import os, socket, sys, threading, time
from datetime import timedelta
import torch, torch.distributed as dist
from hpcstage.torch.elastic.connections import GroupConnections

port, rank, work = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
kept, other = socket.create_connection(("127.0.0.1", port)), None
connections = GroupConnections()
dist.init_process_group("gloo", init_method=f"file://{work}/meet", rank=rank, world_size=2)
dist.barrier()
connections.complete()
later = socket.create_connection(("127.0.0.1", port))
open(f"{work}/ready-{rank}", "w").close()
if rank == 1:
    time.sleep(600)
while not os.path.exists(f"{work}/stopped"):
    time.sleep(0.01)
def end():
    print(connections.stuck())
    connections.shut_down()
threading.Timer(2.5, end).start()
began = time.monotonic()
try:
    dist.all_reduce(torch.ones(4_000_000))  # more than the connection takes
except RuntimeError:
    print(time.monotonic() - began - 2.5)
kept.sendall(b"a"), later.sendall(b"b")  # those of the program still work
dist.destroy_process_group()
"""


def test_it_ends_a_collective_and_nothing_else(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        ranks = [
            subprocess.Popen(
                [sys.executable, os.fspath(program), port, str(rank), os.fspath(tmp_path)],
                env={**os.environ, **GLOO}, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            wait_for(lambda: len([*tmp_path.glob("ready-*")]) == 2, 120, "two ranks")
            ranks[1].send_signal(signal.SIGSTOP)
            (tmp_path / "stopped").touch()
            said, _ = ranks[0].communicate(timeout=300)
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
        assert ranks[0].returncode == 0
        stuck, after_s = said.split()
        assert stuck == "{}", "the host of a process that is stopped answers"
        assert 0 <= float(after_s) < 2, "gloo's own limit is 30 minutes"
