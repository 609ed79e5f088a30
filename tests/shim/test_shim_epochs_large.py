"""A long epoch: what its announcement does for each sample while the program waits, and what it takes in memory.

Counted are the lines and calls of Python: what is done for all samples at once is a few of them.
"""

from __future__ import annotations

import pytest
from epochlab import Epochs
from shimlab import Lab

pytest.importorskip("torch")
pytest_plugins = ("shimfixtures",)
pytestmark = [pytest.mark.torch, pytest.mark.slow]
SAMPLES = 300_000
EXTRA_BYTES = 120 * SAMPLES
"""A list of their names would take more. The indices of the sampler that is run ahead are part of it."""
STEPS = {"pathlib": 22.0, "distributed over 8": 1.1, "no batches": 1.1, "subset of a subset": 8.5}
"""For each sample at most, where it is not those of a sampler that is run ahead and yields each index. What a PathLike
stands for is read of the first 65536. The table of a subset has the names that it chose, and is written once."""
RUN_AHEAD_STEPS = 5.2
CODE = """
import pathlib, torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
class Files(Dataset):
    def __init__(self, n): self.samples = [(src("f%07d.jpg" % i), i % 1000) for i in range(n)]
    def __len__(self): return len(self.samples)
    def __getitem__(self, index): return index
def count(call):
    steps = 0
    def step(frame, event, argument):
        nonlocal steps
        steps += 1
        return step
    sys.settrace(step), sys.setprofile(step)
    call()
    sys.settrace(None), sys.setprofile(None)
    return steps
def memory(kind):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(kind)]
    return int(line.split()[1]) * 1024
def begin(loader):
    batches = iter(loader)
    batches._next_index()
    return batches
def respelt(spell):
    files.samples = [(spell("f%07d.jpg" % i), i % 1000) for i in range(len(files))]
    return files
n = int(sys.argv[2])
files = Files(n)
os.chdir(SOURCE)
list(DataLoader(range(64), 8, shuffle=True))
loader = LOADER
own = count(lambda: next(iter(loader._index_sampler)))
open("/proc/self/clear_refs", "w").write("5")  # the peak is that from now on
before = memory("VmRSS")
steps = count(lambda: begin(loader)) - own
say([steps / n, memory("VmHWM") - before])
"""
LOADERS = {
    "shuffle": "DataLoader(files, 256, shuffle=True)",
    "distributed over 8": "DataLoader(files, 256, sampler=DistributedSampler(files, 8, 0))",
    "subset of a subset": "DataLoader(Subset(Subset(files, torch.randperm(n)), torch.randperm(n)), 256, shuffle=True)",
    "no batches": "DataLoader(files, None, sampler=DistributedSampler(files, 1, 0))",
    "pathlib": "DataLoader(respelt(lambda name: pathlib.Path(src(name))), 256, shuffle=True)",
}
LEARNT = ["pathlib"]
"""To read what a PathLike stands for would leave more behind in memory than is allowed."""


@pytest.mark.parametrize("loader", LOADERS)
def test_imagenet(native_lab: Lab, loader: str) -> None:
    probes = {0, SAMPLES // 3, 2 * SAMPLES // 3, SAMPLES - 1}
    for index in probes:
        native_lab.put(f"f{index:07d}.jpg", b"")
    native_lab.install()
    code = CODE.replace("LOADER", LOADERS[loader])

    with Epochs(native_lab) as epochs:
        steps, extra_bytes = native_lab.run(code, str(SAMPLES), timeout_s=400)
    print(f"{loader}: {steps:.4f} steps for each sample, {extra_bytes / 2**20:.1f} MiB more")
    announced = epochs.begun()[-1]
    assert len(announced.indices) == (SAMPLES if "8" not in loader else -(-SAMPLES // 8))
    if loader in LEARNT:
        assert announced.columns == 0
        assert [len(head) for head in epochs.heads] == [65536]
    else:
        assert announced.columns == 1
        assert announced.table is not None
        assert len(announced.table) == SAMPLES
        assert announced.table[announced.indices[0]] == epochs.heads[-1][0]
    assert steps < STEPS.get(loader, RUN_AHEAD_STEPS)
    assert extra_bytes < EXTRA_BYTES
