"""Each note: a run in which its cause is present has it, the same run without the cause has not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import manycases
import pytest
from recordcases import SECOND, blocked, composed, node_part, run_part, trainer, worker

from hpcstage.problem import Problem
from hpcstage.record.notes import RULES
from hpcstage.record.parts.alive import Life
from hpcstage.record.parts.rows import ProcessPart, Sample
from hpcstage.record.schema import Record

RecordJson = dict[str, Any]


def one(run: dict[str, Any] | None = None, **changes: Any) -> RecordJson:
    return composed(run_part(**(run or {})), [node_part(**changes)])


def going_on(**changes: Any) -> RecordJson:
    """A run that has not ended."""
    return composed(run_part(exit_code=None), [node_part(complete=False, **changes)], Life(True, "so"))


def reader(**counters: int) -> ProcessPart:
    return ProcessPart(5, 1, "native", {"hit_opens": 100, "reads_measured": 1} | counters)


def many(count: int = 4, run: dict[str, Any] | None = None, **of_last: Any) -> RecordJson:
    nodes = [manycases.node(index, count) for index in range(count - 1)]
    return composed(manycases.run(count, **(run or {})), [*nodes, manycases.node(count - 1, count, **of_last)])


def writing(share: float, length: int = 20) -> list[Sample]:
    write_ns = int(share * 10 * SECOND)
    rest_ns = 10 * SECOND - write_ns
    return [Sample(float(n), 1.0, 10**7, 10, rest_ns // 2, rest_ns // 2, write_ns, 8.0) for n in range(length)]


IDLE = ProcessPart(5, 1, "native", {})


@dataclass(frozen=True)
class Case:
    """A note, and the two runs."""

    note: str
    present: Callable[[], RecordJson]
    absent: Callable[[], RecordJson]
    says: str = ""
    """What its text or remedy must say."""

    def __str__(self) -> str:
        return f"{self.note} {self.says}".strip()


def direct(name: str) -> Callable[[], RecordJson]:
    return lambda: one(processes=[reader(source_opens=50, **{f"direct_{name}": 50})])


def problem(name: str) -> dict[str, Any]:
    return {"problems": [Problem(name, "t", "r")]}


REASONS = ("unknown", "timeout", "local_error")
CASES = [
    Case("killed", lambda: one({"exit_code": None, "child_ended_s": None}), one),
    Case("running", lambda: composed(run_part(exit_code=None), [node_part(complete=False)], Life(True, "so")), one),
    Case("unclear", lambda: composed(run_part(exit_code=None), [node_part(complete=False)], Life(False, "so")), one),
    Case("daemon-died", lambda: one(complete=False), one),
    Case("no-part", lambda: composed(run_part(), []), one),
    Case("not-staged", lambda: one({"aside": True, "exit_code": None, **problem("not-staged")}), one),
    Case("nothing-attached", lambda: one(processes=[]), one),
    Case("nothing-attached", lambda: one(processes=[]), lambda: one({"child_started_s": None}, processes=[])),
    Case("nothing-attached", lambda: one(processes=[]), lambda: one(complete=False, processes=[])),
    Case("nothing-attached", lambda: one(processes=[]), lambda: going_on(processes=[])),
    Case("nothing-opened", lambda: one(processes=[IDLE]), one),
    Case("nothing-opened", lambda: one(processes=[IDLE]), lambda: going_on(processes=[IDLE])),
    Case("nothing-opened", lambda: one(processes=[IDLE]), lambda: one(complete=False, processes=[IDLE])),
    Case(
        "processes-missed",
        lambda: one(missed_count=2, missed_processes=[{"command": "x", "pythonpath": "/my/code"}]),
        one,
    ),
    Case("processes-missed", lambda: one(missed_count=2, missed_processes=[{"command": "x"}]), one),
    Case("shim-off", lambda: one(processes=[ProcessPart(5, 1, "direct", {})]), one),
    Case(
        "uncounted",
        lambda: one(processes=[ProcessPart(0, 0, "uncounted", {}, processes=12)]),
        lambda: one(processes=[ProcessPart(5, 1, "direct", {})]),
        "1024 Python processes",
    ),
    Case("python-layer", lambda: one(processes=[ProcessPart(5, 1, "python", {"hit_opens": 9})]), one),
    *(Case(f"direct-{name.replace('_', '-')}", direct(name), lambda: one(processes=[reader()])) for name in REASONS),
    Case("shim-errors", lambda: one(processes=[reader(errors=3)]), one),
    Case("store-full", lambda: one(budget_bytes=10**8), one, "name a larger disk"),
    Case("disk-full", lambda: one(**problem("disk-full")), one),
    Case("slow-local-disk", lambda: one(samples=writing(0.9)), lambda: one(samples=writing(0.2)), "90 % of their time"),
    Case("dropped", lambda: one(processes=[reader(dropped=3)]), one),
    Case("idle-nodes", lambda: many(processes=[]), many, "node0003"),
    Case("idle-nodes", lambda: many(processes=[]), lambda: one(processes=[])),
    Case(
        "slow-nodes",
        lambda: many(processes=[trainer(loader_wait_ns=40 * SECOND), worker(101, **blocked(80))]),
        many,
    ),
    Case(
        "preprocessing",
        lambda: one(processes=[trainer(loader_wait_ns=50 * SECOND), worker(101, **blocked(3))]),
        lambda: one(processes=[trainer(loader_wait_ns=SECOND), worker(101)]),
    ),
]  # fmt: skip


def notes(record: RecordJson, note: str) -> list[str]:
    return [f"{n['text']} {n['remedy']}" for n in record["notes"] if n["id"] == note]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_note_is_there_with_its_cause_and_not_without(case: Case) -> None:
    told = notes(case.present(), case.note)
    assert len(told) == 1
    assert case.says in told[0]
    assert notes(case.absent(), case.note) == [] or case.says


@pytest.mark.parametrize("case", [case for case in CASES if case.says], ids=str)
def test_another_cause_has_another_remedy(case: Case) -> None:
    assert not any(case.says in told for told in notes(case.absent(), case.note))


def test_a_full_disk_does_not_lead_to_a_larger_budget() -> None:
    from hpcstage.daemon.nodepart import DISK_FULL

    remedy = Problem("disk-full", "the local disk is full", DISK_FULL)
    full = one(problems=[remedy], processes=[reader(source_opens=50, direct_full=50)])
    assert not any("raise --budget" in note["remedy"] for note in full["notes"])


def test_every_rule_is_tried() -> None:
    tried = {case.note for case in CASES}
    records = [Record.from_json(case.present()) for case in CASES]
    for rule in RULES:
        found = {note.id for record in records for note in rule(record)}
        assert found & tried, rule.__name__


def test_a_quiet_good_run_has_no_warnings() -> None:
    done = worker(101, source_opens=0, direct_scanning=0, direct_later=0, wants=0, **blocked(3))
    record = one(processes=[trainer(), done])
    assert [n for n in record["notes"] if n["severity"] != "info"] == []


def test_worst_first() -> None:
    record = one(complete=False, missed_count=2, missed_processes=[{"command": "python -I x.py"}])
    order = [note["severity"] for note in record["notes"]]
    assert order == sorted(order, key=["error", "warning", "info"].index)
    assert record["notes"][0]["id"] == "daemon-died"
    assert notes(record, "processes-missed")
    assert all(note["remedy"] for note in record["notes"])


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/my/code", "export PYTHONPATH=/my/code${PYTHONPATH:+:$PYTHONPATH}"),
        ("", "unsets PYTHONPATH"),
        (None, "-I, -E"),
    ],
)
@pytest.mark.parametrize("attached", [True, False])
def test_the_line_to_change_is_named(attached: bool, path: str | None, said: str) -> None:
    missed = {"command": "x"} | ({} if path is None else {"pythonpath": path})
    more = {} if attached else {"processes": []}
    record = one(missed_count=1, missed_processes=[missed], **more)
    note = next(n for n in record["notes"] if n["id"] == ("processes-missed" if attached else "nothing-attached"))
    assert said in note["remedy"]
    assert ("hpcstage install-hook" in note["remedy"]) == (path is not None)
