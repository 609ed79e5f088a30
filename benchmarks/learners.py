"""Up to 1,024 learners as a simulation: loading with and without the sampler, at rates that paper 004 gives.

Owns the model of the paper's machine. Which learner reads which sample is the word of the sampler's own code, where
files are that of `hpcstage.plan.placement`, and what waits for what that of `benchmarks.simulated`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import equations
from benchmarks.simulated import DIRECT, Machine, Outcome, Simulation, Work
from hpcstage.plan.placement.placements import Placing, place
from hpcstage.plan.types import Budget
from hpcstage.torch.samplers.balance import divide

LEARNERS_PER_NODE = 4
DATASET_BYTES = 150e9
SAMPLES = 1_281_167
LEARNER_SAMPLES_PER_S = 800.0
"""Section VI-A: what a learner loads at most, its processors being the limit."""
TRAINED_SAMPLES_PER_S = 4 * 360.0
"""ResNet-50 on a node's four V100 in single precision: the paper does not say it."""
KNEES = (8, 16)
"""Figure 1: nodes up to which the source keeps pace with training; at 8 nobody waits, at 16 waiting is significant."""
LINK_BYTES_PER_S, SLOW_LINK_BYTES_PER_S = 10e9, 0.1e9
PAPER_SPEEDUP = 34.0
BATCH = 32
EPOCHS = 3


class LocalFirst(Simulation):
    """Each global batch is divided by what nodes hold."""

    def shuffled(self, epoch: int) -> list[int]:
        """See Moving: node n takes every p-th from the n-th on."""
        order = super().shuffled(epoch)
        nodes, whole = self.work.nodes, self.work.nodes * self.work.batch
        held, ranks = owners(self.work), [LEARNERS_PER_NODE] * nodes
        found: list[int] = []
        for begin in range(0, len(order), whole):
            parts = divide(order[begin : begin + whole], held, ranks)
            rows = [[sample for rank in node for sample in rank] for node in parts]
            found.extend(sample for column in zip(*rows, strict=True) for sample in column)
        return found


def owners(work: Work) -> list[int]:
    """Who holds what, as the simulation's nodes compute it."""
    node = Budget(1 << 60, 1 << 40)
    placed = place(Placing.PARTITION, [work.file_bytes] * work.files, [node] * work.nodes)
    return [placed.fetcher(id_) for id_ in range(work.files)]


@dataclass(frozen=True)
class Setting:
    """One point of the figure."""

    nodes: int
    knee: int
    samples: int
    link_bytes_per_s: float = LINK_BYTES_PER_S

    @property
    def name(self) -> str:
        """In results."""
        links = "" if self.link_bytes_per_s == LINK_BYTES_PER_S else ", slow links"
        return f"{self.nodes * LEARNERS_PER_NODE} learners simulated, source of {self.knee}{links}"

    @property
    def source_bytes_per_s(self) -> float:
        """What so many nodes train."""
        return self.knee * TRAINED_SAMPLES_PER_S * DATASET_BYTES / SAMPLES

    @property
    def preprocess_bytes_per_s(self) -> float:
        """Of a node."""
        return LEARNERS_PER_NODE * LEARNER_SAMPLES_PER_S * DATASET_BYTES / SAMPLES

    def work(self, kind: str) -> Work:
        """Loading only: what is computed is the preprocessing. Nodes go through their epochs without waiting for each
        other, as in the paper."""
        batch = LEARNERS_PER_NODE * BATCH
        return Work(
            nodes=self.nodes,
            kind=kind,
            files=self.samples,
            file_bytes=round(DATASET_BYTES / self.samples),
            epochs=1 if kind == DIRECT else EPOCHS,
            compute_s=DATASET_BYTES / self.preprocess_bytes_per_s,
            batch=batch,
            ahead=4 * batch,
        )

    def machine(self) -> Machine:
        """The source and the links."""
        return Machine(source_bytes_per_s=self.source_bytes_per_s, link_bytes_per_s=self.link_bytes_per_s)


def simulate(setting: Setting) -> dict[str, Any]:
    """Seconds of an epoch: regular; cached and divided evenly; divided by what nodes hold. And the model's."""
    machine = setting.machine()
    regular = Simulation(setting.work(DIRECT), machine).run()
    cached = Simulation(setting.work(Placing.PARTITION.value), machine).run()
    local = LocalFirst(setting.work(Placing.PARTITION.value), machine).run()
    regular_s, local_s = regular.epoch_s[0], _later_s(local)
    return {
        **asdict(setting),
        "regular_s": regular_s,
        "cached_s": _later_s(cached),
        "local_s": local_s,
        "speedup": regular_s / local_s,
        "moved": sum(local.peers[1:]) / len(local.peers[1:]),
        "model_speedup": model_speedup(setting),
    }


def model_speedup(setting: Setting) -> float:
    """By the equations: the larger of reading and preprocessing, which overlap; (2), (3), (8)."""
    source = setting.source_bytes_per_s
    preprocess_s = equations.preprocessing_s(DATASET_BYTES, setting.nodes, setting.preprocess_bytes_per_s)
    beta = equations.imbalance(LEARNERS_PER_NODE * BATCH, setting.nodes)
    local_s = equations.local_first_s(DATASET_BYTES, source, setting.nodes * setting.link_bytes_per_s, 1.0, beta)
    return max(equations.source_s(DATASET_BYTES, source), preprocess_s) / max(local_s, preprocess_s)


def _later_s(out: Outcome) -> float:
    return sum(out.epoch_s[1:]) / len(out.epoch_s[1:])
