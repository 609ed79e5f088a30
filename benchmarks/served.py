"""A large file is served while it arrives: how much faster is a reader in order, and what does a read cost?

`in order`: one program reads one file from the beginning to the end, from storage with 2 ms for each request and no
limit of bandwidth; alone and behind `--mode runtime`, alternated, with the same output. `cost`: while a
file arrives, reads of 4 KiB of what has arrived take turns with those of a local file, in one process.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.arriving import go, read_of_arriving, until
from benchmarks.faults import started
from benchmarks.files import Place, empty, place
from benchmarks.harness import Arm, Bench, Figure, Options, at_least, at_most, divide, holds, options_of, parser
from benchmarks.programs import hpcstage_command, record, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings
from hpcstage.emulator.build import cached_binary, compile_c

WORKLOAD = Path(__file__).resolve().parent / "workload"
READING, COSTS = WORKLOAD / "served.py", WORKLOAD / "servedreads.c"
CALLS = ("pread", "preadv", "read", "readv")
PLAIN, RUNTIME = "plain", "runtime"
ORDER_BYTES, QUICK_ORDER_BYTES = 4_000_000_000, 60_000_000
ORDER = Settings(data_latency_s=0.002)
LEAST_TIMES_AS_FAST = 3.0
COST_BYTES = 200_000_003
COST = Settings(20e6, 0.001, 0.001)
BEGUN = 0.35
"""The part of the file that has arrived when its reads are measured."""
BLOCKS, QUICK_BLOCKS = 400, 20
MOST_US = 1.0
LIMIT_S = 120.0
SERVED = "served"


class Runs:
    """The files, and the programs that read them."""

    def __init__(self, where: Place, options: Options) -> None:
        self.where = where
        self.size = QUICK_ORDER_BYTES if options.quick else ORDER_BYTES
        self.blocks = QUICK_BLOCKS if options.quick else BLOCKS

    def orders(self) -> dict[str, Arm]:
        """Without hpcstage and with it."""
        return {PLAIN: lambda: self._in_order(None), RUNTIME: lambda: self._in_order(RUNTIME)}

    def _in_order(self, mode: str | None) -> dict[str, Any]:
        where = self.where
        data, run_dir, local = self._data(self.size), empty(where.disk / "run"), where.local.renew()
        empty(where.disk / "state")
        with Storage(data, ORDER, where.memory, keep_cache=True) as storage:
            head = [] if mode is None else hpcstage_command(mode, run_dir, local, str(storage.path))
            done = run([*head, sys.executable, str(READING), "order", str(storage.path / "large")], where.disk)
            asked = storage.counters()
        sample = {"seconds": done.seconds, "output": done.stdout, "source_ratio": asked.read_bytes / self.size}
        if mode is not None:
            sample |= {"mode_done": record(run_dir)["run"]["mode"], "stderr": done.stderr[-2000:]}
        return sample

    def cost(self) -> dict[str, Any]:
        """What reads take in one process."""
        where = self.where
        data, local, run_dir = self._data(COST_BYTES), where.local.renew(), empty(where.disk / "run")
        here, beside, library = empty(where.disk / "here"), where.disk / "beside", cached_binary(COSTS)
        beside.write_bytes((data / "large").read_bytes()[: 4 << 20])
        if not library.exists():
            compile_c(COSTS, library, ["-shared", "-fPIC"])
        empty(where.disk / "state")
        with Storage(data, COST, where.memory, keep_cache=True) as storage:
            words = [sys.executable, str(READING), "cost", str(storage.path / "large"), str(beside), str(library)]
            words += ["--here", str(here), "--blocks", str(self.blocks)]
            with started(
                [*hpcstage_command("runtime", run_dir, local, str(storage.path)), *words], where.disk
            ) as process:
                until((here / "begin").exists, process)
                until(lambda: storage.counters().read_bytes > BEGUN * COST_BYTES, process)
                before = read_of_arriving(local)
                go(here / "begin-go", "")
                until((here / "end").exists, process)
                served = read_of_arriving(local) - before
                go(here / "end-go", "")
                out, err = process.communicate(timeout=LIMIT_S)
        found: Mapping[str, list[float]] = json.loads(out.splitlines()[-1]) if process.returncode == 0 else {}
        asked = len(CALLS) * self.blocks * 250 * 4096
        values = {
            f"{call}_{name}_ns": ns
            for call, both in found.items()
            for name, ns in zip(("local", SERVED), both, strict=True)
        }
        return {**values, "served_share": served / asked, "stderr": err.decode(errors="replace")[-1500:]}

    def _data(self, size: int) -> Path:
        """Returns a directory with one file of this size; the other one goes."""
        data = self.where.memory / "data"
        data.mkdir(exist_ok=True)
        path = data / "large"
        if not path.exists() or path.stat().st_size != size:
            piece = random.Random(7).randbytes(1 << 24)
            with path.open("wb") as file:
                for start in range(0, size, len(piece)):
                    file.write(start.to_bytes(8, "little") + piece[: min(len(piece), size - start) - 8])
        return data


def extra_us(bench: Bench, call: str) -> float | None:
    """What a served read takes beyond that of a local file: the median over samples."""
    pairs = [(s.get(f"{call}_{SERVED}_ns"), s.get(f"{call}_local_ns")) for s in bench.select("cost", SERVED)]
    found = [(ours - local) / 1e3 for ours, local in pairs if ours is not None and local is not None]
    return statistics.median(found) if found else None


def figures(bench: Bench, options: Options) -> list[Figure]:
    """Of both cells."""
    made: list[Figure] = []
    if options.wants("in order"):
        times = divide(bench.median("in order", PLAIN), bench.median("in order", RUNTIME))
        made.append(at_least("in order, 2 ms per request: runtime, times as fast as plain", times, LEAST_TIMES_AS_FAST))
        outputs = {s["output"] for arm in (PLAIN, RUNTIME) for s in bench.select("in order", arm)}
        made.append(holds("in order: same output", len(outputs) == 1 if outputs else None))
    if options.wants("cost"):
        made += [
            at_most(f"{call} of 4 KiB that have arrived costs more", extra_us(bench, call), MOST_US, "us")
            for call in CALLS
        ]
        shares = [s["served_share"] for s in bench.select("cost", SERVED)]
        made.append(holds("cost: all reads were of what had arrived", all(x >= 1 for x in shares) if shares else None))
    return made


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("served", options, {"order_bytes": ORDER_BYTES, "latency_s": ORDER.data_latency_s})
    with place(options) as where:
        runs = Runs(where, options)
        if options.wants("cost"):
            bench.measure("cost", {SERVED: runs.cost}, options.rounds(5))
        if options.wants("in order"):
            bench.measure("in order", runs.orders(), options.rounds(3))
    return bench.finish(figures(bench, options))


if __name__ == "__main__":
    sys.exit(main())
