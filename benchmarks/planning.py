"""What planning for many files on many nodes costs: time and memory. A part of `benchmarks.scale`.

`python -m benchmarks.planning FILES NODES KIND` plans once and prints what that took: each plan is measured in a
process of its own, so that its peak of memory is the plan's. KIND is replicate, partition (all nodes
together have twice the room that is needed) or half (only half of the files has room). Seconds are processor time:
place_s, own_s and others_s are what each node does.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness import Bench, Figure, Options, at_most
from hpcstage.plan.placement.placements import Placing, place_shares
from hpcstage.plan.types import Budget

NODE = 3
DISTINCT_SIZES = 100_000
MILLION = 10**6
MOST_PLAN_S = 20.0
MOST_PLAN_BYTES = 300e6
MILLIONS, QUICK_MILLIONS, NODES = 10, 1, 1024
KINDS = ("replicate", "partition", "half")
T = TypeVar("T")


def plans(options: Options) -> dict[str, str]:
    """The kinds of plans, by the names of the cells."""
    millions = QUICK_MILLIONS if options.quick else MILLIONS
    return {f"plan, {kind}, {millions} M files, {NODES} nodes": kind for kind in KINDS}


def plan_apart(files: int, nodes: int, kind: str) -> dict[str, Any]:
    """Plans in a process of its own; its seconds are processor time."""
    words = [sys.executable, "-m", "benchmarks.planning", str(files), str(nodes), kind]
    done = subprocess.run(words, check=True, capture_output=True, timeout=600)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def figures(bench: Bench) -> list[Figure]:
    """Seconds and memory."""
    made: list[Figure] = []
    for name in plans(bench.options):
        made.append(at_most(f"{name}: seconds", bench.median(name, "planned"), MOST_PLAN_S, "s"))
        memory = bench.median(name, "planned", "memory_bytes")
        made.append(at_most(f"{name}: memory besides the manifest", memory, MOST_PLAN_BYTES, "bytes"))
    return made


def table(bench: Bench) -> None:
    """Where the time goes."""
    keys = ("seconds", "place_s", "own_s", "others_s", "memory_bytes")
    rows = [[name, *(bench.median(name, "planned", key) for key in keys)] for name in plans(bench.options)]
    bench.sheet("Planning on one node (processor time, memory besides the sizes)", ["", *keys], rows)


def measure(bench: Bench) -> None:
    """All cells that are asked for."""
    files = MILLION * (QUICK_MILLIONS if bench.options.quick else MILLIONS)
    for name, kind in plans(bench.options).items():
        if bench.options.wants(name):
            bench.measure(name, {"planned": partial(plan_apart, files, NODES, kind)}, bench.options.rounds(1))


# ---- one plan


def main() -> None:
    """Prints JSON."""
    files, nodes, kind = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    dice = random.Random(1)
    some = array("Q", (int(dice.lognormvariate(11.5, 0.6)) for _ in range(min(files, DISTINCT_SIZES))))
    sizes = memoryview(some * (files // len(some) + 1))[:files]
    on_disk = sum(sizes) + 2048 * files
    share = {"replicate": 1.1 * nodes, "partition": 2.0, "half": 0.5}[kind]
    room = Budget(int(share * on_disk / nodes), 1 << 40)
    asked = Placing.REPLICATE if kind == "replicate" else Placing.PARTITION
    before, started_s = _memory(), time.process_time()
    took: dict[str, float] = {}
    placement = _timed(took, "place_s", lambda: place_shares(asked, sizes, [room] * nodes))
    mine = min(NODE, nodes - 1)
    _timed(took, "own_s", lambda: placement.own(mine))
    _timed(took, "others_s", lambda: placement.others(mine))
    found = {"seconds": time.process_time() - started_s, **took, "memory_bytes": _memory() - before}
    print(json.dumps({**found, "unplaced_files": len(placement.unplaced())}))


def _timed(took: dict[str, float], name: str, run: Callable[[], T]) -> T:
    started_s = time.process_time()
    value = run()
    took[name] = time.process_time() - started_s
    return value


def _memory() -> int:
    # Not ru_maxrss, which a process inherits from the one that started it.
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM")


if __name__ == "__main__":
    main()
