"""Theorem 1 under real torch.distributed: the gradients of each step are the regular sampler's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradient_ranks  # noqa: E402
from locality_ranks import make_node, run_ranks  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
WORLD = 3
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Any]]]:
    """Per rank: gradients by way. Node 0 holds 65 %, node 1 the rest; some both hold."""
    directory = tmp_path_factory.mktemp("gradients")
    names = [f"{n:03}" for n in range(gradient_ranks.SAMPLES)]
    make_node(directory / "node0", names, kept=[n for n in names if int(n) % 20 < 13], due=[])
    make_node(directory / "node1", names, kept=[n for n in names if int(n) % 20 >= 12], due=[])
    run_ranks(Path(gradient_ranks.__file__), directory, WORLD)
    return [torch.load(directory / f"found.{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("way", ["locality", "weighted"])
def test_the_gradients_are_the_regular_samplers(trained: Any, way: str) -> None:
    for found in trained:
        assert len(found[way]) == len(found["regular"]) > 5
        for ours, theirs in zip(found[way], found["regular"], strict=True):
            assert theirs.abs().max() > 1e-3
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_without_weights_they_are_not(trained: Any) -> None:
    found = trained[0]
    assert (found["unweighted"][0] - found["regular"][0]).abs().max() > 1e-4
