"""Nodes with disks of their own, for tests of several modules."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakecluster import FakeCluster


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    """Three nodes, whose disks are on another file system than the data."""
    with tempfile.TemporaryDirectory(prefix="test-hpcstage-", dir="/dev/shm") as base:
        made = FakeCluster(Path(base), 3)
        yield made
        assert not made.left()
