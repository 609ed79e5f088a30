"""Owns the fixture of tests with agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from agentlab import Agents


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path)
    yield made
    print(made.end())  # shown if the test fails, as is the rest
    for name in made.pids:
        print(name, *made.log(name), sep="\n")
    print(*made.generations(), sep="\n")
