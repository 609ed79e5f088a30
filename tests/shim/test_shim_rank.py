"""Which virtual node a process is on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

SHIM = Path(__file__).resolve().parents[2] / "hpcstage" / "shim" / "python" / "_hpcstage_rank.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("_hpcstage_rank", SHIM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rank = load()


@pytest.mark.parametrize(
    ("env", "node"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, 0),
        ({"RANK": "3", "WORLD_SIZE": "4"}, 1),
        ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}, 1),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 1),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, 1),
        ({"RANK": "1", "WORLD_SIZE": "2", "PMI_RANK": "0", "PMI_SIZE": "1"}, 1),
        ({"RANK": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}, 1),
        ({"RANK": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, 1),
        ({}, 0),
        ({"RANK": "1"}, 0),
        ({"RANK": "2", "WORLD_SIZE": "2"}, 0),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, 0),
        ({"RANK": "one", "WORLD_SIZE": "2"}, 0),
    ],
)
def test_the_node_of_a_rank(env: dict[str, str], node: int) -> None:
    assert rank.node_of(env, 2) == node


@given(st.integers(1, 64), st.integers(1, 256))
def test_ranks_are_dealt_in_blocks_that_differ_by_one_at_most(nodes: int, size: int) -> None:
    found = [rank.node_of({"RANK": str(r), "WORLD_SIZE": str(size)}, nodes) for r in range(size)]
    assert found == sorted(found)
    counts = [found.count(node) for node in range(nodes)]
    assert max(counts) - min(counts) <= 1
