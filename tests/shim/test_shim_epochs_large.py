"""An epoch of the size of ImageNet: how long the announcement holds the program up, and what it takes in memory."""

from __future__ import annotations

from typing import Any

import pytest
from epochlab import Epochs
from shimlab import Lab

pytest.importorskip("torch")
pytest_plugins = ("shimfixtures",)
pytestmark = [pytest.mark.torch, pytest.mark.slow]
SAMPLES = 1_281_167
EXTRA_BYTES = 50 * 1024 * 1024
HELD_UP_S = 2.0  # 0.5 s are meant, on a machine that does nothing else
CODE = """
import resource, time, torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, RandomSampler
class Files(Dataset):
    def __init__(self, n): self.samples = [(src("f%07d.jpg" % i), i % 1000) for i in range(n)]
    def __len__(self): return len(self.samples)
    def __getitem__(self, index): return index
def begin(loader):
    begin_ns = time.monotonic_ns()
    batches = iter(loader)
    batches._next_index()
    return (time.monotonic_ns() - begin_ns) / 1e9
files = Files(int(sys.argv[2]))
list(DataLoader(range(64), 8, shuffle=True))
seconds = begin(LOADER)
say([seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024])
"""
LOADERS = {
    "shuffle": "DataLoader(files, 256, shuffle=True)",
    "distributed": "DataLoader(files, 256, sampler=DistributedSampler(files, 1, 0))",
    "distributed over 8": "DataLoader(files, 256, sampler=DistributedSampler(files, 8, 0))",
    "subset": "DataLoader(Subset(files, torch.randperm(len(files)).tolist()), 256, shuffle=True)",
    "no batches": "DataLoader(files, None, sampler=DistributedSampler(files, 1, 0))",
}


@pytest.mark.parametrize("loader", LOADERS)
def test_imagenet(native_lab: Lab, loader: str) -> None:
    for index in (0, SAMPLES // 3, 2 * SAMPLES // 3, SAMPLES - 1):
        native_lab.put(f"f{index:07d}.jpg", b"")
    native_lab.install()
    code = CODE.replace("LOADER", LOADERS[loader])

    def measure(**environment: str) -> Any:
        return native_lab.run(code, str(SAMPLES), env=native_lab.environment(**environment))

    plain_s, plain_bytes = measure(HPCSTAGE_DISABLE="1")
    with Epochs(native_lab) as epochs:
        ours_s, ours_bytes = measure()
    announced = epochs.begun()[-1]
    assert announced.columns == 1
    assert announced.table is not None
    assert len(announced.table) == SAMPLES
    assert len(announced.indices) == (SAMPLES if "8" not in loader else -(-SAMPLES // 8))
    print(f"{loader}: {ours_s - plain_s:.3f} s, {(ours_bytes - plain_bytes) / 2**20:.1f} MiB more")
    assert ours_s - plain_s < HELD_UP_S
    assert ours_bytes - plain_bytes < EXTRA_BYTES
