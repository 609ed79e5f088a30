"""`hpcstage.torch.Elastic` on hosts with networks of their own: a cut between two that both reach the store."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from conftest import wait_for

pytest.importorskip("torch")

from benchmarks.stretching.hosts import KEPT, Hosts
from benchmarks.stretching.networks import has_networks

START_S = 180.0
"""On a busy machine three trainings begin as late."""
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.skipif(not has_networks(), reason="needs root and ip to make a network"),
]


def test_a_cut_that_is_over_leaves_nobody_out(tmp_path: Path) -> None:
    """It is shorter than the lease. After 3.2 s the kernel has sent for the fifth time what it has no answer for, and
    waits for as long again: when the lease is over the connection still looks cut."""
    made = Hosts(KEPT, "abc", tmp_path, apart=True, conf="lease_s=5")
    try:
        assert made.wait_for_steps("abc", time.time(), START_S), made.said()
        before = made.generations()
        for sender, receiver in ("bc", "cb"):
            made.cut(sender, receiver)
        threading.Event().wait(3.2)
        mended = max(made.mend(sender, receiver) for sender, receiver in ("bc", "cb"))
        assert made.wait_for_steps("abc", mended, 300), made.said()
        threading.Event().wait(1.5)  # in which it could be told of the cut
        assert made.generations() == before
    finally:
        made.end()
    assert " does not reach " not in made.said()


def test_a_host_that_joins_and_does_not_reach_another_is_left_out(tmp_path: Path) -> None:
    """The group of all three cannot be formed. The process that waits for a connection is replaced."""
    made = Hosts(KEPT, "ab", tmp_path, most=3, apart=True)
    try:
        assert made.wait_for_steps("ab", time.time(), START_S), made.said()
        before = made.generations()
        cut = max(made.cut("c", "b"), made.cut("b", "c"))
        made.start("c")
        wait_for(lambda: made.generations() == before + 2, 300, "a generation with it, and one without")
        assert made.wait_for_steps("ab", max(cut, made.agreed_last()), 300), made.said()
    finally:
        made.end()
    assert " does not reach " in made.said()
