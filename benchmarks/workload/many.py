"""A dataset with a long list of samples, of which a program asks for one batch. Prints times and memory as JSON.

python many.py DIR SAMPLES [random|manifest|own]
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset, Sampler


class Many(Dataset[int]):
    """As long as asked for: the files come again and again."""

    def __init__(self, root: str, size: int) -> None:
        names = sorted(os.listdir(root))
        self.samples = [(f"{root}/{names[number % len(names)]}", number % 1000) for number in range(size)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> int:
        with open(self.samples[index][0], "rb") as file:
            return len(file.read())


class Backwards(Sampler[int]):
    """A sampler of the program's own, which nobody knows."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))


def main() -> None:
    """One batch."""
    torch.manual_seed(1)
    data, kind = Many(sys.argv[1], int(sys.argv[2])), sys.argv[3] if len(sys.argv) > 3 else "random"
    sampler: Sampler[int] | None = Backwards(len(data)) if kind == "own" else None
    loader = DataLoader(data, batch_size=32, shuffle=kind == "random", sampler=sampler)
    started_s = time.perf_counter()
    next(iter(loader))
    took_s = time.perf_counter() - started_s
    print(json.dumps({"first_batch_s": took_s, "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}))


if __name__ == "__main__":
    main()
