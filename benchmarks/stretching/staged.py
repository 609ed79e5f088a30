"""What the loss of a node costs at the source: a training whose data is staged loses a node whole, its daemon and its
store with it, when all data is on the nodes.

Owns the count: the emulated storage counts every byte that is read, and just before the loss it is looked up which
files lie on the node that is lost and on no other. With `replicate` every node has all of them; with `partition` each
has a part, and the files that only the lost node had are all that may be read from the source again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.files import make_files, place, total_bytes
from benchmarks.harness import Bench, Figure, Options, at_most, holds
from benchmarks.storage import Storage
from benchmarks.stretching.chaos import Chaos
from benchmarks.stretching.cuts import Key
from hpcstage.emulator import Settings

CELL, ARMS = "staged data, a node lost", ("replicate", "partition")
ROUNDS = 3
FILES, FILE_BYTES = 960, 20_000
SETTINGS = Settings(bandwidth_bytes_per_s=20e6, metadata_latency_s=0.001, data_latency_s=0.001)
LOST: Key = ("first", 2)
EPOCHS_AFTER = 2.0
"""So many epochs pass after the loss: every node has then read a share of all files."""
LIMIT_S = 60.0
MOST_MORE = 0.01


def sample(placement: str, options: Options) -> dict[str, Any]:
    """One training of three nodes that loses one."""
    with place(options) as where:
        work, data = where.disk / "work", where.memory / "files"
        work.mkdir()
        make_files(data, FILES, FILE_BYTES)
        size = total_bytes(data)
        with Storage(data, SETTINGS, where.memory) as storage:
            made = Chaos(work, where.local.renew(), 1, data=storage.path)
            try:
                made.begin("--placement", placement)
                _await(lambda: len(set().union(*_stores(made).values())) == FILES)
                before, stores = storage.counters().read_bytes, _stores(made)
                others = set().union(*(names for key, names in stores.items() if key != LOST))
                only = stores[LOST] - others
                made.lose(LOST, _processes(made))
                struck = time.time()
                made.settle(struck)
                reached = max(one["step"] for one in made.newest().values())
                steps = EPOCHS_AFTER * FILES / (2 * 2)
                _await(lambda: max(one["step"] for one in made.newest().values()) > reached + steps)
                codes = made.end()
                read = storage.counters().read_bytes
                return {
                    "read_ratio": read / size,
                    "before_ratio": before / size,
                    "lost_only_ratio": sum((data / name).stat().st_size for name in only) / size,
                    "codes": codes,
                    "wrong_epochs": made.proven()["wrong_epochs"],
                }
            finally:
                made.close()


def _await(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"what was waited for did not come within {LIMIT_S:g} s")
        time.sleep(0.05)


def _node_dirs(made: Chaos) -> dict[Key, Path]:
    """The directory of each node, as the processes that train there know it."""
    found = {}
    for key, one in made.newest().items():
        with contextlib.suppress(psutil.Error, KeyError):
            found[key] = Path(psutil.Process(one["pid"]).environ()["HPCSTAGE_NODE_DIR"])
    return found


def _stores(made: Chaos) -> dict[Key, set[str]]:
    """The files that each node has whole."""
    return {key: {path.name for path in node.rglob("sample*.bin")} for key, node in _node_dirs(made).items()}


def _processes(made: Chaos) -> list[psutil.Process]:
    """The daemon of the node that is lost, and what it has forked."""
    node = os.fspath(_node_dirs(made)[LOST])
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "hpcstage.daemon" in (words := process.cmdline()) and any(node in word for word in words):
                found += [process, *process.children(recursive=True)]
    return found


def show(bench: Bench) -> list[Figure]:
    """Returns the figures."""
    made = []
    for arm in ARMS:
        if not (found := bench.select(CELL, arm)):
            continue
        more = max(one["read_ratio"] - 1 - one["lost_only_ratio"] for one in found)
        what = f"{CELL}, {arm}"
        made.append(
            at_most(f"{what}: read beyond one dataset and what only that node had, in datasets", more, MOST_MORE)
        )
        made.append(holds(f"{what}: each sample counted once", not any(one["wrong_epochs"] for one in found)))
    return made
