"""Simulated against measured: the samples of a result of `benchmarks.nodes`, each simulated with its own numbers.

What the virtual nodes of one machine share besides the source (processors, memory) is not simulated: how long an epoch
takes where everything is local is taken from the measurement (later epochs with replicate), and times are compared
where the source decides (reading directly) and where other nodes do (several epochs with partition). Bytes from
the source and files from other nodes must agree. What private nodes copy beyond
what their own ranks read is not simulated.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, Figure, Row, at_most, divide, holds
from benchmarks.simulated import DIRECT, Machine, Work
from hpcstage.plan.placement.placements import Placing

LINK_BYTES_PER_S = 1e9
"""Between virtual nodes: memory."""
OPERATIONS_OF_A_FILE = 3
"""Look-up, open and read, each with the emulated latency."""
BATCH = 8
MOST_SOURCE_ERROR = 0.01
MOST_PEERS_ERROR = 0.05
MOST_TIME_ERROR = 0.25
SHARED = (Placing.REPLICATE.value, Placing.PARTITION.value)


@dataclass(frozen=True)
class Cell:
    """One measured sample, and what is simulated for it."""

    name: str
    work: Work
    machine: Machine
    sample: Mapping[str, Any]


def read(path: Path) -> list[Cell]:
    """What can be simulated of a result."""
    result = json.loads(path.read_text(encoding="utf-8"))
    samples, parameters = result["samples"], result["parameters"]
    machine = Machine(
        parameters["bandwidth"], LINK_BYTES_PER_S, OPERATIONS_OF_A_FILE * parameters["latency_s"], link_file_s=0.0005
    )
    found = []
    for sample in samples:
        shape = re.fullmatch(r"N(\d+) E(\d+)", sample["cell"])
        if shape is None or not sample.get("read_ratio"):
            continue
        nodes, epochs = int(shape[1]), int(shape[2])
        files = round(sample["read_bytes"] / sample["read_ratio"] / parameters["file_bytes"])
        work = Work(
            nodes, sample["arm"], files, parameters["file_bytes"], epochs, _compute_s(samples, nodes) * nodes,
            batch=BATCH, ahead=BATCH, readers=1, lockstep=True, startup_s=_startup_s(sample),
        )  # fmt: skip
        name = f"measured {sample['cell']} {sample['arm']} {sample['round'] + 1}"
        found.append(Cell(name, work, machine, sample))
    return found


def figures(bench: Bench, cells: Sequence[Cell]) -> list[Figure]:
    """Bytes from the source, files from others, and direct's times."""
    made = [holds("the measured result has samples that can be compared", bool(cells))]
    rows: list[Row] = []
    for cell in cells:
        simulated = bench.select(cell.name, "simulated")
        if not simulated:
            made.append(holds(f"{cell.name}: simulated", None))
            continue
        made += _compared(cell, simulated[0])
        rows.append(_row(cell, simulated[0]))
    columns = ["", "source / dataset", "measured", "peers / dataset", "measured", "epoch 1 [s]", "measured",
               "all epochs [s]", "measured"]  # fmt: skip
    bench.sheet("Simulated against measured", columns, rows)
    return made


def _compared(cell: Cell, simulated: Mapping[str, Any]) -> list[Figure]:
    kind, made = cell.work.kind, []
    if kind in (DIRECT, *SHARED):
        source = _off(simulated["source_bytes"], cell.sample["read_bytes"])
        made.append(at_most(f"{cell.name}: source bytes off by", source, MOST_SOURCE_ERROR))
    if kind in SHARED:
        simulated_files, files = simulated["peer_bytes"] / cell.work.file_bytes, cell.sample["peer_files"]
        if kind == Placing.PARTITION.value:
            # Copies that pass through stay while there is room, so that nodes may ask for less than the model says.
            more = divide(files, simulated_files)
            made.append(at_most(f"{cell.name}: files from other nodes / simulated", more, 1 + MOST_PEERS_ERROR))
        else:
            off = _off(simulated_files, files)
            made.append(at_most(f"{cell.name}: files from other nodes off by", off, MOST_PEERS_ERROR))
    if kind == DIRECT or (kind == Placing.PARTITION.value and cell.work.epochs > 1):
        times = _off(sum(simulated["epoch_s"]), sum(cell.sample["epochs_s"]))
        made.append(at_most(f"{cell.name}: epochs off by", times, MOST_TIME_ERROR))
    return made


def _row(cell: Cell, simulated: Mapping[str, Any]) -> Row:
    size, sample = cell.work.dataset_bytes, cell.sample
    peers = sample.get("peer_files")
    return [
        cell.name, simulated["source_bytes"] / size, sample["read_ratio"], simulated["peer_bytes"] / size,
        None if peers is None else peers / cell.work.files, simulated["epoch_s"][0], sample["epochs_s"][0],
        sum(simulated["epoch_s"]), sum(sample["epochs_s"]),
    ]  # fmt: skip


def _off(found: float, was: float) -> float | None:
    ratio = 1.0 if found == was else divide(found, was)
    return None if ratio is None else abs(ratio - 1)


def _startup_s(sample: Mapping[str, Any]) -> float:
    """Staging has begun, the program imports: what the run took besides its epochs."""
    return max(0.0, float(sample.get("seconds", 0.0)) - float(sum(sample["epochs_s"])))


def _compute_s(samples: Sequence[Mapping[str, Any]], nodes: int) -> float:
    """An epoch on these nodes with everything at hand; 0 where none was measured."""
    kinds = (Placing.REPLICATE.value, Placing.PRIVATE.value) if nodes == 1 else (Placing.REPLICATE.value,)
    later = [
        second
        for sample in samples
        if re.fullmatch(rf"N{nodes} E\d+", sample["cell"]) and sample["arm"] in kinds
        for second in sample["epochs_s"][1:]
    ]
    return statistics.median(later) if later else 0.0
