"""Saves the states of real programs in generations of a group of virtual nodes, and encodes them.

Every node of the group saves the same states into a store of its own, and `StoreGroup` encodes them, all in one
process: seconds are those of one node, the encoding's the time of all nodes divided by their number. Nothing passes a
network; what that costs is measured elsewhere (`benchmarks.checkpointed.forms`, `simulation`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpointed.storegroup import GroupStore, StoreGroup
from benchmarks.files import Place, empty, write_back
from benchmarks.harness import Options
from benchmarks.workload.trained import FORMS, PROGRAMS
from hpcstage.checkpoint.generations.files import GenerationId, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.checkpoint.generations.restoring import restore
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore, SavedGeneration
from hpcstage.checkpoint.generations.terms import GenerationPolicy
from hpcstage.checkpoint.protection.groups import CodeSize

GB = 1e9
GROUP, QUICK_GROUP = CodeSize(4, 2), CodeSize(2, 1)
FULL = GenerationPolicy(always=GenerationKind.FULL)
WARM_UP = 20


@dataclass(frozen=True)
class Trained:
    """One program in one form."""

    program: str
    form: str

    @property
    def name(self) -> str:
        """In results and for --only."""
        return f"{self.program}, {self.form}"


@dataclass(frozen=True)
class GroupGeneration:
    """One generation of all nodes: what each commit returned, and what the encoding added."""

    nodes: tuple[SavedGeneration, ...]
    encode_s: float
    """The time of the encoding, for one node."""
    parity_bytes: float
    """The bytes of parities on one node."""

    @property
    def first(self) -> SavedGeneration:
        """The generation of the first node; those of the others hold the same."""
        return self.nodes[0]

    def mean(self, value: Callable[[SavedGeneration], float]) -> float:
        """A value of one node."""
        return statistics.fmean(map(value, self.nodes))

    @property
    def saved_s(self) -> float:
        """The time until one node's generation is on its disk."""
        return self.mean(lambda one: one.diff_s + one.write_s)


class States:
    """Makes the states of the programs once and saves them in generations again and again."""

    def __init__(self, where: Place, options: Options) -> None:
        self._where = where
        self._width = 512 if options.quick else 2048
        self._steps = 10 if options.quick else 100
        self._count = 2 if options.quick else 4
        self._group = QUICK_GROUP if options.quick else GROUP
        torch.manual_seed(0)

    def trained(self, cell: Trained) -> list[Path]:
        """Trains a program and returns the directories with its states, one after the other."""
        top = empty(self._where.disk / "states")
        program = PROGRAMS[cell.program](self._width)
        program.train(WARM_UP)
        made = []
        for number in range(self._count + 1):
            made.append(top / str(number))
            made[-1].mkdir()
            FORMS[cell.form](program.state(), made[-1], f"step_{100 + number}")
            program.train(self._steps)
        return made

    def saved(self, states: Sequence[Path], policy: GenerationPolicy) -> dict[str, Any]:
        """Saves states one after the other and returns the medians of all but the first, which is full in every arm.

        The nodes of a group each save them, and each generation is encoded.
        """
        directory, restored = empty(self._where.disk / "stores"), self._where.disk / "restored"
        write_back(directory)
        stores = tuple(GroupStore(f"node{number}", directory / str(number)) for number in range(self._group.nodes))
        with contextlib.ExitStack() as opened:
            writers = [opened.enter_context(GenerationStore(store.directory, policy)) for store in stores]
            made = [_generation(writers, stores, self._group, state, number) for number, state in enumerate(states, 1)]
            began_s = time.monotonic()
            restore(writers[0].source(), len(states), restored)
            restore_s = time.monotonic() - began_s
        same = _same(states[-1], restored)
        for path in (directory, restored):
            shutil.rmtree(path)
        first_bytes = made[0].first.written_bytes
        return {**_medians(made[1:]), "restore_s": restore_s, "same": same, "first_bytes": first_bytes}


def _generation(
    writers: Sequence[GenerationStore], stores: tuple[GroupStore, ...], group: CodeSize, state: Path, number: int
) -> GroupGeneration:
    """Has each node save a state, and encodes it."""
    identity = GenerationId.new(number)
    nodes = tuple(writer.commit(FileTree(state), identity) for writer in writers)
    began_s = time.monotonic()
    StoreGroup(stores, group).encode(number)
    encode_s = time.monotonic() - began_s
    parities = [generation_path(store.directory, number) / GenerationPart.PARITY for store in stores]
    held = statistics.fmean(path.stat().st_blocks * 512 for path in parities)
    return GroupGeneration(nodes, encode_s / len(stores), held)


def _medians(made: Sequence[GroupGeneration]) -> dict[str, Any]:
    """What a generation took on one node, by the median."""

    def median(value: Callable[[GroupGeneration], float]) -> float:
        return statistics.median(map(value, made))

    return {
        "seconds": median(lambda one: one.saved_s + one.encode_s),
        "diff_s": median(lambda one: one.mean(lambda node: node.diff_s)),
        "write_s": median(lambda one: one.mean(lambda node: node.write_s)),
        "encode_s": median(lambda one: one.encode_s),
        "written_bytes": median(lambda one: one.first.written_bytes),
        "parity_bytes": median(lambda one: one.parity_bytes),
        "all_bytes": sum(one.first.written_bytes for one in made),
        "state_bytes": made[-1].first.manifest.state_bytes,
        "changed_share": median(lambda one: one.first.changed_share),
        "kinds": ", ".join(one.first.manifest.kind.value for one in made),
        "reason": made[0].first.manifest.reason,
    }


def _same(one: Path, other: Path) -> bool:
    """Whether two directories hold the same names and contents."""
    names = [sorted(os.fspath(path.relative_to(top)) for path in top.rglob("*")) for top in (one, other)]
    files = [name for name in names[0] if (one / name).is_file()]
    return names[0] == names[1] and all((one / name).read_bytes() == (other / name).read_bytes() for name in files)
