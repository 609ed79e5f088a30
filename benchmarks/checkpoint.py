"""Checkpoints as paper 001 measures them: full against incremental, and the encoding over more and more nodes.

Tables 3 and 4, figures 7 and 8: bytes and seconds of a generation, split into diff, write and encode, of programs whose
states change little or much; every program is a real PyTorch training, all arms save the same states, and the last must
come back bit for bit. Figure 6: the work of a node with 8, 16 and 32 data nodes and 2 coding nodes, counted in bytes
and messages and measured in processor time; and the time of an encoding by
a simulation whose terms are measured here, since two processors do not work like 34 nodes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.checkpointed.exchanged import SIZES as EXCHANGED
from benchmarks.checkpointed.exchanged import exchanged
from benchmarks.checkpointed.saving import FULL, States, Trained
from benchmarks.checkpointed.simulation import DATA_NODES, PLACED, Encoded, Layout, Speeds, Terms, counted, simulated
from benchmarks.files import Place, place
from benchmarks.harness import Arm, Bench, Figure, Options, at_least, at_most, holds, less_by, options_of, parser
from benchmarks.link import unavailable
from benchmarks.peer import LINKED
from benchmarks.peernodes import MPIEXEC
from benchmarks.workload.trained import FORMS, PROGRAMS
from hpcstage.checkpoint.generations.terms import GenerationPolicy
from hpcstage.checkpoint.protection.groups import CodeSize

KB, MB, GB = 1 << 10, 1e6, 1e9
LITTLE = ("frozen body, Adam head", "adapters, AdamW")
LITTLE_SAVES_PERCENT = 83.8
MUCH_SAVES_PERCENT = 28.4
"""Both are paper 001's, of the whole time of a checkpoint."""
NOT_WORSE_PERCENT = {"written_bytes": 0.1, "seconds": 15.0}
"""Where the share of changed blocks allows no saving, an incremental generation is to be as good as a full one: the
manifest's reason is some bytes longer, and times of the same work differ."""
MOST_FLAT = 1.2
WORK, TERMS = "work of a node", "terms of the simulation"
EXCHANGED_ARM = "pipeline"
NODE_BYTES, QUICK_NODE_BYTES = 128 << 20, 4 << 20
"""Of a data node in the simulation; the paper has 501 MB."""
STORED_BYTES, QUICK_STORED_BYTES = 8 << 20, 2 << 20
"""Of a node whose encoding is measured."""
EXCHANGED_BYTES = 64 << 20
"""Of each node in the encodings by real exchanges."""
ARMS = {"full": FULL, "incremental": GenerationPolicy()}


def saves_percent(bench: Bench, cell: str, key: str) -> float | None:
    """By how much less an incremental generation takes than a full one."""
    return less_by(bench.median(cell, "incremental", key), bench.median(cell, "full", key))


def figures(bench: Bench, cells: Sequence[Trained]) -> list[Figure]:
    """What paper 001 reached, of programs whose share of changed blocks allows it, and its figure 6."""
    made = [figure for cell in cells for figure in saving_figures(bench, cell)]
    if bench.options.wants(WORK):
        for placed in PLACED:
            made.append(flat(bench, WORK, counted_arm, placed, "multiplied", "counted bytes of products"))
            made.append(flat(bench, WORK, counted_arm, placed, "sent", "counted bytes that are sent"))
        made.append(flat(bench, WORK, lambda _, nodes: measured_arm(nodes), "", "s_per_gb", "measured processor time"))
    if bench.options.wants("simulated"):
        for lane in lanes():
            for placed in PLACED:
                name = f"simulated time, {lane}"
                made.append(flat(bench, f"simulated, {lane}", simulated_arm, placed, "s_per_gb", name))
    same = [sample["same"] for sample in bench.samples if "same" in sample]
    return [*made, holds("every state came back bit for bit", all(same) if same else None)]


def saving_figures(bench: Bench, cell: Trained) -> list[Figure]:
    """How much less bytes and time an incremental generation takes."""
    share = bench.median(cell.name, "incremental", "changed_share")
    shown = "not measured" if share is None else f"{100 * share:.0f} % of the blocks change"
    made = []
    for key, what in (("written_bytes", "bytes"), ("seconds", "time")):
        least = -NOT_WORSE_PERCENT[key]
        if cell.program in LITTLE:
            least = LITTLE_SAVES_PERCENT
        elif share is not None and 100 * (1 - share) >= MUCH_SAVES_PERCENT:
            least = MUCH_SAVES_PERCENT
        name = f"{cell.name} ({shown}): {what} less than a full generation"
        made.append(at_least(name, saves_percent(bench, cell.name, key), least, "%"))
    return made


def counted_arm(placed: str, nodes: int) -> str:
    """Counted work, by its name in results."""
    return f"pipeline, {nodes} data nodes, {placed}"


simulated_arm = counted_arm


def measured_arm(nodes: int) -> str:
    """Measured work, by its name in results."""
    return f"encoded, {nodes} data nodes"


