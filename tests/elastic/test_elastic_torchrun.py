"""`torchrun --rdzv-backend hpcstage` itself: a frozen process, a lost host, and then an end as if nothing had been."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("torch")

from benchmarks.stretching.hosts import OURS, Hosts

pytestmark = [pytest.mark.torch, pytest.mark.slow]


def test_a_frozen_process_and_the_loss_of_the_endpoint_s_host(tmp_path: Path) -> None:
    made = Hosts(OURS, "abc", tmp_path)
    try:
        assert made.wait_for_steps("abc", time.time(), 300), made.said()
        (worker,) = psutil.Process(made.agents["c"].pid).children()
        frozen_s = time.time()
        os.kill(worker.pid, signal.SIGSTOP)
        assert made.wait_for_steps("abc", frozen_s + 1, 300), made.said()
        assert not worker.is_running()
        assert made.wait_for_steps("bc", made.strike("a", signal.SIGKILL), 300), made.said()
        (tmp_path / "stop").touch()
        assert [made.agents[name].wait(60) for name in "bc"] == [0, 0], made.said()
        said = made.said()
    finally:
        made.end()
    assert f"elastic: c: process {worker.pid} (" in said
    assert "has taken the store over from a" in said
    assert "lost a" in said
