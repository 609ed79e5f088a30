"""The order section: one node's as it is, several nodes' merged; what is noted of it."""

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


def notes(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {note["id"]: note for note in record["notes"]}


def test_one_node() -> None:
    found = record_of(announced())["order"]
    assert (found["provenance"], found["planned"], found["kept_share"]) == ("sampler", "manifest", 1.0)
    assert found["lead"]["median_files"] == 412
    assert found["lead"]["samples"] == [[pytest.approx(1.1), 412, 3.1]], "on the run's time axis"
    assert found["lead"]["host"] == "node0"


def test_several_nodes() -> None:
    late = {**announced()["lead"], "median_files": 7}
    other = announced(kept_share=0.5, announced_opens=30_000, announcements=1, lead=late)
    found = record_of(announced(), other)["order"]
    assert found["kept_share"] == pytest.approx(0.625)
    assert (found["announcements"], found["announced_opens"]) == (3, 40_000)
    assert (found["lead"]["host"], found["lead"]["median_files"]) == ("node1", 7)


@pytest.mark.parametrize("order", [{}, {"provenance": "manifest", "ids": None}])
def test_what_is_not_known_is_null(order: dict[str, Any]) -> None:
    found = record_of(order)["order"]
    assert found["kept_share"] is None
    assert found["lead"] is None
    assert found["announcements"] is None
    assert found["tables"] == []


def test_an_order_that_was_not_kept_is_noted() -> None:
    note = notes(record_of(announced(kept_share=0.04)))["order-not-kept"]
    assert note["severity"] == "warning"
    assert "only 4 % of the opens" in note["text"]
    assert "hpcstage.order" in note["remedy"]


def test_a_table_that_was_wrong_is_noted() -> None:
    wrong = [{"key": 1, "source": "wrong", "samples": 32, "judged": 0, "agreed": 0}]
    note = notes(record_of(announced(kept_share=0.04, tables=wrong)))["order-not-kept"]
    assert "attributes" in note["text"]
    assert "trace" in note["remedy"]


@pytest.mark.parametrize(
    "order",
    [
        announced(),
        announced(kept_share=0.1, followed=False),
        announced(kept_share=0.1, announced_opens=20),
        announced(kept_share=None),
        announced(kept_share=0.7, near_share=0.99),
        {},
    ],
)
def test_nothing_is_noted_without_cause(order: dict[str, Any]) -> None:
    assert "order-not-kept" not in notes(record_of(order))


def test_the_start_of_the_run_is_where_times_count_from() -> None:
    node = node_part(order=announced(), started_unix_s=START + 5)
    assert composed(run_part(), [node])["order"]["lead"]["samples"][0][0] == pytest.approx(6.0)
