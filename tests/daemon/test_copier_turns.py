"""Turns at the source: who waits for one holds no file, so what the program waits for comes next.

The copier runs in a process of its own; only the copying of a file is another: it stays at the source until it may go.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hpcstage.daemon import copyfile
from hpcstage.plan.datasets import resolve
from hpcstage.plan.scan import scan

pytestmark = pytest.mark.skipif(not copyfile.HAS_TURNS, reason="the C function was not built")
CODE = """
import os, sys, threading, time
from pathlib import Path
from hpcstage.daemon import copier, copyfile
from hpcstage.daemon.messages import COMMAND, RESULT, Op
from hpcstage.daemon.stats import StatsArea

began, gate = [], threading.Semaphore(0)

def copy(worker, job, limit_bytes):
    began.append(int(os.path.basename(job.temporary)))
    gate.acquire()
    worker.give_turn()
    return copyfile.Outcome()

def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)

def tell(op, *ids):
    os.write(commands, b"".join(COMMAND.pack(op, id_) for id_ in ids))

copyfile.copy = copy
node_dir = Path(sys.argv[1])
os.chdir(node_dir)
settings = copier.CopierSettings(node_dir, node_dir / "manifest.bin", transfers=2)
assert settings.threads == 3, "one more than turns"
(ours, commands), (results, theirs) = os.pipe(), os.pipe()
one = copier.Copier(settings, "test", StatsArea(settings.threads), 0, theirs)
threading.Thread(target=one.run, args=(ours,), daemon=True).start()
tell(Op.MANIFEST, 0)
tell(Op.COPY, *range(5))
until(lambda: len(began) == 2)
tell(Op.CANCEL, 2)
tell(Op.HURRY, 4)
until(lambda: 4 in one._urgent)
gate.release()
until(lambda: len(began) == 3)
gate.release(3)
data = b""
while len(data) < 5 * RESULT.size:
    data += os.read(results, 4096)
print(*sorted(began[:2]), *began[2:])
# Cancelled and hurried ids leave tokens for which there is no file: their turns were given back.
tell(Op.COPY, 0, 1)
until(lambda: len(began) == 6)
gate.release(2)
print("all turns are there")
"""


def test_what_is_waited_for_comes_before_what_waits_for_a_turn(local_dir, make_tree):
    manifest = scan(resolve([os.fspath(make_tree(files=5))], local_dir)).manifest
    manifest.save(local_dir / "manifest.bin")
    done = subprocess.run(
        [sys.executable, "-c", CODE, local_dir], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 1 4 3\nall turns are there\n"
