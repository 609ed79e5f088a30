"""When the first node announces its manifest to the others, which read the decision of mode auto from its plan."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hpcstage.daemon.process.helpers import Helpers
from hpcstage.daemon.reading.scanning import PLAN_HELPER, publish_plan
from hpcstage.plan.types import Budget


def publish(helpers: Helpers, told: list[str], scanned: object = "scanned") -> None:
    """Publishes with as much of a daemon as decides when to announce."""
    base: Any = SimpleNamespace(
        spec=SimpleNamespace(node_index=0, mode="auto", node_dir="/nonexistent"), helpers=helpers
    )
    prepared: Any = SimpleNamespace(scanned=scanned, mode="runtime")
    publish_plan(base, prepared, Budget(1 << 30, 1000), lambda: told.append("announced"))


@pytest.fixture
def helpers():
    made = Helpers()
    yield made
    made.close()


def test_the_others_do_not_wait_for_a_helper_that_cannot_be_started(helpers: Helpers) -> None:
    told: list[str] = []
    assert helpers.start(PLAN_HELPER, lambda: b"", lambda _: None) is not None
    publish(helpers, told)  # a helper of this name runs: no other is started
    assert told == ["announced"]


def test_nor_where_the_manifest_came_from_another_node(helpers: Helpers) -> None:
    told: list[str] = []
    publish(helpers, told, scanned=None)
    assert told == ["announced"]


def test_in_mode_auto_they_wait_for_the_plan_even_if_it_cannot_be_written(helpers: Helpers) -> None:
    told: list[str] = []
    publish(helpers, told)
    assert told == []
    assert helpers.wait(PLAN_HELPER, 30.0)
    assert told == ["announced"]
