"""Which sample the opens are for: every index is marked before it is read, and the end of a batch."""

from __future__ import annotations

from typing import Any

import pytest
from shimlab import Lab

from hpcstage.protocol import shim

pytest.importorskip("torch")
pytest_plugins = ("shimfixtures",)
pytestmark = pytest.mark.torch
CODE = """
class Noting:
    def __init__(self, true): self.true = true
    def __getattr__(self, name): return getattr(self.true, name)
    def mark(self, key, index): noted.append(index)
noted = []
attach.active = Noting(attach.active)
import torch
from torch.utils.data import DataLoader, Dataset, Subset
class Files(Dataset):
    def __len__(self): return 6
    def __getitem__(self, index):
        noted.append("read %s" % index)
        if index == 99: raise KeyError(index)
        return index
class Whole(Files):
    def __getitems__(self, indices): return [self[i] for i in indices]
def noting(loader):
    del noted[:]
    try: list(loader)
    except KeyError: pass
    return list(noted)
"""


def noted(lab: Lab, loader: str, logging: int = 1) -> Any:
    """What was marked and read."""
    lab.install()
    lab._poke(shim.LOGGING_OFFSET, logging)
    lab.state(shim.State.ENDED)
    return lab.run(CODE + f"say(noting({loader}))")


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        ("DataLoader(Files(), 2, sampler=[3, 1, 4])", [3, "read 3", 1, "read 1", -1, 4, "read 4", -1]),
        ("DataLoader(Files(), None, sampler=[3, 1])", [3, "read 3", -1, 1, "read 1", -1]),
        ("DataLoader(Subset(Files(), [5, 4, 3]), 2)", [0, "read 5", 1, "read 4", -1, 2, "read 3", -1]),
        ("DataLoader(Files(), 2, sampler=[99, 1])", [99, "read 99", -1]),
        ("DataLoader(Files(), batch_sampler=[(1, 2)])", [1, "read 1", 2, "read 2", -1]),
        ("DataLoader(Files(), 2, sampler=['a', 1])", ["read a", 1, "read 1", -1]),
        ("DataLoader(Whole(), 2, sampler=[3, 1])", ["read 3", "read 1"]),
        ("DataLoader(Subset(Whole(), [3, 1]), 2)", ["read 3", "read 1"]),
        ("DataLoader(Subset(Subset(Files(), [3, 1]), [1, 0]), 2)", ["read 1", "read 3"]),
    ],
)
def test_each_index_before_it_is_read(native_lab: Lab, loader: str, expected: list[Any]) -> None:
    collate = ", collate_fn=list)" if "None" not in loader else ")"
    assert noted(native_lab, loader[:-1] + collate) == expected


def test_nothing_while_nothing_is_logged(native_lab: Lab) -> None:
    assert noted(native_lab, "DataLoader(Files(), 2, sampler=[3, 1])", logging=0) == ["read 3", "read 1"]
