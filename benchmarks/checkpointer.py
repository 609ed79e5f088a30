"""Checkpoints of a training: how long it stands still, until when a state is safe, and what loading takes.

`hpcstage.torch.Checkpointer` beside per-tensor `copy_` into memory that is there (70 and 4,000 tensors), beside
torch.save and torch.distributed.checkpoint (plain, async) to emulated shared storage and to the local disk, and a
training on all processors with and without a save each minute. A state is safe when it is on the storage, under its
name; `Checkpointer` reads it back after that, which is shown beside.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from benchmarks.files import Place, drop_caches, drop_files, empty, place
from benchmarks.harness import Arm, Bench, Figure, Options, at_most, holds, options_of, parser
from benchmarks.storage import Storage
from hpcstage.emulator import Settings
from hpcstage.torch import Checkpointer

MB, GB = 1e6, 1e9
STATE_BYTES = 1_000_000_000
COUNTS = (70, 4000)
OURS, COPIED, PLAIN = "Checkpointer", "copy_", "no saves"
MOST_OF_COPY = 1.15
MOST_SLOWED = 1.05
MINUTE_S = 60.0
SHARED = Settings(bandwidth_bytes_per_s=500 * MB, metadata_latency_s=0.002, data_latency_s=0.001)
WAYS = (
    f"{OURS}, local disk",
    "torch.save, local disk",
    "DCP, local disk",
    f"{OURS}, shared",
    "torch.save, shared",
    "DCP, shared",
    "DCP async, shared",
)
LOOK_S, TOO_LONG_S = 0.005, 600.0


class Saved(NamedTuple):
    """Seconds from the begin of a save until something is so."""

    still_s: float
    """Until the training goes on."""
    safe_s: float
    """Until the state is on the storage, under its name."""
    checked_s: float | None = None
    """Until it was read back and compared, which `Checkpointer` alone does."""


def state_of(count: int, size_bytes: int) -> dict[str, Tensor]:
    """A state with so many tensors of one size."""
    return {f"layer{number}.weight": torch.randn(size_bytes // 4 // count) for number in range(count)}


class Standing:
    """The time of `save` from the second one on, and of copying the same tensors one by one."""

    def __init__(self, directory: Path, count: int, size_bytes: int) -> None:
        self._state = state_of(count, size_bytes)
        self._there = [torch.empty_like(tensor).fill_(1) for tensor in self._state.values()]
        self._checkpointer = Checkpointer(directory, keep=1)
        self._step = 0
        self.saved()

    def saved(self) -> dict[str, Any]:
        """Saves once; the state is written before the next sample begins."""
        self._step += 1
        took = saved(self._checkpointer, self._state, self._step)
        return {"seconds": took.still_s, **took._asdict()}

    def copied(self) -> dict[str, Any]:
        """Copies the same tensors one by one."""
        began_s = time.monotonic()
        for there, tensor in zip(self._there, self._state.values(), strict=True):
            there.copy_(tensor)
        return {"seconds": time.monotonic() - began_s}

    def close(self) -> None:
        """Gives the memory back."""
        self._checkpointer.close()


class Training:
    """A model with Adam that keeps all processors busy, and saves at the beginning of each minute or never."""

    def __init__(self, directory: Path, size_bytes: int, minute_s: float) -> None:
        width = int((size_bytes / 12 / 6) ** 0.5)  # six layers; the weights are kept three times
        self._model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-4)
        self._batch = torch.randn(128, width)
        self._minute_s = minute_s
        self._checkpointer = Checkpointer(directory, keep=1)
        self._step = 0
        self._train()
        self._checkpointer.save(self._state(), self._step)
        self._checkpointer.wait()

    def minute(self, saves: bool) -> dict[str, Any]:
        """Trains for a minute. `seconds` is what a step takes, the save included."""
        began_s, steps, still_s, safe_s = time.monotonic(), 0, 0.0, None
        if saves:
            self._checkpointer.save(self._state(), self._step)
            still_s = time.monotonic() - began_s
        while (now_s := time.monotonic() - began_s) < self._minute_s:
            if saves and safe_s is None and self._newest() == self._step - steps:
                safe_s = now_s
            self._train()
            steps += 1
        took_s = time.monotonic() - began_s
        self._checkpointer.wait()
        return {"seconds": took_s / steps, "steps": steps, "still_s": still_s, "safe_s": safe_s}

    def close(self) -> None:
        """Gives the memory back."""
        self._checkpointer.close()

    def _train(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._batch).square().mean().backward()
        self._optimizer.step()
        self._step += 1

    def _state(self) -> dict[str, Any]:
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}

    def _newest(self) -> int:
        """The newest checkpoint in the directory: only what is whole and on the disk has its name."""
        return max(int(name[5:]) for name in os.listdir(self._checkpointer.directory) if name.startswith("step-"))


class Ways:
    """Saves one state in different ways, and loads it again."""

    def __init__(self, where: Place, size_bytes: int, *, quick: bool) -> None:
        self._where = where
        self._drop = drop_files if quick else drop_caches
        self._state = state_of(COUNTS[0], size_bytes)
        self._into = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}

    def arms(self) -> dict[str, Arm]:
        """One for each way."""
        return {way: partial(self.sample, *way.split(", ")) for way in WAYS}

    def sample(self, tool: str, target: str) -> dict[str, Any]:
        """Saves twice, since the first time takes memory, and loads the second with nothing cached."""
        save, load = {
            OURS: (self._ours, self._load_ours),
            "torch.save": (self._torch, self._load_torch),
            "DCP": (self._dcp, self._load_dcp),
            "DCP async": (self._dcp_async, self._load_dcp),
        }[tool]
        with self._target(target) as directory:
            with contextlib.closing(Checkpointer(directory / "ours")) as checkpointer:
                self._checkpointer = checkpointer
                for turn in range(2):
                    took = save(directory / str(turn), turn)
                for tensor in self._into.values():
                    tensor.zero_()
                self._drop([path for path in directory.rglob("*") if path.is_file()])
                began_s = time.monotonic()
                load(directory / "1")
                load_s = time.monotonic() - began_s
        same = all(torch.equal(tensor, self._into[name]) for name, tensor in self._state.items())
        return {"seconds": took.still_s, **took._asdict(), "load_s": load_s, "same": same}

    @contextlib.contextmanager
    def _target(self, target: str) -> Iterator[Path]:
        directory = empty((self._where.disk if target == "local disk" else self._where.memory) / "target")
        try:
            if target == "local disk":
                yield directory
            else:
                with Storage(directory, SHARED, empty(self._where.memory / "mounts")) as storage:
                    yield storage.path
        finally:
            empty(directory)

    def _ours(self, _: Path, turn: int) -> Saved:
        return saved(self._checkpointer, self._state, turn)

    def _torch(self, path: Path, _: int) -> Saved:
        def save() -> None:
            with open(path, "wb") as file:
                torch.save(self._state, file)
                file.flush()
                os.fsync(file.fileno())

        return timed(save, None)

    def _dcp(self, path: Path, _: int) -> Saved:
        return timed(lambda: state_dict_saver.save(self._state, checkpoint_id=path), None)

    def _dcp_async(self, path: Path, _: int) -> Saved:
        running: list[Any] = []

        def save() -> None:
            running.append(state_dict_saver.async_save(self._state, checkpoint_id=path))

        return timed(save, lambda: running.pop().result())

    def _load_ours(self, _: Path) -> None:
        self._checkpointer.load(into=self._into)

    def _load_torch(self, path: Path) -> None:
        for name, tensor in torch.load(path, weights_only=True).items():
            self._into[name].copy_(tensor)

    def _load_dcp(self, path: Path) -> None:
        state_dict_loader.load(self._into, checkpoint_id=path)


def timed(save: Callable[[], object], wait: Callable[[], object] | None) -> Saved:
    """The seconds of saving, and of saving and waiting."""
    began_s = time.monotonic()
    save()
    still_s = time.monotonic() - began_s
    if wait is not None:
        wait()
    return Saved(still_s, time.monotonic() - began_s)


def saved(checkpointer: Checkpointer, state: dict[str, Tensor], step: int) -> Saved:
    """The seconds of one save, until it has its name, and until it was read back."""
    path = checkpointer.directory / f"step-{step:08}"
    began_s = time.monotonic()

    def named() -> None:
        while not path.exists():
            if time.monotonic() - began_s > TOO_LONG_S:
                raise TimeoutError(f"{path} was not saved")
            time.sleep(LOOK_S)

    took = timed(lambda: checkpointer.save(state, step), named)
    checkpointer.wait()
    return took._replace(checked_s=time.monotonic() - began_s)


def figures(bench: Bench) -> list[Figure]:
    """What is asked of `save`, and of a training that saves each minute."""
    made = []
    for count in COUNTS:
        if bench.options.wants(standing(count)):
            ratio = bench.ratio(standing(count), OURS, COPIED)
            made.append(at_most(f"{standing(count)}: save() against copy_ of each", ratio, MOST_OF_COPY, "times"))
    if bench.options.wants("training"):
        slowed = bench.ratio("training", OURS, PLAIN)
        safe = [sample["safe_s"] for sample in bench.select("training", OURS)]
        made.append(at_most("training that saves each minute against none", slowed, MOST_SLOWED, "times"))
        made.append(holds("each save safe within its minute", None not in safe if safe else None))
    if bench.options.wants("ways"):
        same = [sample["same"] for sample in bench.samples if sample["cell"] == "ways"]
        made.append(holds("every state came back bit for bit", all(same) if same else None))
    return made


def standing(count: int) -> str:
    """The name of a cell."""
    return f"save, {count} tensors"


def measure(bench: Bench, where: Place, options: Options) -> None:
    """All cells; what a cell needs is made for it and given back."""
    size_bytes = STATE_BYTES // 100 if options.quick else STATE_BYTES
    for count in COUNTS:
        if options.wants(standing(count)):
            with contextlib.closing(Standing(where.disk / "saves", count, size_bytes)) as state:
                bench.measure(standing(count), {OURS: state.saved, COPIED: state.copied}, options.rounds(15, 3))
            empty(where.disk / "saves")
    if options.wants("training"):
        minute_s = 1.0 if options.quick else MINUTE_S
        with contextlib.closing(Training(where.disk / "saves", size_bytes, minute_s)) as training:
            arms: dict[str, Arm] = {PLAIN: partial(training.minute, False), OURS: partial(training.minute, True)}
            bench.measure("training", arms, options.rounds(5))
        empty(where.disk / "saves")
    if options.wants("ways"):
        bench.measure("ways", Ways(where, size_bytes, quick=options.quick).arms(), options.rounds(5))


def main() -> int:
    """Measures, prints, checks."""
    options = options_of(parser(__doc__).parse_args())
    warnings.filterwarnings("ignore", module=r"torch\.distributed")
    bench = Bench("checkpointer", options, {"cpus": os.cpu_count(), "torch": torch.__version__}, tries=3)
    with place(options) as where:
        measure(bench, where, options)
    return bench.finish(figures(bench))


if __name__ == "__main__":
    sys.exit(main())
