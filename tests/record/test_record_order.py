"""The order section: one node's as it is, several nodes' merged."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from recordcases import START, announced, composed, node_part, run_part

from hpcstage.record.schema import json_schema

SCHEMA = json_schema()


def record_of(*orders: dict[str, Any]) -> dict[str, Any]:
    nodes = [node_part(host=f"node{n}", order=order) for n, order in enumerate(orders)]
    record = composed(run_part(nodes=[node.host for node in nodes]), nodes)
    jsonschema.validate(record, SCHEMA)
    return record


def test_one_node() -> None:
    found = record_of(announced())["order"]
    assert (found["provenance"], found["planned"]) == ("sampler", "manifest")
    assert found["lead"]["median_files"] == 412
    assert found["lead"]["samples"] == [[pytest.approx(1.1), 412, 3.1]], "on the run's time axis"
    assert found["lead"]["host"] == "node0"


def test_several_nodes() -> None:
    late = {**announced()["lead"], "median_files": 7}
    other = announced(announced_files=30_000, announcements=1, lead=late)
    found = record_of(announced(), other)["order"]
    assert (found["announcements"], found["announced_files"]) == (3, 50_000)
    assert (found["lead"]["host"], found["lead"]["median_files"]) == ("node1", 7)


@pytest.mark.parametrize("order", [{}, {"provenance": "manifest", "ids": None}])
def test_what_is_not_known_is_null(order: dict[str, Any]) -> None:
    found = record_of(order)["order"]
    assert found["lead"] is None
    assert found["announcements"] is None


def test_the_start_of_the_run_is_where_times_count_from() -> None:
    node = node_part(order=announced(), started_unix_s=START + 5)
    assert composed(run_part(), [node])["order"]["lead"]["samples"][0][0] == pytest.approx(6.0)
