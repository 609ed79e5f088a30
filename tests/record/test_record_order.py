"""The order section: one node's as it is, several nodes' merged."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from recordcases import announced, composed, node_part, run_part

from hpcstage.record.schema import json_schema

SCHEMA = json_schema()


def record_of(*orders: dict[str, Any]) -> dict[str, Any]:
    nodes = [node_part(host=f"node{n}", order=order) for n, order in enumerate(orders)]
    record = composed(run_part(nodes=[node.host for node in nodes]), nodes)
    jsonschema.validate(record, SCHEMA)
    return record


def test_one_node() -> None:
    found = record_of(announced())["order"]
    assert found["provenance"] == "sampler"
    assert found["lead"] == announced()["lead"]


def test_several_nodes() -> None:
    late = {**announced()["lead"], "median_files": 7}
    found = record_of(announced(), announced(announcements=1, lead=late))["order"]
    assert found["announcements"] == 3
    assert found["lead"] == late, "that of the node that was least ahead"


@pytest.mark.parametrize("order", [{}, {"provenance": "manifest"}])
def test_what_is_not_known_is_null(order: dict[str, Any]) -> None:
    found = record_of(order)["order"]
    assert found["lead"] is None
    assert found["announcements"] is None
