"""One large file that programs on all nodes of a job read: how long they take, and what leaves the source.

Four virtual nodes read one file of emulated storage, once: in order, at random, through a mapping, in order with one
node that begins later, and as nanoGPT reads its tokens, in a training with PyTorch's DistributedDataParallel
(`workload/onefile.py`). Each way is run alone (`plain`) and behind `--nodes 4 --placement replicate` (`runtime`),
alternated; what the ranks print must be the same. The nodes share processors, memory and the page cache of this
machine: programs drop what they have read by calls, so that each node reads it anew, but what is mapped is in memory
for all. So bytes of `mapped` and `tokens` say what one node needs, not what four do.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.files import Place, empty, place
from benchmarks.harness import Arm, Bench, Figure, Options, at_most, divide, holds, options_of, parser
from benchmarks.programs import hpcstage_command, ranks_command, run
from benchmarks.storage import Storage
from benchmarks.workload import onefile
from hpcstage.emulator import Settings

PROGRAM = Path(onefile.__file__)
PLAIN, RUNTIME = "plain", "runtime"
NODES, QUICK_NODES = 4, 2
READ_BEFORE = 1 / 8
FILE_BYTES, QUICK_FILE_BYTES = 240_000_000, 60_000_000
BANDWIDTH, TOKENS_BANDWIDTH, QUICK_BANDWIDTH, LATENCY_S = 40e6, 20e6, 80e6, 0.001
COMPUTE_S, QUICK_COMPUTE_S = 4.0, 1.0
TOKENS_COMPUTE_S, QUICK_TOKENS_COMPUTE_S = 16.0, 2.0
LATER_S, QUICK_LATER_S = 12.0, 2.0
NEVER_WORSE = 1.05
MOST_SOURCE = 1.02
"""Bytes that leave the source, in times of those of the program alone."""


class Runs:
    """One file, one program."""

    def __init__(self, where: Place, options: Options) -> None:
        self.where = where
        self.quick = options.quick
        self.nodes = QUICK_NODES if options.quick else NODES
        self.size_bytes = QUICK_FILE_BYTES if options.quick else FILE_BYTES
        self.data = where.memory / "data"
        self.data.mkdir()
        (self.data / "one.bin").write_bytes(random.Random(7).randbytes(self.size_bytes))

    def arms(self, way: str) -> dict[str, Arm]:
        """Without hpcstage and with it."""
        return {PLAIN: lambda: self._run(way, staged=False), RUNTIME: lambda: self._run(way, staged=True)}

    def _words(self, way: str, path: Path) -> list[str]:
        compute_s = QUICK_COMPUTE_S if self.quick else COMPUTE_S
        if way == onefile.TOKENS:
            compute_s = QUICK_TOKENS_COMPUTE_S if self.quick else TOKENS_COMPUTE_S
        words = [path, "--way", way, "--compute", compute_s, "--later", QUICK_LATER_S if self.quick else LATER_S]
        return ranks_command(self.nodes, PROGRAM, words)

    def _run(self, way: str, *, staged: bool) -> dict[str, Any]:
        local, run_dir = self.where.local.renew(), empty(self.where.disk / "run")
        empty(self.where.disk / "state")
        full = TOKENS_BANDWIDTH if way == onefile.TOKENS else BANDWIDTH
        settings = Settings(QUICK_BANDWIDTH if self.quick else full, LATENCY_S, LATENCY_S)
        options = ("--nodes", str(self.nodes), "--placement", "replicate")
        with Storage(self.data, settings, self.where.memory, keep_cache=True) as storage:
            head = hpcstage_command("runtime", run_dir, local, str(storage.path), options) if staged else []
            done = run([*head, *self._words(way, storage.path / "one.bin")], self.where.disk)
            read = storage.counters().read_bytes / self.size_bytes
        output = "".join(sorted(done.stdout.splitlines(keepends=True)))
        sample = {"seconds": done.seconds, "output": output, "source_files": read}
        return {**sample, **(self._passed(run_dir) if staged else {})}

    def _passed(self, run_dir: Path) -> dict[str, Any]:
        """Returns what nodes got from each other, in files, and how many ended with the file."""
        parts = [json.loads(path.read_text()) for path in (run_dir / "nodes").glob("*.json")]
        received = sum(part["totals"]["peer_bytes"] or 0 for part in parts) / self.size_bytes
        return {"received_files": received, "nodes_with_it": sum(part["datasets"][0]["staged_files"] for part in parts)}


def figures(bench: Bench, ways: Sequence[str]) -> list[Figure]:
    """Never slower, nothing read twice that is read once without hpcstage, the same output."""
    made: list[Figure] = []
    nodes = QUICK_NODES if bench.options.quick else NODES
    for way in ways:
        made.append(at_most(f"{way}: runtime / plain", bench.ratio(way, RUNTIME, PLAIN), NEVER_WORSE))
        plain = bench.median(way, PLAIN, "source_files")
        source = divide(bench.median(way, RUNTIME, "source_files"), None if plain is None else max(plain, 1.0))
        made.append(at_most(f"{way}: bytes at the source / of plain, or of the file", source, MOST_SOURCE))
        outputs = {sample["output"] for sample in bench.samples if sample["cell"] == way}
        made.append(holds(f"{way}: same output", len(outputs) == 1 if outputs else None))
    if onefile.IN_ORDER in ways:
        most = 1 + nodes * READ_BEFORE  # what all have read before the nodes have met and the copy begins, and the file
        read = bench.median(onefile.IN_ORDER, RUNTIME, "source_files")
        made.append(at_most("in order: bytes at the source, in files", read, most * MOST_SOURCE))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = options_of(parser(__doc__).parse_args(argv))
    parameters = {"bandwidth": BANDWIDTH, "latency_s": LATENCY_S, "file_bytes": FILE_BYTES, "nodes": NODES}
    bench = Bench("onefile", options, parameters)
    has_torch = importlib.util.find_spec("torch") is not None
    ways = [way for way in onefile.WAYS if options.wants(way) and (has_torch or way != onefile.TOKENS)]
    with place(options) as where:
        runs = Runs(where, options)
        for way in ways:
            bench.measure(way, runs.arms(way), options.rounds(3))
    return bench.finish(figures(bench, ways))


if __name__ == "__main__":
    sys.exit(main())
