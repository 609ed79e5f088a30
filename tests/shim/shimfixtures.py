"""Fixtures of the shim's tests, as a plugin that each test module names."""

from __future__ import annotations

from pathlib import Path

import pytest
from shimlab import LAYERS, Lab, require


@pytest.fixture(params=LAYERS)
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Lab:
    """A node for each layer, the shim not installed yet."""
    require(request.param)
    return Lab(tmp_path, request.param)


@pytest.fixture
def native_lab(tmp_path: Path) -> Lab:
    """A node for the native layer."""
    require("native")
    return Lab(tmp_path, "native")


@pytest.fixture
def python_lab(tmp_path: Path) -> Lab:
    """A node for the python layer."""
    return Lab(tmp_path, "python")
