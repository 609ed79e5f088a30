"""`hpcstage.torch.Elastic` on hosts with networks of their own: a cut between two that both reach the store."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from benchmarks.stretching.hosts import KEPT, Hosts, has_networks

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not has_networks(), reason="needs root and ip to make a network"),
]


@pytest.mark.parametrize("directions", [1, 2])
def test_of_two_hosts_that_do_not_reach_each_other_one_is_left_out(tmp_path: Path, directions: int) -> None:
    """The store's host hears both, so none is silent."""
    made = Hosts(KEPT, "abc", tmp_path, apart=True)
    try:
        assert made.wait_for_steps("abc", time.time(), 90), made.said()
        before, stays = made.generations(), min("bc", key=made.ranks().index)
        cut = made.cut("b", "c")
        if directions == 2:
            cut = made.cut("c", "b")
        assert made.wait_for_steps(f"a{stays}", cut, 60), made.said()
        assert made.generations() == before + 1
    finally:
        made.end()
    assert " does not reach " in made.said()
