"""Generations of real PyTorch states: bytes and seconds of full and incremental ones, split into write and diff.

Paper 001's tables 3 and 4 without the encoding: a program that changes little and one that changes much. Every program
trains for real between its checkpoints; all arms save the same states, and the last must come back bit for bit. Beside
them: what makes torch.save shift its tensors, blocks of 4 to 256 KB, and the speed of each part on one file.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.files import Place, empty, place
from benchmarks.harness import Arm, Bench, Figure, Options, Row, at_least, holds, less_by, options_of, parser
from benchmarks.workload.trained import FORMS, PROGRAMS
from hpcstage.checkpoint.generations.choice import GenerationPolicy
from hpcstage.checkpoint.generations.manifest import GenerationKind
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore, SavedGeneration

KB, MB, GB = 1 << 10, 1e6, 1e9
LITTLE = ("frozen body, Adam head", "adapters, AdamW")
LITTLE_SAVES_PERCENT = 83.8
MUCH_SAVES_PERCENT = 28.4
"""Both are paper 001's."""
NOT_WORSE_PERCENT = 0.1
"""Where every block changes, nothing is asked but that the bytes are those of a full generation; the manifest's reason
is some bytes longer."""
FULL = GenerationPolicy(always=GenerationKind.FULL)
ARMS = {"full": FULL, "incremental": GenerationPolicy()}
BLOCKS = (4 * KB, 16 * KB, 64 * KB, 256 * KB)
BLOCK_ARMS = {
    f"{name}, {size // KB} KB": GenerationPolicy(block_bytes=size, always=always)
    for size in BLOCKS
    for name, always in (("delta", GenerationKind.DELTA), ("chosen", None))
}
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


