"""Two data sets for loaders, and one epoch of one of them: how long it takes, and a digest of all its batches.

Owns the samples. `io`: a small file, which takes as long as the storage lets it wait. `decode`: an image packed as in
a PNG, rows of differences behind zlib, whose unpacking is the work. Both are cropped and mirrored at random, with draws
from the global generators of torch, NumPy and random.
"""

# ruff: noqa: ANN401 - arrays, pipes and loaders

from __future__ import annotations

import multiprocessing
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader as PlainLoader
from torch.utils.data import Dataset

BATCH = 16
SIDES = {"io": 96, "decode": 320}
CROPPED = 64
_LIMIT_S = 300.0


@dataclass(frozen=True)
class Epoch:
    """What is loaded, and by what."""

    kind: str
    data: Path
    count: int
    workers: int
    threads: int | None
    """None: PyTorch's loader."""


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Square images in files."""

    def __init__(self, kind: str, data: Path, count: int) -> None:
        self.paths = [str(path) for path in paths_of(data, count)]
        self.unpack = _unpacked if kind == "decode" else _plain
        self.side = SIDES[kind]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with open(self.paths[index], "rb") as file:
            raw = file.read()
        image = self.unpack(raw, self.side)
        top = int(torch.randint(self.side - CROPPED, ()))
        left = int(np.random.randint(self.side - CROPPED))
        image = image[:, top : top + CROPPED, left : left + CROPPED]
        if random.random() < 0.5:
            image = image.flip(2)
        return image.float().div_(255), index


def _plain(raw: bytes, side: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(3, side, side)


def _unpacked(raw: bytes, side: int) -> torch.Tensor:
    differences = torch.frombuffer(bytearray(zlib.decompress(raw)), dtype=torch.uint8).view(3, side, side)
    return differences.cumsum(2, dtype=torch.uint8)


def paths_of(data: Path, count: int) -> list[Path]:
    """The files of a data set."""
    return [data / f"image{number:05d}" for number in range(count)]


def make(kind: str, data: Path, count: int) -> None:
    """Writes them: smooth shades with some noise, different in each."""
    data.mkdir()
    generator = np.random.default_rng(5)
    side = SIDES[kind]
    shades = np.add.outer(np.arange(side), np.arange(side))[None] * np.array([1, 2, 3])[:, None, None]
    for path in paths_of(data, count):
        noise = generator.integers(0, 6, (3, side, side))
        image = (shades + noise + generator.integers(0, 256)).astype(np.uint8)
        path.write_bytes(zlib.compress(_differences(image)) if kind == "decode" else image.tobytes())


def _differences(image: Any) -> bytes:
    return bytes(np.diff(image, axis=2, prepend=np.uint8(0)).astype(np.uint8).tobytes())


def measure(epoch: Epoch) -> dict[str, Any]:
    """Loads it in a process of its own, forked from this one."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(theirs, _load, epoch))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_LIMIT_S):
            raise TimeoutError(f"{epoch} takes more than {_LIMIT_S:g} s")
        return dict(ours.recv())
    finally:
        process.kill()
        process.join()
        ours.close()


def _send(pipe: Any, load: Callable[[Epoch], dict[str, Any]], epoch: Epoch) -> None:
    with pipe:
        pipe.send(load(epoch))


def _load(epoch: Epoch) -> dict[str, Any]:
    torch.set_num_threads(1)  # as in workers: who loads is what is compared, not PyTorch's threads within operators
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    loader = _loader(epoch)
    digest = 0
    begin = time.perf_counter()
    for images, indices in loader:
        digest = zlib.crc32(images.numpy().tobytes() + indices.numpy().tobytes(), digest)
    seconds = time.perf_counter() - begin
    return {"seconds": seconds, "samples_per_s": epoch.count / seconds, "digest": digest}


def _loader(epoch: Epoch) -> Any:
    dataset = Images(epoch.kind, epoch.data, epoch.count)
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": epoch.workers}
    if epoch.threads is None:
        return PlainLoader(dataset, **options)
    from hpcstage.torch.loader.dataloader import DataLoader

    return DataLoader(dataset, **options, threads_per_worker=epoch.threads)
