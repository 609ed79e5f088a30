"""An epoch of the size of ImageNet: how long the announcement holds the program up, and what it takes in memory.

Time is processor time, and measured against that in which the same process listed its files, so that a machine that is
busy or slow changes both alike. Half a second on the machine where the list takes 1.1 s is what is meant.
"""

from __future__ import annotations

import shutil

import pytest
from epochlab import Epochs
from shimlab import Lab

pytest.importorskip("torch")
pytest_plugins = ("shimfixtures",)
pytestmark = [pytest.mark.torch, pytest.mark.slow]
SAMPLES = 1_281_167
EXTRA_BYTES = 50 * 1024 * 1024
HELD_UP_SHARE = 0.45
ATTEMPTS = 3
"""What else the machine does can only add to what is measured."""
CODE = """
import pathlib, resource, time, torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, RandomSampler, Subset
from torch.utils.data import WeightedRandomSampler, random_split
class Files(Dataset):
    def __init__(self, n): self.samples = [(src("f%07d.jpg" % i), i % 1000) for i in range(n)]
    def __len__(self): return len(self.samples)
    def __getitem__(self, index): return index
def cost(call):
    begin_s = time.process_time()
    result = call()
    return time.process_time() - begin_s, result
def begin(loader):
    batches = iter(loader)
    batches._next_index()
    return batches
def respelt(spell):
    files.samples = [(spell("f%07d.jpg" % i), i % 1000) for i in range(len(files))]
    return files
n = int(sys.argv[2])
list_s, files = cost(lambda: Files(n))
os.chdir(SOURCE)
list(DataLoader(range(64), 8, shuffle=True))
loader = LOADER
own_s, _ = cost(lambda: next(iter(loader._index_sampler)))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begin_s, _ = cost(lambda: begin(loader))
extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
say([own_s / list_s, begin_s / list_s, extra * 1024])
"""
LOADERS = {
    "shuffle": "DataLoader(files, 256, shuffle=True)",
    "distributed": "DataLoader(files, 256, sampler=DistributedSampler(files, 1, 0))",
    "distributed over 8": "DataLoader(files, 256, sampler=DistributedSampler(files, 8, 0))",
    "weighted": "DataLoader(files, 256, sampler=WeightedRandomSampler(torch.ones(n), n))",
    "subset": "DataLoader(Subset(files, torch.randperm(n).tolist()), 256, shuffle=True)",
    "subset of a subset": "DataLoader(Subset(Subset(files, torch.randperm(n)), torch.randperm(n)), 256, shuffle=True)",
    "concat of subsets": "DataLoader(ConcatDataset(random_split(files, [n // 3, n - n // 3])), 256, shuffle=True)",
    "no batches": "DataLoader(files, None, sampler=DistributedSampler(files, 1, 0))",
    "no batches, shuffle": "DataLoader(files, None, shuffle=True)",
    "dots": "DataLoader(respelt(lambda name: './' + name), 256, shuffle=True)",
    "pathlib": "DataLoader(respelt(lambda name: pathlib.Path(src(name))), 256, shuffle=True)",
}
RESPELT_SHARE = 0.6
"""Where every name has to be spelt anew, which a busy machine slows down more than the listing."""
SLOW = ["weighted"]
"""To draw takes half of what is allowed, and it is drawn once more."""
LEARNT = ["pathlib"]
"""To read what a PathLike stands for would leave more behind in memory than is allowed."""


@pytest.mark.parametrize("loader", LOADERS)
def test_imagenet(native_lab: Lab, loader: str) -> None:
    probes = {0, SAMPLES // 3, 2 * SAMPLES // 3, SAMPLES - 1}
    for index in probes:
        native_lab.put(f"f{index:07d}.jpg", b"")
    native_lab.install()
    code = CODE.replace("LOADER", LOADERS[loader])

    allowed = RESPELT_SHARE if loader == "dots" else HELD_UP_SHARE
    for _ in range(ATTEMPTS):
        shutil.rmtree(native_lab.node / "orders", ignore_errors=True)
        native_lab.sock.unlink(missing_ok=True)
        with Epochs(native_lab) as epochs:
            own, begun, extra_bytes = native_lab.run(code, str(SAMPLES))
        held_up = begun - own * (2 if loader in SLOW else 1)
        print(f"{loader}: {held_up:.3f} of listing, {extra_bytes / 2**20:.1f} MiB more")
        if held_up < allowed:
            break
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
    assert held_up < allowed
    assert extra_bytes < EXTRA_BYTES
