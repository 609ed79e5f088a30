"""The guess when a loader is made: what it will read first, where nothing changes that; and the program as without."""

from __future__ import annotations

import os
from typing import Any

import pytest
from epochlab import Epochs
from shimlab import Lab

from hpcstage.protocol import shim

pytest.importorskip("torch")

pytest_plugins = ("shimfixtures",)
pytestmark = pytest.mark.torch
FILES = 12
CODE = """
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset

class Files(torch.utils.data.Dataset):
    def __init__(self): self.samples = [src(n) for n in sorted(os.listdir(SOURCE))]
    def __len__(self): return len(self.samples)
    def __getitem__(self, index):
        with open(self.samples[index], "rb") as file: return int(file.read())

class Own(RandomSampler):
    def __iter__(self): return iter(range(len(self)))

torch.manual_seed(5)
files = Files()
MAKE
state = torch.get_rng_state().sum().item()
order = [int(i) for batch in loader for i in batch]
say([order, state, torch.get_rng_state().sum().item()])
"""
MODEL = "; torch.nn.Linear(5, 5)"
KEPT = {
    "shuffled": "loader = DataLoader(files, 3, shuffle=True)",
    "workers": "loader = DataLoader(files, 3, shuffle=True, num_workers=2)",
    "own generator": "loader = DataLoader(files, 3, shuffle=True, generator=torch.Generator().manual_seed(8))" + MODEL,
    "distributed": "loader = DataLoader(files, 2, sampler=DistributedSampler(files, 2, 1, seed=3))" + MODEL,
    "in order": "loader = DataLoader(files, 2)" + MODEL,
    "another loader after it": "loader = DataLoader(files, 2, shuffle=True); DataLoader(files)",
}
NONE = {
    "own sampler": "loader = DataLoader(files, 2, sampler=Own(files))",
    "in memory": "loader = DataLoader(TensorDataset(torch.arange(9)), 1, collate_fn=lambda b: [int(t[0]) for t in b])",
}


@pytest.fixture
def filled(native_lab: Lab) -> Lab:
    for index in range(FILES):
        native_lab.put(f"f{index:03d}", b"%d" % index)
    native_lab.install()
    return native_lab


def outcome(lab: Lab, make: str) -> tuple[list[int], list[list[int]]]:
    """What was read, as without the shim, and the guesses."""
    code = CODE.replace("MAKE", make)
    with Epochs(lab) as epochs:
        with_us: Any = lab.run(code)
    assert with_us == lab.run(code, env=lab.environment(HPCSTAGE_DISABLE="1"))
    return with_us[0], [[int(os.path.basename(path)[1:]) for path in guess] for guess in epochs.guesses]


@pytest.mark.parametrize("form", KEPT)
def test_what_is_read_first(filled: Lab, form: str) -> None:
    order, guesses = outcome(filled, KEPT[form])
    assert guesses == [order]


@pytest.mark.parametrize("form", NONE)
def test_none(filled: Lab, form: str) -> None:
    assert outcome(filled, NONE[form])[1] == []


def test_a_wrong_one(filled: Lab) -> None:
    """The program draws random numbers before its epoch begins."""
    order, guesses = outcome(filled, KEPT["shuffled"] + MODEL)
    assert [sorted(guess) for guess in guesses] == [sorted(order)]
    assert guesses != [order]


@pytest.mark.parametrize("state", ["SETTLED", "MEASURING", "ENDED"])
def test_only_while_files_are_copied(filled: Lab, state: str) -> None:
    filled.state(shim.State[state])
    filled._poke(shim.LOGGING_OFFSET, 1)
    assert outcome(filled, KEPT["shuffled"])[1] == []
