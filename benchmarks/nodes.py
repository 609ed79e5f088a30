"""Several nodes on one source: what leaves the source, and how long epochs take, by placement and number of nodes.

N virtual nodes of this machine train with PyTorch's DistributedSampler from one emulated source, which counts every
byte that is read from it. They share processors and memory, so times say little of a cluster and are shown for that
reason only against reading directly on the same N; the start of the program, which staging overlaps, takes longer than
an epoch here. All nodes read through one mount. Its cache is dropped whenever a file is opened, so what is read twice
is counted twice, but for two nodes that have a file open at the same moment; opens are counted without exception.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.equations import alike
from benchmarks.files import Place, empty, make_files, place, total_bytes
from benchmarks.harness import Arm, Bench, Figure, Options, Row, at_least, at_most, holds, options_of, parser
from benchmarks.programs import hpcstage_command, ranks_command, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings
from hpcstage.plan.placement.placements import Placing

MB = 1e6
RANKS = Path(__file__).resolve().parent / "workload" / "ranks.py"
FILE_BYTES = 100_000
FILES, QUICK_FILES = 640, 64
BANDWIDTH = 20 * MB
LATENCY_S = 0.001
NODES, QUICK_NODES = (1, 2, 4, 8), (1, 2)
EPOCHS, QUICK_EPOCHS = (1, 3), (2,)
MOST_READ = 1.001
SHARED = ("replicate", "partition")
MOST_HITS_ERROR = 0.02


@dataclass(frozen=True)
class Cell:
    """How many nodes, how often the dataset is read."""

    nodes: int
    epochs: int

    @property
    def name(self) -> str:
        """In results and for --only."""
        return f"N{self.nodes} E{self.epochs}"


class Runs:
    """One dataset, one program."""

    def __init__(self, where: Place, options: Options) -> None:
        self.where = where
        self.data = where.memory / "data"
        make_files(self.data, QUICK_FILES if options.quick else FILES, FILE_BYTES)
        self.size_bytes = total_bytes(self.data)
        run([sys.executable, "-c", "import torch, torch.distributed, torch.utils.data"], where.disk)

    def arms(self, cell: Cell) -> dict[str, Arm]:
        """Reading directly; each node for itself; and the placements that share."""
        made: dict[str, Arm] = {"direct": lambda: self._direct(cell)}
        kinds = SHARED if cell.nodes > 1 else ("private",)
        for kind in ("private", *kinds) if cell.nodes > 1 else kinds:
            made[kind] = lambda kind=kind: self._staged(cell, kind)  # type: ignore[misc]
        return made

    def _command(self, cell: Cell, data: Path) -> list[str]:
        words = ["--data", data, "--epochs", cell.epochs, "--timings", self.where.disk / "timings.json"]
        return ranks_command(cell.nodes, RANKS, words)

    def _storage(self) -> Storage:
        settings = Settings(BANDWIDTH, metadata_latency_s=LATENCY_S, data_latency_s=LATENCY_S)
        return Storage(self.data, settings, self.where.memory)

    def _direct(self, cell: Cell) -> dict[str, Any]:
        with self._storage() as storage:
            done = run(self._command(cell, storage.path), self.where.disk)
            return {"seconds": done.seconds, **self._times(), **self._read(storage)}

    def _staged(self, cell: Cell, kind: str) -> dict[str, Any]:
        local, run_dir = self.where.local.renew(), empty(self.where.disk / "run")
        empty(self.where.disk / "state")  # no trace of the sample before
        options = ("--nodes", str(cell.nodes), "--placement", kind)
        with self._storage() as storage:
            head = hpcstage_command("runtime", run_dir, local, str(storage.path), options)
            done = run([*head, *self._command(cell, storage.path)], self.where.disk)
            read = self._read(storage)
        left = [path.name for path in local.glob("hpcstage-*/*/")]
        return {"seconds": done.seconds, **self._times(), **read, **served(run_dir), "left": left}

    def _read(self, storage: Storage) -> dict[str, Any]:
        count = storage.counters()
        return {"read_bytes": count.read_bytes, "read_ratio": count.read_bytes / self.size_bytes, "opens": count.opens}

    def _times(self) -> dict[str, Any]:
        times = json.loads((self.where.disk / "timings.json").read_text())
        epochs = [round(end - began, 4) for began, end in times["epochs_s"]]
        return {"epochs_s": epochs, "first_s": epochs[0], "later_s": _mean(epochs[1:]), "digest": times["digest"]}


def served(run_dir: Path) -> dict[str, Any]:
    """From the nodes' parts: where the program's opens were served, and what passed between nodes."""
    parts = [json.loads(path.read_text()) for path in (run_dir / "nodes").glob("*.json")]
    counters = [process["counters"] for part in parts for process in part["processes"]]
    totals = [part["totals"] for part in parts]
    return {
        "parts": len(parts),
        "complete": all(part["complete"] for part in parts),
        "placements": sorted({part["placement"] for part in parts}),
        "groups": max((part["group"].get("generations", 0) for part in parts if part["group"]), default=0),
        "local_opens": _sum(counters, "hit_opens") + _sum(counters, "ready_opens"),
        "source_opens": _sum(counters, "source_opens"),
        "peer_files": _sum(totals, "peer_files"),
        "copied_files": _sum(totals, "copied_files"),
        "problems": sorted({problem["id"] for part in parts for problem in part["problems"]}),
    }


def _sum(rows: Sequence[dict[str, Any]], key: str) -> float:
    return float(sum(row.get(key) or 0 for row in rows))


def _mean(values: Sequence[float]) -> float | None:
    return statistics.mean(values) if values else None


def from_peers(bench: Bench, cell: Cell, kind: str) -> float | None:
    """Files received from other nodes, in datasets."""
    files = QUICK_FILES if bench.options.quick else FILES
    received = bench.median(cell.name, kind, "peer_files")
    return None if received is None else received / files


def expected_from_peers(cell: Cell, kind: str) -> float:
    """Paper 004: each epoch a node reads a random p-th part, of which it holds what `sharing` says."""
    sharing = alike(Placing(kind), cell.nodes, 1.0 if kind == "replicate" else 1.0 / cell.nodes)
    if kind == "replicate":
        return cell.nodes - 1.0  # every node ends with all files
    return sum(sharing.hits(epoch).peers for epoch in range(1, cell.epochs + 1))


def figures(bench: Bench, cells: Sequence[Cell]) -> list[Figure]:
    """What was asked for."""
    found: list[Figure] = []
    for cell in cells:
        kinds = SHARED if cell.nodes > 1 else ("private",)
        for kind in kinds:
            what = f"{cell.name} {kind}"
            found.append(at_most(f"{what}: read from the source, in datasets", _ratio(bench, cell, kind), MOST_READ))
            found.append(at_most(f"{what}: opens at the source, per file", _opens(bench, cell, kind), MOST_READ))
            found.append(holds(f"{what}: the same losses and weights as direct", _same(bench, cell, kind)))
        found.append(
            at_least(f"{cell.name} direct: read, in datasets", _ratio(bench, cell, "direct"), cell.epochs * 0.99)
        )
        if cell.nodes > 1:
            most = expected_from_peers(cell, "partition") * (1 + MOST_HITS_ERROR) + MOST_HITS_ERROR
            measured = from_peers(bench, cell, "partition")
            found.append(at_most(f"{cell.name} partition: received from other nodes, in datasets", measured, most))
    return found


def _ratio(bench: Bench, cell: Cell, arm: str) -> float | None:
    return bench.median(cell.name, arm, "read_ratio")


def _opens(bench: Bench, cell: Cell, arm: str) -> float | None:
    """The opens to read a file."""
    opens = bench.median(cell.name, arm, "opens")
    return None if opens is None else opens / (QUICK_FILES if bench.options.quick else FILES)


def _same(bench: Bench, cell: Cell, kind: str) -> bool | None:
    digests = [{s["digest"] for s in bench.select(cell.name, arm)} for arm in ("direct", kind)]
    return digests[0] == digests[1] if all(digests) else None


def tables(bench: Bench, cells: Sequence[Cell]) -> None:
    """Bytes, hits, times."""
    rows: list[Row] = []
    for cell in cells:
        for arm in ("direct", "private", *SHARED):
            if not bench.select(cell.name, arm):
                continue
            peers = from_peers(bench, cell, arm) if arm != "direct" else None
            asked = expected_from_peers(cell, arm) if arm in SHARED else None
            times = [bench.median(cell.name, arm, key) for key in ("first_s", "later_s", "seconds")]
            ratio = bench.ratio(cell.name, arm, "direct")
            opens = bench.median(cell.name, arm, "opens")
            rows.append([cell.name, arm, _ratio(bench, cell, arm), opens, peers, asked, *times, ratio])
    columns = ["cell", "arm", "source", "opens", "peers", "formula", "first s", "later s", "whole s", "x direct"]
    note = "source and peers in datasets; times of virtual nodes on one machine are not a cluster's"
    bench.sheet("what leaves the source, and what passes between nodes", columns, rows, note)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    made = parser(__doc__)
    given = made.parse_args(argv)
    options = options_of(given)
    bench = Bench("nodes", options, {"bandwidth": BANDWIDTH, "latency_s": LATENCY_S, "file_bytes": FILE_BYTES})
    counts, lengths = (QUICK_NODES, QUICK_EPOCHS) if options.quick else (NODES, EPOCHS)
    cells = [Cell(nodes, epochs) for nodes in counts for epochs in lengths if options.wants(Cell(nodes, epochs).name)]
    with place(options) as where:
        runs = Runs(where, options)
        for cell in cells:
            bench.measure(cell.name, runs.arms(cell), options.rounds(1))
    tables(bench, cells)
    return bench.finish(figures(bench, cells))


if __name__ == "__main__":
    sys.exit(main())
