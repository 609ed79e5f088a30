"""Many nodes on paper: a simulation of 8 to 4096 nodes that share one source, and what planning for them costs.

The simulation (`benchmarks.simulated`) uses the placement that real nodes compute, and is checked against the closed
forms of the cost model: epochs, hit rates and bytes from the source. Planning is measured in processes of its own, over
files and over nodes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from benchmarks import equations, planning
from benchmarks.equations import Sharing, alike
from benchmarks.harness import Arm, Bench, Figure, at_most, divide, holds, options_of, parser, worst
from benchmarks.simulated import DIRECT, Machine, Simulation, Work
from hpcstage.plan.placement.placements import Placing

# 150 GB of images, a node that trains them in 8 minutes, a source that 16 such nodes saturate, fast links between them.
FAST = Machine(source_bytes_per_s=5e9, link_bytes_per_s=10e9)
# The same with links that carry less than a node trains: others are asked in vain faster than they can send.
SLOW_LINKS = replace(FAST, link_bytes_per_s=0.2e9)
DATASET_BYTES = 150 * 10**9
COMPUTE_S = 480.0
EPOCHS = 3
FILES = 1 << 16
QUICK_FILES = 1 << 14
MOST_COPIES = 1 << 22
LEAST_FILES_PER_NODE = 16
NODES = tuple(1 << exponent for exponent in range(3, 13))
QUICK_NODES = (8, 32, 128)
MOST_ERROR = 0.1
MOST_ERROR_LINKS = 0.15
"""Where links decide: the bound for the busiest one is not its mean."""
LEAST_FOR_LINKS = 128
"""Files per node and epoch; with fewer the bound for the busiest link does not hold."""
MOST_SOURCE = 1.001


# ---- the simulation


def works(quick: bool) -> dict[str, tuple[Work, Machine]]:
    """What is simulated, by the name of the cell."""
    found: dict[str, tuple[Work, Machine]] = {}
    for nodes in QUICK_NODES if quick else NODES:
        for kind in (DIRECT, *(kind.value for kind in Placing)):
            files = QUICK_FILES if quick else FILES
            if kind == Placing.REPLICATE.value:
                files = min(files, MOST_COPIES // nodes)
            if files < LEAST_FILES_PER_NODE * nodes:
                continue
            work = Work(nodes, kind, files, DATASET_BYTES // files, EPOCHS, COMPUTE_S)
            found[f"{kind}, {nodes} nodes"] = (work, FAST)
            if kind == Placing.PARTITION.value:
                found[f"{kind}, {nodes} nodes, slow links"] = (work, SLOW_LINKS)
    return found


def simulate(work: Work, machine: Machine) -> dict[str, Any]:
    """One run, as a sample."""
    return {"nodes": work.nodes, **asdict(Simulation(work, machine).run())}


def sharing(work: Work) -> Sharing:
    """What the model says that nodes hold."""
    return alike(Placing(work.kind), work.nodes, 1.0)


def expected_epochs(work: Work, machine: Machine) -> tuple[float, float]:
    """The first epoch and the mean of the later ones: the largest of computing (1), source (2) and links (7)."""
    compute_s = equations.training_s(work.dataset_bytes, work.nodes, work.dataset_bytes / work.compute_s)
    source_s = equations.source_s(work.dataset_bytes, machine.source_bytes_per_s)
    links_s = work.dataset_bytes / (work.nodes * machine.link_bytes_per_s) * busiest(work)
    if work.kind == DIRECT:
        return max(compute_s, source_s), max(compute_s, source_s)
    shared = sharing(work)
    first = shared.hits(1)
    first_s = max(compute_s, source_s, links_s * first.peers)
    later = [shared.hits(epoch) for epoch in range(2, work.epochs + 1)]
    later_s = [max(compute_s, source_s * hits.source, links_s * hits.peers) for hits in later]
    return first_s, sum(later_s) / max(1, len(later_s))


def busiest(work: Work) -> float:
    """What the busiest of p nodes is asked for, over the mean m: balls in bins, 1 + sqrt(2 ln(p) / m)."""
    return 1 + math.sqrt(2 * math.log(work.nodes) * work.nodes / work.files)


def expected_source(work: Work) -> float:
    """Bytes from the source, in datasets."""
    if work.kind == DIRECT:
        return work.epochs
    shared = sharing(work)
    read = sum(shared.hits(epoch).source for epoch in range(1, work.epochs + 1))
    return read + (0.0 if shared.kind is Placing.PRIVATE else shared.placed)


def later_s(sample: Mapping[str, Any]) -> float:
    """The mean of the epochs after the first."""
    return float(sum(sample["epoch_s"][1:]) / (len(sample["epoch_s"]) - 1))


def off_by(found: float | None, said: float | None) -> float | None:
    """A relative error."""
    ratio = divide(found, said)
    return None if ratio is None else abs(ratio - 1)


def model_figures(bench: Bench, chosen: Mapping[str, tuple[Work, Machine]]) -> list[Figure]:
    """Simulation against closed forms, cell by cell."""
    made: list[Figure] = []
    for name, (work, machine) in chosen.items():
        sample = _sample(bench, name)
        if sample is None:
            made.append(holds(f"{name}: simulated", None))
            continue
        first, later = expected_epochs(work, machine)
        made.append(at_most(f"{name}: first epoch off by", off_by(sample["epoch_s"][0], first), _most(machine)))
        if machine != SLOW_LINKS or work.files >= LEAST_FOR_LINKS * work.nodes:
            made.append(at_most(f"{name}: later epochs off by", off_by(later_s(sample), later), _most(machine)))
        source = sample["source_bytes"] / work.dataset_bytes
        if work.kind in (Placing.REPLICATE.value, Placing.PARTITION.value):
            made.append(at_most(f"{name}: source bytes / dataset", source, MOST_SOURCE))
        else:
            made.append(at_most(f"{name}: source bytes off by", off_by(source, expected_source(work)), MOST_ERROR))
        if work.kind != DIRECT:
            made.append(at_most(f"{name}: hit rates of the last epoch off by", _missed_hits(work, sample), 0.02))
    return made


def _most(machine: Machine) -> float:
    return MOST_ERROR_LINKS if machine == SLOW_LINKS else MOST_ERROR


def _missed_hits(work: Work, sample: Mapping[str, Any]) -> float:
    """The largest difference to the model; a replica that is still being filled counts as one that is full."""
    said = sharing(work).hits(work.epochs)
    here, there = sample["local"][-1], sample["peers"][-1]
    if work.kind == Placing.REPLICATE.value:
        here, there = here + there, 0.0
    return float(max(abs(here - said.local), abs(there - said.peers), abs(sample["source"][-1] - said.source)))


def message_figures(bench: Bench, chosen: Mapping[str, tuple[Work, Machine]]) -> list[Figure]:
    """Messages per file stay, and no node has more than its part of them."""
    sent = {
        name: (work, sample) for name, (work, _) in chosen.items()
        if work.kind == Placing.PARTITION.value and (sample := _sample(bench, name)) is not None
    }  # fmt: skip
    per_file = [s["messages"] / (work.files * work.epochs) for work, s in sent.values()]
    parts = [s["most_messages"] * work.nodes / (2 * s["messages"]) for work, s in sent.values() if s["messages"]]
    copies = [
        s["most_messages"] / (4 * work.files) for name, (work, _) in chosen.items()
        if work.kind == Placing.REPLICATE.value and (s := _sample(bench, name)) is not None
    ]  # fmt: skip
    return [
        at_most("partition: messages per file that is read, any number of nodes", worst(per_file, max), 2.0),
        at_most("partition: messages of the busiest node / mean", worst(parts, max), 2.5),
        at_most("replicate: messages of the busiest node per file and copy", worst(copies, max), 1.1),
    ]


def _sample(bench: Bench, cell: str) -> dict[str, Any] | None:
    found = bench.select(cell, "simulated")
    return found[0] if found else None


# ---- the start


def main() -> int:
    """Runs it."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("scale", options)
    chosen = {name: cell for name, cell in works(options.quick).items() if options.wants(name)}
    for name, (work, machine) in chosen.items():
        bench.measure(name, {"simulated": _simulating(work, machine)}, 1)
    planning.measure(bench)
    figures = [*model_figures(bench, chosen), *message_figures(bench, chosen)]
    if not options.only or any("plan" in text for text in options.only):
        planning.table(bench)
        figures += planning.figures(bench)
    return bench.finish(figures)


def _simulating(work: Work, machine: Machine) -> Arm:
    return lambda: simulate(work, machine)


if __name__ == "__main__":
    sys.exit(main())