def flat(bench: Bench, cell: str, arm: Any, placed: str, key: str, what: str) -> Figure:  # noqa: ANN401
    """The most over the least of 8, 16 and 32 data nodes."""
    values = [bench.median(cell, arm(placed, nodes), key) for nodes in DATA_NODES]
    known = [value for value in values if value]
    ratio = max(known) / min(known) if len(known) == len(DATA_NODES) else None
    shown = f"pipeline, {placed}" if placed else "pipeline, parities rotated"
    return at_most(f"{shown}, 8 to 32 data nodes: most / least, {what}", ratio, MOST_FLAT, "times")


def lanes() -> tuple[str, ...]:
    """What messages between nodes may pass here; nothing without MPI."""
    if not MPIEXEC.exists():
        return ()
    return ("shared memory", "tcp", *(() if unavailable() else (LINKED,)))


_NODE_TERMS = ("coder", "hash", "read", "write")


def terms_of(bench: Bench, lane: str) -> Terms:
    """What was measured."""
    coder, hashing, read, write = (bench.median(TERMS, "node", key) or 0.0 for key in _NODE_TERMS)
    rate, latency = (bench.median(TERMS, lane, key) or 0.0 for key in ("rate", "latency"))
    return Terms(coder, hashing, read, write, rate, latency)


def measure_saving(bench: Bench, where: Place, options: Options, cells: Sequence[Trained]) -> None:
    """Full against incremental; where the file has all samples, nothing is trained."""
    states, rounds = States(where, options), options.rounds(3)
    for cell in cells:
        if any(len(bench.select(cell.name, arm)) < rounds for arm in ARMS):
            saved = states.trained(cell)
            arms: dict[str, Arm] = {name: partial(states.saved, saved, policy) for name, policy in ARMS.items()}
            bench.measure(cell.name, arms, rounds)


def measure_nodes(bench: Bench, where: Place, options: Options) -> None:
    """Figure 6."""
    if options.wants(WORK):
        node_bytes = QUICK_NODE_BYTES if options.quick else NODE_BYTES
        for placed, nodes in _layouts():
            layout = Layout(nodes, PLACED[placed], node_bytes)
            bench.measure(WORK, {counted_arm(placed, nodes): partial(counted, layout)}, 1)
        for nodes in DATA_NODES:
            measure_encoded(bench, where, options, nodes)
    if options.wants("simulated"):
        speeds = Speeds(where.disk, options.quick)
        arms: dict[str, Arm] = {"node": speeds.node, **{lane: partial(speeds.lane, lane) for lane in lanes()}}
        bench.measure(TERMS, arms, options.rounds(5), needed=True)
        measure_simulated(bench, options)


def measure_encoded(bench: Bench, where: Place, options: Options, nodes: int) -> None:
    """The processor time of all nodes' work."""
    rounds = options.rounds(5)
    if len(bench.select(WORK, measured_arm(nodes))) < rounds:
        layout = Layout(nodes, True, QUICK_STORED_BYTES if options.quick else STORED_BYTES)
        bench.measure(WORK, {measured_arm(nodes): Encoded(where.disk / "group", layout).sample}, rounds)


def measure_simulated(bench: Bench, options: Options) -> None:
    """The time of an encoding, by simulation: it has no noise, so each is done once."""
    for lane in lanes():
        terms = terms_of(bench, lane)
        for placed, nodes in _layouts():
            layout = Layout(nodes, PLACED[placed], QUICK_NODE_BYTES if options.quick else NODE_BYTES)
            arm = {simulated_arm(placed, nodes): partial(simulated, layout, terms)}
            bench.measure(f"simulated, {lane}", arm, 1)


def measure_exchanged(bench: Bench, where: Place, options: Options) -> None:
    """An encoding by real exchanges."""
    rounds = options.rounds(9)
    for size in EXCHANGED:
        cell = exchanged_cell(size)
        if options.wants(cell) and MPIEXEC.exists() and len(bench.select(cell, EXCHANGED_ARM)) < rounds:
            node_bytes = QUICK_STORED_BYTES if options.quick else EXCHANGED_BYTES
            with exchanged(where.disk / "exchanged", size, node_bytes) as group:
                bench.measure(cell, {EXCHANGED_ARM: group.sample}, rounds)


def exchanged_cell(size: CodeSize) -> str:
    """The name of a cell."""
    return f"exchanged, {size.nodes} nodes, {size}"


def _layouts() -> list[tuple[str, int]]:
    return [(placed, nodes) for placed in PLACED for nodes in DATA_NODES]


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("checkpoint", options, {"cpus": os.cpu_count(), "torch": torch.__version__})
    cells = [Trained(program, form) for program in PROGRAMS for form in FORMS]
    cells = [cell for cell in cells if options.wants(cell.name)]
    with place(options) as where:
        measure_saving(bench, where, options, cells)
        measure_nodes(bench, where, options)
        measure_exchanged(bench, where, options)
    return bench.finish(figures(bench, cells))


if __name__ == "__main__":
    sys.exit(main())
