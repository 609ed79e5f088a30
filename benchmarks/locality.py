"""Locality-aware loading (paper 004): what is moved, how long an epoch takes by nodes, and that training is the same.

Figure 6 comes from the sampler's own code. Figures 8 to 11: virtual nodes of this machine load from one
emulated source, `regular` with PyTorch's DistributedSampler from the source as in the paper, `cached` with the same
behind hpcstage (every node keeps its part and asks for the rest), `locality` with LocalityAwareSampler behind it.
Preprocessing is a pause per sample, so that the source and not this machine's processors is the limit; between nodes is
an emulated network (root; elsewhere this machine's memory). Up to 1,024 learners it is a simulation beside the cost
model. Theorem 1: gradients and accuracy of real trainings with torch.distributed.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import equations, learners
from benchmarks.files import Place, empty, make_files, place, total_bytes
from benchmarks.harness import Arm, Bench, Figure, Options, at_least, at_most, divide, options_of, parser, worst
from benchmarks.link import network, unavailable
from benchmarks.nodes import served
from benchmarks.programs import hpcstage_command, ranks_command, run
from benchmarks.storage import Storage
from hpcstage.emulator import Settings
from hpcstage.torch.samplers import balance

PROGRAM = Path(__file__).resolve().parent / "workload" / "locality.py"
PAPER_MEDIANS = {32: 6.9, 64: 4.8, 128: 3.4}
MEDIANS_WITHIN = 0.3
NODES_OF_FIGURE_6, QUICK_NODES_OF_FIGURE_6 = (16, 32, 64, 128, 256), (16,)
IMAGENET_SAMPLES = 1_281_167
FILES, QUICK_FILES = 640, 128
FILE_BYTES = 100_000
BANDWIDTH = 16e6
LINK = 16e6
"""Bytes per second and node: each can send as fast as the source gives to all."""
LATENCY_S = 0.001
PREPROCESS_S = 0.004
BATCH = 8
EPOCHS, QUICK_EPOCHS = 4, 2
NODES, QUICK_NODES = (2, 4, 8), (2,)
SAMPLERS = {"regular": "regular", "cached": "regular", "locality": "locality"}
LEARNERS_ON, QUICK_LEARNERS_ON = (4, 16, 64, 256), (4,)
TRAINED, QUICK_TRAINED = (4000, 12), (400, 2)
HELD_OUT, QUICK_HELD_OUT = 2000, 200
RANKS, QUICK_RANKS = 4, 2
TOLERANCE = 1e-12
THEOREM_1 = "theorem 1"


def cell_6(batch: int, nodes: int) -> str:
    """Figure 6: its name in results."""
    return f"moved, local batch {batch}, by {nodes} nodes"


def imbalance(batch: int, nodes: int, steps: int, seed: int) -> dict[str, Any]:
    """In percent of a global batch: the quartiles of what is moved over some steps, `batch` samples on each node, which
    have the dataset dealt evenly."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    owner = (torch.randperm(IMAGENET_SAMPLES, generator=generator) % nodes).tolist()
    whole = batch * nodes
    moved: list[float] = []
    while len(moved) < steps:
        order = torch.randperm(IMAGENET_SAMPLES, generator=generator).tolist()
        for begin in range(0, min(len(order) // whole, steps - len(moved)) * whole, whole):
            parts = balance.divide(order[begin : begin + whole], owner, [1] * nodes)
            away = sum(owner[sample] != node for node, rows in enumerate(parts) for row in rows for sample in row)
            moved.append(100 * away / whole)
    low, median, high = statistics.quantiles(moved, n=4)
    formula = 100 * equations.imbalance(batch, nodes)
    return {"low": low, "median": median, "high": high, "formula": formula, "steps": len(moved)}


class Loading:
    """Virtual nodes that load from emulated storage."""

    def __init__(self, where: Place, options: Options) -> None:
        self.where, self.options = where, options
        self.data = where.memory / "data"
        make_files(self.data, QUICK_FILES if options.quick else FILES, FILE_BYTES, spread=0.0)
        self.size_bytes = total_bytes(self.data)

    def arms(self, nodes: int) -> dict[str, Arm]:
        """See the module."""
        return {arm: functools.partial(self._load, nodes, arm) for arm in SAMPLERS}

    def _load(self, nodes: int, arm: str) -> dict[str, Any]:
        local, run_dir = self.where.local.renew(), empty(self.where.disk / "run")
        empty(self.where.disk / "state")  # no trace of the sample before
        out = self.where.disk / "loaded.pt"
        epochs = QUICK_EPOCHS if self.options.quick else EPOCHS
        settings = Settings(BANDWIDTH, metadata_latency_s=LATENCY_S, data_latency_s=LATENCY_S)
        with contextlib.ExitStack() as stack:
            storage = stack.enter_context(Storage(self.data, settings, self.where.memory))
            linked = [] if unavailable() else stack.enter_context(network(f"{LINK * 8 * nodes / 1e6:.0f}mbit"))
            words = ["--epochs", epochs, "--batch", BATCH, "--preprocess-s", PREPROCESS_S]
            command = training_command(nodes, storage.path, SAMPLERS[arm], out, words)
            if arm != "regular":
                options = ("--nodes", str(nodes), "--placement", "partition")
                command = [*hpcstage_command("runtime", run_dir, local, str(storage.path), options), *command]
            seconds = run([*linked, *command], self.where.disk).seconds
            read = storage.counters().read_bytes
        times = loaded(out)["epochs_s"]
        later_s = sum(times[1:]) / len(times[1:])
        found = {"seconds": seconds, "epochs_s": times, "first_s": times[0], "later_s": later_s}
        found["source"] = read / self.size_bytes
        if arm != "regular":
            found |= {key: served(run_dir)[key] for key in ("peer_files", "local_opens", "source_opens", "problems")}
            found["from_peers"] = found["peer_files"] / (epochs * (QUICK_FILES if self.options.quick else FILES))
        return found


def training_command(ranks: int, data: Path, sampler: str, out: Path, more: Sequence[object]) -> list[str]:
    """The program of all ranks."""
    return ranks_command(ranks, PROGRAM, ["--data", data, "--sampler", sampler, "--out", out, *more])


def loaded(path: Path) -> dict[str, Any]:
    """What rank 0 wrote."""
    import torch

    found: dict[str, Any] = torch.load(path)
    return found


def training(where: Place, options: Options) -> dict[str, Any]:
    """Two trainings of the same samples on two nodes: gradients against the regular ones, accuracies."""
    from benchmarks.workload.locality import write_samples

    count, epochs = QUICK_TRAINED if options.quick else TRAINED
    data = where.memory / "train"
    if not data.exists():
        write_samples(data, count, seed=0)
    found: dict[str, Any] = {}
    gradients = {}
    for sampler in ("regular", "locality"):
        run_dir, out = empty(where.disk / "run"), where.disk / f"{sampler}.pt"
        empty(where.disk / "state")
        nodes = ("--nodes", "2", "--placement", "partition")
        head = hpcstage_command("runtime", run_dir, where.local.renew(), str(data), nodes)
        words = ["--train", "--epochs", epochs, "--held-out", QUICK_HELD_OUT if options.quick else HELD_OUT]
        ranks = QUICK_RANKS if options.quick else RANKS
        run([*head, *training_command(ranks, data, sampler, out, words)], where.disk)
        trained = loaded(out)
        gradients[sampler], found[f"{sampler}_accuracy"] = trained["gradients"], trained["accuracy"]
        found[f"{sampler}_peer_files"] = served(run_dir)["peer_files"]
    ours, theirs = gradients["locality"], gradients["regular"]
    off = (ours - theirs).abs().amax(1) / theirs.abs().amax(1)
    return {**found, "locality_off": off.max().item(), "steps": len(off)}


# ---- what was asked for


def moved_figures(bench: Bench, nodes: Sequence[int]) -> list[Figure]:
    """Figure 6."""
    found = []
    for batch, asked in PAPER_MEDIANS.items():
        for count in nodes:
            median = bench.median(cell_6(batch, count), "sampler", "median")
            off = None if median is None else abs(median - asked)
            name = f"local batch {batch}, {count} nodes: moved, median, off the paper's {asked:g} %"
            found.append(at_most(name, off, MEDIANS_WITHIN, "points"))
    return found


def loading_figures(bench: Bench, nodes: Sequence[int]) -> list[Figure]:
    """The shape of figures 8 to 11."""
    found = []
    for count in nodes:
        cell = f"{count} nodes, loading"
        faster = bench.ratio(cell, "regular", "locality", "later_s")
        found.append(at_least(f"{cell}: regular over locality, epochs after the first", faster, 2.0))
        gained = bench.ratio(cell, "cached", "locality", "later_s")
        found.append(at_least(f"{cell}: regular behind hpcstage over locality, epochs after the first", gained, 1.0))
        most = equations.imbalance(BATCH, count) + 0.05
        moved = bench.median(cell, "locality", "from_peers")
        found.append(at_most(f"{cell}: locality, files from other nodes, of all read", moved, most))
    if len(nodes) > 1:
        first, last = f"{nodes[0]} nodes, loading", f"{nodes[-1]} nodes, loading"
        flat = divide(bench.median(last, "regular", "later_s"), bench.median(first, "regular", "later_s"))
        falls = divide(bench.median(last, "locality", "later_s"), bench.median(first, "locality", "later_s"))
        found.append(at_least(f"regular, {last} over {first}: flat", flat, 0.75))
        found.append(at_most(f"locality, {last} over {first}: falls", falls, 1.5 * nodes[0] / nodes[-1]))
    return found


def simulated_figures(bench: Bench, settings: Sequence[learners.Setting]) -> list[Figure]:
    """Up to 1,024 learners."""
    errors: list[float | None] = []
    for setting in settings:
        values = [bench.median(setting.name, "simulated", key) for key in ("speedup", "model_speedup")]
        ratio = divide(*values)
        if setting.nodes > 2 * setting.knee:  # before, reading and preprocessing are about as long and delay each other
            errors.append(None if ratio is None else abs(ratio - 1))
    found = []
    if errors:
        found.append(at_most("simulated speed-ups past the knee, at worst off the model's", worst(errors, max), 0.15))
    last = [s for s in settings if s.nodes == LEARNERS_ON[-1] and s.link_bytes_per_s == learners.LINK_BYTES_PER_S]
    for setting in last:
        speedup = bench.median(setting.name, "simulated", "speedup")
        found.append(at_least(f"{setting.name}: times faster (paper: 34)", speedup, learners.PAPER_SPEEDUP))
    return found


def training_figures(bench: Bench) -> list[Figure]:
    """Theorem 1."""
    keys = ("regular_accuracy", "locality_accuracy", "locality_off")
    regular, ours, off = (bench.median(THEOREM_1, "training", key) for key in keys)
    apart = None if ours is None or regular is None else abs(ours - regular)
    found = [
        at_most("locality: gradients off the regular sampler's, relative", off, TOLERANCE),
        at_most("locality: accuracy off the regular sampler's", apart, 1.0, "points"),
    ]
    if not bench.options.quick:
        found.append(at_least("what is trained learns: accuracy (guessing: 10)", regular, 50.0, "%"))
    return found


def even_out(bench: Bench) -> list[Figure]:
    """What needs no time: figure 6."""
    options = bench.options
    counts = QUICK_NODES_OF_FIGURE_6 if options.quick else NODES_OF_FIGURE_6
    on = [count for count in counts if options.wants(cell_6(0, count))]
    often = 60 if options.quick else 300
    for batch in PAPER_MEDIANS:
        for count in on:
            work: Arm = functools.partial(imbalance, batch, count, often, seed=count)
            bench.measure(cell_6(batch, count), {"sampler": work}, 1)
    return moved_figures(bench, on)


def simulate(bench: Bench) -> list[Figure]:
    """Learners on paper."""
    counts = QUICK_LEARNERS_ON if bench.options.quick else LEARNERS_ON
    samples = 1 << (12 if bench.options.quick else 18)
    made = [learners.Setting(count, knee, samples) for knee in learners.KNEES for count in counts]
    made.append(learners.Setting(counts[-1], learners.KNEES[-1], samples, learners.SLOW_LINK_BYTES_PER_S))
    chosen = [setting for setting in made if bench.options.wants(setting.name)]
    for setting in chosen:
        bench.measure(setting.name, {"simulated": functools.partial(learners.simulate, setting)}, 1)
    return simulated_figures(bench, chosen) if chosen else []


def on_nodes(bench: Bench) -> list[Figure]:
    """What runs on virtual nodes."""
    options = bench.options
    counts = [count for count in (QUICK_NODES if options.quick else NODES) if options.wants(f"{count} nodes, loading")]
    found: list[Figure] = []
    with place(options) as where:
        if options.wants(THEOREM_1):
            bench.measure(THEOREM_1, {"training": lambda: training(where, options)}, 1)
            found += training_figures(bench)
        if counts:
            loading = Loading(where, options)
            for count in counts:
                bench.measure(f"{count} nodes, loading", loading.arms(count), options.rounds(3))
            found += loading_figures(bench, counts)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = options_of(parser(__doc__).parse_args(argv))
    rates = {"bandwidth": BANDWIDTH, "link": None if unavailable() else LINK}
    numbers = {**rates, "preprocess_s": PREPROCESS_S, "batch": BATCH, "file_bytes": FILE_BYTES}
    bench = Bench("locality", options, numbers)
    return bench.finish([*even_out(bench), *simulate(bench), *on_nodes(bench)])


if __name__ == "__main__":
    sys.exit(main())
