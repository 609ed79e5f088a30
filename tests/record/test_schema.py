"""The record's form: its schema is made from its dataclasses, and records of other versions are read."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from manycases import job, run
from recordcases import announced, composed, node_part, run_part

from hpcstage.record.parts.part import DatasetPart
from hpcstage.record.schema import Record

RECORDS = {
    "one node": lambda: composed(run_part(), [node_part(order=announced(), errors=[{"path": "p", "error": "e"}])]),
    "no node": lambda: composed(run_part(), []),
    "nodes": lambda: composed(run(4), [*job(3, 40)]),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_reading_and_writing_changes_nothing(kind: str) -> None:
    record = json.loads(json.dumps(RECORDS[kind]()))
    assert json.dumps(Record.from_json(record).to_json()) == json.dumps(record)


def test_no_part_of_a_record_can_be_changed() -> None:
    frozen = Record.from_json(RECORDS["nodes"]())
    found: list[Any] = [frozen]
    while found:
        value = found.pop()
        if isinstance(value, tuple):
            found += value
        elif is_dataclass(value) and not isinstance(value, DatasetPart):
            assert value.__dataclass_params__.frozen  # type: ignore[attr-defined]
            found += [getattr(value, part.name) for part in fields(value)]
        assert not isinstance(value, list)


def test_what_a_later_version_adds_is_dropped() -> None:
    record = RECORDS["one node"]()
    assert Record.from_json({**record, "new": 1, "run": {**record["run"], "new": {}}}).to_json() == record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"notes": None}, "a part has another form: None"),
        ({"totals": []}, r"RunTotals has another form: \[\]"),
        ({"run": {}}, "RunSection has no id"),
        ({"notes": [{"id": "x", "severity": "great", "text": "", "remedy": ""}]}, "'great' is not a valid Severity"),
    ],
)
def test_another_form_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Record.from_json(RECORDS["one node"]() | change)
