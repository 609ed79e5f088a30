"""More processes than the page has slots: all are counted, and what they opened and read."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from conftest import Hpcstage

from hpcstage.protocol.shim import PYTHON_SLOTS_FROM

Tree = Callable[..., Path]
MANY = """
import os, sys
names = sys.argv[2:4]
def child():
    with open(names[0], "rb") as file: file.read()
    with open(names[1], "rb") as file: file.read()
    os._exit(0)
for number in range(int(sys.argv[1])):
    pid = os.fork()
    if pid == 0: child()
    if os.waitpid(pid, 0)[1]: sys.exit("a child failed")
"""
SIZE = 1_000


def test_more_processes_than_slots(hpcstage: Hpcstage, make_tree: Tree) -> None:
    processes = PYTHON_SLOTS_FROM + 30
    data = make_tree(files=2, size_bytes=SIZE)
    names = sorted(path for path in data.rglob("*") if path.is_file())
    done = hpcstage(
        "run", "--mode", "upfront", "--data", data, "--",
        sys.executable, "-c", MANY, str(processes), *names, timeout_s=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    path = hpcstage.records()[-1]
    record = json.loads(path.read_text())
    coverage = record["coverage"]
    assert (coverage["opens"], coverage["swapped"]) == (2 * processes, 2 * processes)
    assert coverage["layers"] == {"native": processes + 1}
    assert record["totals"]["local_bytes"] == 2 * processes * SIZE
    assert path.stat().st_size < 500_000
    assert os.path.getsize(next(path.parent.glob("nodes/*.json"))) < 2_000_000
