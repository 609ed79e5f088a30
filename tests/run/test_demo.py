"""The demonstration runs on a fresh machine and says the truth about what it compared."""

from __future__ import annotations

import importlib.util

import pytest
from conftest import Hpcstage


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
