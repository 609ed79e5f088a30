"""Turns at the source: first come, first served, and before them what somebody waits for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan
from hpcstage.store import copyfile

pytestmark = pytest.mark.skipif(not copyfile.HAS_TURNS, reason="the C function was not built")
HELP = """
import os, sys, threading, time
from pathlib import Path
from hpcstage.store import _copy, copier, copyfile
from hpcstage.store.copierpipe import COMMAND, RESULT, Op
from hpcstage.store.counters import StatsArea

def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
"""
ORDER = (
    HELP
    + """
went, threads, stats = [], [], StatsArea(2)

def wait_as(work):
    before = _copy.waiting()
    threads.append(threading.Thread(target=work))
    threads[-1].start()
    until(lambda: _copy.waiting() == before + 1)

def plain(name):
    _copy.take_turn()
    went.append((name, *(stats.thread(n).words[1] for n in range(2))))
    _copy.give_turn()

def copy(number, urgent):
    names = (b"source", b"t%d" % number, b"target%d" % number)
    outcome = copyfile.copy(copyfile.CopyWorker(stats.thread(number)), copyfile.CopyJob(*names, urgent=urgent), 1 << 20)
    assert outcome.status is copyfile.Status.OK, outcome

os.chdir(sys.argv[1])
Path("source").write_bytes(b"data")
copyfile.limit_turns(1)
for _ in range(3):
    _copy.take_turn(), _copy.give_turn()
_copy.take_turn()
wait_as(lambda: plain("first"))
wait_as(lambda: copy(0, urgent=False))
wait_as(lambda: plain("last"))
wait_as(lambda: copy(1, urgent=True))
_copy.give_turn()
for thread in threads:
    thread.join()
assert _copy.waiting() == 0
_copy.take_turn(), _copy.give_turn()
print(went)
"""
)
COPIER = (
    HELP
    + """
began, gate = [], threading.Semaphore(0)

def copy(worker, job, limit_bytes):
    began.append((int(os.path.basename(job.temporary)), job.urgent))
    gate.acquire()
    return copyfile.CopyOutcome()

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
tell(Op.COPY, *range(6))
until(lambda: len(began) == 3)
tell(Op.CANCEL, 3)
tell(Op.HURRY, 5)
until(lambda: 5 in one._tasks._urgent)
gate.release()
until(lambda: len(began) == 4)
gate.release(4)
data = b""
while len(data) < 6 * RESULT.size:
    data += os.read(results, 4096)
print(sorted(began[:3]), *began[3:])
"""
)


def _printed(code: str, directory: Path) -> str:
    words = [sys.executable, "-c", code, directory]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_first_come_first_served_but_for_what_is_urgent(tmp_path):
    assert _printed(ORDER, tmp_path) == "[('first', 0, 1), ('last', 1, 1)]\n"


def test_what_is_waited_for_comes_next_and_goes_first(local_dir, make_tree):
    manifest = scan(resolve([os.fspath(make_tree(files=6))], local_dir)).manifest
    manifest.save(local_dir / "manifest.bin")
    first = [(0, False), (1, False), (2, False)]
    assert _printed(COPIER, local_dir) == f"{first} (5, True) (4, False)\n"
