"""The demonstration runs on a fresh machine and says the truth about what it compared."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from conftest import Hpcstage

from hpcstage import demo
from hpcstage.errors import HpcstageError


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_the_demo(hpcstage: Hpcstage) -> None:
    done = hpcstage("demo", "--files", "60", timeout_s=200)
    text = done.stdout.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert "identical in all three modes" in text
    for mode in ("direct", "upfront", "runtime"):
        assert mode in text


@pytest.mark.parametrize("file_s", [-1.0, 0.0, 0.004, 0.5, 30.0])
def test_the_rate_is_one_that_can_be_shown_and_waited_for(file_s: float) -> None:
    rate = demo.rate_of(file_s)
    assert f"{rate / 1e6:.0f}" != "0"
    assert 500 * demo.FILE_BYTES / rate < demo.RUN_LIMIT_S / 2


def test_a_run_that_takes_too_long_cleans_up_and_is_said_in_one_line(
    hpcstage: Hpcstage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "RUN_LIMIT_S", 0.5)
    ended = tmp_path / "ended"
    with pytest.raises(HpcstageError, match="the run took longer than"):
        demo.finished(["sh", "-c", f"trap 'touch {ended}; exit 0' TERM; while :; do sleep 0.05; done"], "the run")
    assert ended.exists()
    with pytest.raises(HpcstageError, match="the run failed: why"):
        demo.finished(["sh", "-c", "echo why >&2; exit 3"], "the run")