class States:
    """Makes the states of the programs once and saves them in generations again and again."""

    def __init__(self, where: Place, options: Options) -> None:
        self._where = where
        self._width = 768 if options.quick else 2048
        self._steps = 10 if options.quick else 100
        self._count = 3 if options.quick else 5
        self._file_bytes = (128 if options.quick else 1024) << 20
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
        """Saves states one after the other and returns the medians of all but the first, which is full in every arm."""
        os.sync()
        directory = self._where.disk / "store"
        with GenerationStore(empty(directory), policy) as store:
            all_saved = [store.commit(FileTree(state)) for state in states]
            began_s = time.monotonic()
            store.restore_newest(self._where.disk / "restored")
            restore_s = time.monotonic() - began_s
        same = _same(states[-1], self._where.disk / "restored")
        for path in (directory, self._where.disk / "restored"):
            shutil.rmtree(path)
        return {
            **_medians(all_saved[1:]),
            "restore_s": restore_s,
            "same": same,
            "first_bytes": all_saved[0].written_bytes,
        }

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
        """Saves one large file as weights that move a little, and returns bytes per second of each part."""
        top = empty(self._where.disk / "states")
        values = torch.randn(self._file_bytes // 4)
        states = [top / str(number) for number in range(2)]
        for state in states:
            state.mkdir()
            values.numpy().tofile(state / "weights")
            values *= 1 + 2**-16 * torch.randn(len(values))
        full = self.saved([states[0], states[1]], FULL)
        xor = self.saved([states[0], states[1]], GenerationPolicy(always=GenerationKind.XOR))
        size = self._file_bytes
        return {
            "seconds": full["seconds"] + xor["seconds"],
            "diff": size / full["diff_s"] / GB,
            "write": size / full["write_s"] / GB,
            "xor": size / xor["xor_s"] / GB,
            "restore_full": size / full["restore_s"] / GB,
            "restore_xor": size / xor["restore_s"] / GB,
            "same": full["same"] and xor["same"],
        }


def _medians(saved: Sequence[SavedGeneration]) -> dict[str, Any]:
    """What a generation took, by the median."""

    def median(value: Callable[[SavedGeneration], float]) -> float:
        return statistics.median(value(one) for one in saved)

    return {
        "seconds": median(lambda one: one.diff_s + one.xor_s + one.write_s),
        "diff_s": median(lambda one: one.diff_s),
        "xor_s": median(lambda one: one.xor_s),
        "write_s": median(lambda one: one.write_s),
        "written_bytes": median(lambda one: one.written_bytes),
        "all_bytes": sum(one.written_bytes for one in saved),
        "state_bytes": saved[-1].manifest.state_bytes,
        "changed_share": median(lambda one: one.changed_share),
        "kinds": ", ".join(one.manifest.kind.value for one in saved),
        "reason": saved[0].manifest.reason,
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


def saves_percent(bench: Bench, cell: str, key: str) -> float | None:
    """By how much less an incremental generation takes than a full one."""
    return less_by(bench.median(cell, "incremental", key), bench.median(cell, "full", key))


def figures(bench: Bench, cells: Sequence[Trained], speeds: bool) -> list[Figure]:
    """What paper 001 reached, of programs whose share of changed blocks allows it."""
    made = []
    for cell in cells:
        saves, share = (
            saves_percent(bench, cell.name, "written_bytes"),
            bench.median(cell.name, "incremental", "changed_share"),
        )
        shown = "not measured" if share is None else f"{100 * share:.0f} % of the blocks change"
        name = f"{cell.name} ({shown}): bytes less than a full generation"
        if cell.program in LITTLE:
            made.append(at_least(name, saves, LITTLE_SAVES_PERCENT, "%"))
        elif cell.program == "embedding, SGD":
            made.append(at_least(name, saves, MUCH_SAVES_PERCENT, "%"))
        else:
            made.append(at_least(name, saves, -NOT_WORSE_PERCENT, "%"))
    if speeds:
        made.append(at_least("reading and hashing the state", bench.median("speeds", "one file", "diff"), 2.0, "GB/s"))
    same = [sample["same"] for sample in bench.samples]
    return [*made, holds("every state came back bit for bit", all(same) if same else None)]


def tables(bench: Bench, cells: Sequence[Trained]) -> None:
    """Medians."""
    columns = ["program, form", "arm", "MB of the state", "blocks changed %", "MB written", "less %", "s", "diff s", "xor s", "write s", "less % s", "restore s", "kinds"]  # fmt: skip  # noqa: E501
    rows = [
        _row(bench, cell.name, arm, samples[-1])
        for cell in cells
        for arm in ARMS
        if (samples := bench.select(cell.name, arm))
    ]
    bench.sheet("A generation of each program's state, after the first", columns, rows)


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
        *(median(key) for key in ("seconds", "diff_s", "xor_s", "write_s")),
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
        keys = ("diff", "write", "xor", "restore_full", "restore_xor")
        bench.sheet("One file, GB/s", list(keys), [[bench.median("speeds", "one file", key) for key in keys]])


def measure(
    bench: Bench, states: States, trained: Trained, cell: str, policies: Mapping[str, GenerationPolicy], rounds: int
) -> None:
    """Saves the states of one program by each policy; where the file has all samples, nothing is trained."""
    if all(len(bench.select(cell, arm)) >= rounds for arm in policies):
        return
    saved = states.trained(trained)
    arms: dict[str, Arm] = {name: partial(states.saved, saved, policy) for name, policy in policies.items()}
    bench.measure(cell, arms, rounds)


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    bench = Bench("increments", options, {"cpus": os.cpu_count(), "torch": torch.__version__})
    cells = [Trained(program, form) for program in PROGRAMS for form in FORMS]
    cells = [cell for cell in cells if options.wants(cell.name)]
    with place(options) as where:
        states = States(where, options)
        for cell in cells:
            measure(bench, states, cell, cell.name, ARMS, options.rounds(5))
        if options.wants("blocks"):
            measure(bench, states, Trained("embedding, SGD", "tensors"), "blocks", BLOCK_ARMS, options.rounds(3))
        if options.wants("shifts"):
            bench.measure("shifts", {shift: partial(states.shifted, shift) for shift in SHIFTS}, 1)
        if options.wants("speeds"):
            bench.measure("speeds", {"one file": states.speeds}, options.rounds(5))
    tables(bench, cells)
    more_tables(bench)
    return bench.finish(figures(bench, cells, options.wants("speeds")))


if __name__ == "__main__":
    sys.exit(main())
