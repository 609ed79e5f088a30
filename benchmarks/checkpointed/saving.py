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
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.files import Place, empty
from benchmarks.harness import Options
from benchmarks.workload.trained import FORMS, PROGRAMS
from hpcstage.checkpoint.generations.choice import GenerationPolicy
from hpcstage.checkpoint.generations.files import GenerationId, GenerationPart, generation_path
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore, SavedGeneration
from hpcstage.checkpoint.protection.encoding import GroupStore, StoreGroup
from hpcstage.checkpoint.protection.groups import CodeSize

GB = 1e9
GROUP, QUICK_GROUP = CodeSize(4, 2), CodeSize(2, 1)
FULL = GenerationPolicy(always=GenerationKind.FULL)
WARM_UP = 20
SHIFTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "the same name and numbers": ("last", "last", {}, {}),
    "the same name, step 200 to 255": ("last", "last", {"step": 200}, {"step": 255}),
    "the same name, step 255 to 256": ("last", "last", {"step": 255}, {"step": 256}),
    "the same name, a list that grows by a number": ("last", "last", {"losses": [0.5] * 9}, {"losses": [0.5] * 10}),
    "the same name, a list that grows by 20 numbers": ("last", "last", {"losses": [0.5] * 9}, {"losses": [0.5] * 29}),
    "step_90.pt to step_99.pt": ("step_90", "step_99", {}, {}),
    "step_99.pt to step_100.pt": ("step_99", "step_100", {}, {}),
}


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
        self._file_bytes = (64 if options.quick else 1024) << 20
        self.group = QUICK_GROUP if options.quick else GROUP
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

    def saved(self, states: Sequence[Path], policy: GenerationPolicy, group: CodeSize | None = None) -> dict[str, Any]:
        """Saves states one after the other and returns the medians of all but the first, which is full in every arm.

        A group's nodes each save them, and each generation is encoded; without a group there is one node.
        """
        os.sync()
        nodes = group.nodes if group else 1
        directory, restored = empty(self._where.disk / "stores"), self._where.disk / "restored"
        stores = tuple(GroupStore(f"node{number}", directory / str(number)) for number in range(nodes))
        with contextlib.ExitStack() as opened:
            writers = [opened.enter_context(GenerationStore(store.directory, policy)) for store in stores]
            made = [_generation(writers, stores, group, state, number) for number, state in enumerate(states, 1)]
            began_s = time.monotonic()
            writers[0].restore_newest(restored)
            restore_s = time.monotonic() - began_s
        same = _same(states[-1], restored)
        for path in (directory, restored):
            shutil.rmtree(path)
        first_bytes = made[0].first.written_bytes
        return {**_medians(made[1:]), "restore_s": restore_s, "same": same, "first_bytes": first_bytes}

    def shifted(self, shift: str) -> dict[str, Any]:
        """Saves one state twice by torch.save and returns how much of the second is at another place."""
        before, after, more_before, more_after = SHIFTS[shift]
        state = PROGRAMS["frozen body, Adam head"](self._width).state()
        top = empty(self._where.disk / "states")
        for number, (name, more) in enumerate(((before, more_before), (after, more_after))):
            (top / str(number)).mkdir()
            FORMS["torch.save"](state | more, top / str(number), name)
        places = [_places(top / "0" / f"{before}.pt"), _places(top / "1" / f"{after}.pt")]
        moved = sum(1 for name, place in places[0].items() if places[1].get(name) != place)
        saved = self.saved([top / "0", top / "1"], GenerationPolicy(always=GenerationKind.DELTA))
        return {**saved, "tensors": len(places[0]), "moved": moved}

    def speeds(self) -> dict[str, Any]:
        """Saves one large file twice, and returns bytes per second of each part."""
        top = empty(self._where.disk / "states")
        values = torch.randn(self._file_bytes // 4)
        states = [top / str(number) for number in range(2)]
        for state in states:
            state.mkdir()
            values.numpy().tofile(state / "weights")
            values *= 1 + 2**-16 * torch.randn(len(values))
        full = self.saved([states[0], states[1]], FULL)
        size = self._file_bytes
        return {
            "seconds": full["seconds"],
            "diff": size / full["diff_s"] / GB,
            "write": size / full["write_s"] / GB,
            "restore": size / full["restore_s"] / GB,
            "same": full["same"],
        }


def _generation(
    writers: Sequence[GenerationStore], stores: tuple[GroupStore, ...], group: CodeSize | None, state: Path, number: int
) -> GroupGeneration:
    """Has each node save a state, and encodes it."""
    identity = GenerationId.new(number)
    nodes = tuple(writer.commit(FileTree(state), identity) for writer in writers)
    if group is None:
        return GroupGeneration(nodes, 0.0, 0.0)
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


def _places(path: Path) -> dict[str, int]:
    """Where the tensors of a file of torch.save begin, by the names of their records."""
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        found = {}
        for info in archive.infolist():
            if "/data/" in info.filename:
                file.seek(info.header_offset + 26)
                lengths = file.read(4)
                sizes = int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")
                found[info.filename.partition("/data/")[2]] = info.header_offset + 30 + sizes
        return found
