"""Theorem 1 under real torch.distributed: the gradients of each step are the regular sampler's, balanced or not."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import gradient_ranks  # noqa: E402
from locality_ranks import make_node, run_ranks  # noqa: E402

from hpcstage.torch import weights as weights_module  # noqa: E402
from hpcstage.torch.weights import gradient_weight  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.slow]
WORLD = 4
TOLERANCE = 1e-12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, list[Any]], dict[str, list[int]]]]:
    """Per rank: gradients by way, sizes of local batches by way. Node 0 holds 65 %, node 1 the rest; some both hold."""
    directory = tmp_path_factory.mktemp("gradients")
    names = [f"{n:03}" for n in range(gradient_ranks.SAMPLES)]
    make_node(directory / "node0", names, kept=[n for n in names if int(n) % 20 < 13], due=[])
    make_node(directory / "node1", names, kept=[n for n in names if int(n) % 20 >= 12], due=[])
    run_ranks(Path(gradient_ranks.__file__), directory, WORLD)
    return [torch.load(directory / f"found.{rank}.pt") for rank in range(WORLD)]


@pytest.mark.parametrize("way", ["balanced", "loss", "hook"])
def test_the_gradients_are_the_regular_samplers(trained: Any, way: str) -> None:
    for found, _ in trained:
        assert len(found[way]) == len(found["regular"]) > 5
        for ours, theirs in zip(found[way], found["regular"], strict=True):
            assert theirs.abs().max() > 1e-3
            torch.testing.assert_close(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE)


def test_without_weights_they_are_not(trained: Any) -> None:
    found, _ = trained[0]
    assert (found["unweighted"][0] - found["regular"][0]).abs().max() > 1e-4


def test_local_batches_differ_only_unbalanced(trained: Any) -> None:
    rows = {way: [sizes[way] for _, sizes in trained] for way in ("balanced", "hook")}
    assert all(len(set(step)) == 1 for step in zip(*rows["balanced"], strict=True))
    assert any(len(set(step)) > 1 for step in zip(*rows["hook"], strict=True))


@pytest.mark.parametrize(("local", "whole", "ranks"), [(-1, 4, 2), (5, 4, 2), (0, 0, 2), (1, 4, 0)])
def test_a_weight_that_cannot_be(local: int, whole: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="samples on one of"):
        gradient_weight(local, whole, ranks)


def test_the_examples_run() -> None:
    result = doctest.testmod(weights_module)
    assert result.attempted
    assert not result.failed
