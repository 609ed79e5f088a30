"""Checkpoints as paper 001 measures them: full against incremental, and the encoding over more and more nodes.

Tables 3 and 4, figures 7 and 8: bytes and seconds of a generation, split into diff, write and encode, of programs whose
states change little or much; every program is a real PyTorch training, all arms save the same states, and the last must
come back bit for bit. Figure 6: the work of a node with 8, 16 and 32 data nodes and 2 coding nodes, counted in bytes
and messages and measured in processor time, for the pipeline, a broadcast and a fan-in; and the time of an encoding by
a simulation whose terms are measured here, since two processors do not work like 34 nodes. Beside them: blocks of 4 to
256 KB, what makes torch.save shift its tensors, and the speed of each part on one file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.checkpointed.exchanged import SIZES as EXCHANGED
from benchmarks.checkpointed.exchanged import exchanged
from benchmarks.checkpointed.saving import FULL, SHIFTS, States, Trained
from benchmarks.checkpointed.simulation import DATA_NODES, PLACED, Encoded, Layout, Speeds, Terms, counted, simulated
from benchmarks.files import Place, place
from benchmarks.harness import Arm, Bench, Figure, Options, Row, at_least, at_most, holds, less_by, options_of, parser
from benchmarks.link import unavailable
from benchmarks.peer import LINKED
from benchmarks.peernodes import MPIEXEC
from benchmarks.workload.trained import FORMS, PROGRAMS
from hpcstage.checkpoint.coding.routes import FORMS as WAYS
from hpcstage.checkpoint.generations.choice import GenerationPolicy
from hpcstage.checkpoint.generations.manifest import GenerationKind
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
NODE_BYTES, QUICK_NODE_BYTES = 128 << 20, 16 << 20
"""Of a data node in the simulation; the paper has 501 MB."""
STORED_BYTES, QUICK_STORED_BYTES = 8 << 20, 2 << 20
"""Of a node whose encoding is measured."""
EXCHANGED_BYTES = 64 << 20
"""Of each node in the encodings by real exchanges."""
ARMS = {"full": FULL, "incremental": GenerationPolicy()}
BLOCKS = (4 * KB, 16 * KB, 64 * KB, 256 * KB)
BLOCK_ARMS = {
    f"{name}, {size // KB} KB": GenerationPolicy(block_bytes=size, always=always)
    for size in BLOCKS
    for name, always in (("delta", GenerationKind.DELTA), ("chosen", None))
}
SPLIT = ("diff_s", "write_s", "encode_s")


def saves_percent(bench: Bench, cell: str, key: str) -> float | None:
    """By how much less an incremental generation takes than a full one."""
    return less_by(bench.median(cell, "incremental", key), bench.median(cell, "full", key))


def figures(bench: Bench, cells: Sequence[Trained]) -> list[Figure]:
    """What paper 001 reached, of programs whose share of changed blocks allows it, and its figure 6."""
    made = [figure for cell in cells for figure in saving_figures(bench, cell)]
    if bench.options.wants("speeds"):
        made.append(at_least("reading and hashing the state", bench.median("speeds", "one file", "diff"), 2.0, "GB/s"))
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


def counted_arm(placed: str, nodes: int, form: str = "pipeline") -> str:
    """Counted work, by its name in results."""
    return f"{form}, {nodes} data nodes, {placed}"


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


def tables(bench: Bench, cells: Sequence[Trained]) -> None:
    """Medians."""
    rows = [
        _row(bench, cell.name, arm, samples[-1])
        for cell in cells
        for arm in ARMS
        if (samples := bench.select(cell.name, arm))
    ]
    columns = ["program, form", "arm", "MB of the state", "blocks changed %", "MB written", "less %", "MB parities"]
    columns += ["s", *(key.replace("_s", " s") for key in SPLIT), "less % s", "restore s", "kinds"]
    note = "Of one node. encode: the work of all nodes in one process, by the number of nodes; no network."
    bench.sheet("A generation of each program's state, after the first", columns, rows, note)


def _row(bench: Bench, cell: str, arm: str, sample: dict[str, Any]) -> Row:
    def median(key: str) -> float:
        return bench.median(cell, arm, key) or 0.0

    less = [saves_percent(bench, cell, key) if arm != "full" else None for key in ("written_bytes", "seconds")]
    return [
        cell,
        arm,
        sample["state_bytes"] / MB,
        100 * median("changed_share"),
        median("written_bytes") / MB,
        less[0],
        median("parity_bytes") / MB,
        *(median(key) for key in ("seconds", *SPLIT)),
        less[1],
        median("restore_s"),
        sample["kinds"],
    ]


def more_tables(bench: Bench) -> None:
    """Sizes of blocks, what shifts, and speeds."""
    rows: list[Row] = []
    for name in BLOCK_ARMS:
        if bench.select("blocks", name):
            values = [
                bench.median("blocks", name, key) for key in ("changed_share", "written_bytes", "seconds", "diff_s")
            ]
            rows.append([name, 100 * (values[0] or 0), (values[1] or 0) / MB, *values[2:]])
    if rows:
        bench.sheet("embedding, SGD by size of blocks", ["arm", "blocks changed %", "MB written", "s", "diff s"], rows)
    moved: list[Row] = [
        [shift, sample["tensors"], sample["moved"], 100 * sample["changed_share"]]
        for shift in SHIFTS
        for sample in bench.select("shifts", shift)[-1:]
    ]
    if moved:
        title = "One state saved twice by torch.save, nothing trained: what moves"
        bench.sheet(title, ["what differs", "tensors", "moved", "blocks changed %"], moved)
    if bench.select("speeds", "one file"):
        keys = ("diff", "write", "restore")
        bench.sheet("One file, GB/s", list(keys), [[bench.median("speeds", "one file", key) for key in keys]])


def node_tables(bench: Bench) -> None:
    """Figure 6: work and time by the number of data nodes."""
    keys = ("sent", "received", "multiplied", "added", "messages", "steps")
    rows: list[Row] = []
    for form in WAYS:
        for placed in PLACED:
            for nodes in DATA_NODES:
                arm = counted_arm(placed, nodes, form)
                if bench.select(WORK, arm):
                    rows.append([f"{form}, {placed}", nodes, *(bench.median(WORK, arm, key) for key in keys)])
    if rows:
        title = "The most that one node does, in bytes for each byte of a data node, messages for each of its blocks"
        bench.sheet(title, ["form", "data nodes", *keys], rows, "steps: messages that follow one another in a stripe.")
    measured: list[Row] = [
        [nodes, bench.median(WORK, measured_arm(nodes), "s_per_gb")]
        for nodes in DATA_NODES
        if bench.select(WORK, measured_arm(nodes))
    ]
    if measured:
        title = "Processor time of one node for each GB that it holds, all nodes in one process"
        bench.sheet(title, ["data nodes", "s/GB"], measured)
    times: list[Row] = [
        [
            lane,
            f"{form}, {placed}",
            *(bench.median(cell, simulated_arm(placed, n, form), "s_per_gb") for n in DATA_NODES),
        ]
        for lane in lanes()
        if bench.select(cell := f"simulated, {lane}", simulated_arm(next(iter(PLACED)), DATA_NODES[0]))
        for form in WAYS
        for placed in PLACED
    ]
    if times:
        title = "Simulated seconds of an encoding for each GB of a data node"
        columns = ["lane", "form", *(f"{nodes} data nodes" for nodes in DATA_NODES)]
        bench.sheet(title, columns, times, _terms_line(bench))


def _terms_line(bench: Bench) -> str:
    node = ", ".join(f"{key} {(bench.median(TERMS, 'node', key) or 0) / GB:.3g}" for key in _NODE_TERMS)
    found = [terms_of(bench, lane) for lane in lanes()]
    lane = "; ".join(
        f"{name} {terms.lane_bytes_per_s / GB:.3g}, {1e6 * terms.lane_latency_s:.3g} us"
        for name, terms in zip(lanes(), found, strict=True)
    )
    return f"Simulated, not measured. Its terms are, in GB/s: {node}; lanes: {lane}."


_NODE_TERMS = ("coder", "hash", "read", "write")


def terms_of(bench: Bench, lane: str) -> Terms:
    """What was measured."""
    coder, hashing, read, write = (bench.median(TERMS, "node", key) or 0.0 for key in _NODE_TERMS)
    rate, latency = (bench.median(TERMS, lane, key) or 0.0 for key in ("rate", "latency"))
    return Terms(coder, hashing, read, write, rate, latency)


def measure_states(
    bench: Bench,
    states: States,
    trained: Trained,
    cell: str,
    policies: Mapping[str, GenerationPolicy],
    rounds: int,
    group: CodeSize | None = None,
) -> None:
    """Saves the states of one program by each policy; where the file has all samples, nothing is trained."""
    if all(len(bench.select(cell, arm)) >= rounds for arm in policies):
        return
    saved = states.trained(trained)
    arms: dict[str, Arm] = {name: partial(states.saved, saved, policy, group) for name, policy in policies.items()}
    bench.measure(cell, arms, rounds)


def measure_saving(bench: Bench, where: Place, options: Options, cells: Sequence[Trained]) -> None:
    """Full against incremental."""
    states = States(where, options)
    for cell in cells:
        measure_states(bench, states, cell, cell.name, ARMS, options.rounds(3), states.group)
    if options.wants("blocks"):
        measure_states(bench, states, Trained("embedding, SGD", "tensors"), "blocks", BLOCK_ARMS, options.rounds(3))
    if options.wants("shifts"):
        bench.measure("shifts", {shift: partial(states.shifted, shift) for shift in SHIFTS}, 1)
    if options.wants("speeds"):
        bench.measure("speeds", {"one file": states.speeds}, options.rounds(5))


def measure_nodes(bench: Bench, where: Place, options: Options) -> None:
    """Figure 6."""
    if options.wants(WORK):
        node_bytes = QUICK_NODE_BYTES if options.quick else NODE_BYTES
        for form, placed, nodes in _layouts():
            layout = Layout(nodes, PLACED[placed], node_bytes)
            bench.measure(WORK, {counted_arm(placed, nodes, form): partial(counted, layout, form)}, 1)
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
        for form, placed, nodes in _layouts():
            layout = Layout(nodes, PLACED[placed], QUICK_NODE_BYTES if options.quick else NODE_BYTES)
            arm = {simulated_arm(placed, nodes, form): partial(simulated, layout, form, terms)}
            bench.measure(f"simulated, {lane}", arm, 1)


def measure_exchanged(bench: Bench, where: Place, options: Options) -> None:
    """The three forms by real exchanges."""
    rounds = options.rounds(9)
    for size in EXCHANGED:
        cell = exchanged_cell(size)
        if options.wants(cell) and MPIEXEC.exists() and any(len(bench.select(cell, form)) < rounds for form in WAYS):
            node_bytes = QUICK_STORED_BYTES if options.quick else EXCHANGED_BYTES
            with exchanged(where.disk / "exchanged", size, node_bytes) as group:
                bench.measure(cell, {form: partial(group.sample, form) for form in WAYS}, rounds)


def exchanged_cell(size: CodeSize) -> str:
    """The name of a cell."""
    return f"exchanged, {size.nodes} nodes, {size}"


def exchanged_table(bench: Bench) -> None:
    """Seconds, and bytes from node to node."""
    rows: list[Row] = []
    for size in EXCHANGED:
        cell = exchanged_cell(size)
        if all(bench.select(cell, form) for form in WAYS):
            sent = [bench.median(cell, form, "sent_bytes") or 0.0 for form in WAYS]
            rows.append([f"{size.nodes} nodes, {size}", *(bench.median(cell, form) for form in WAYS), sent[0] / MB])
    if rows:
        title = f"Seconds of an encoding by exchanges over MPI, virtual nodes with {EXCHANGED_BYTES >> 20} MiB each"
        note = "All nodes share two processors; messages pass in memory."
        bench.sheet(title, ["group", *WAYS, "MB sent"], rows, note)


def _layouts() -> list[tuple[str, str, int]]:
    return [(form, placed, nodes) for form in WAYS for placed in PLACED for nodes in DATA_NODES]


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
    tables(bench, cells)
    more_tables(bench)
    node_tables(bench)
    exchanged_table(bench)
    return bench.finish(figures(bench, cells))


if __name__ == "__main__":
    sys.exit(main())
