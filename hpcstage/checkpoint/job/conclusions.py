"""Concludes the orders of a job: owns what the ledger says after an order, by the outcomes on all nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpcstage.checkpoint.job.ledger import JobGeneration, JobLedger, JobOrder, NodeReport, Outcome
from hpcstage.checkpoint.job.place import ALONE, LOCAL_KEPT, MOST_ROWS
from hpcstage.checkpoint.protection.groups import ProtectionPlan
from hpcstage.jsonform import read
from hpcstage.record.parts.checkpoints import GenerationRow

Outcomes = Mapping[str, Outcome]
"""The outcomes of an order, by host."""


def first_failure(outcomes: Outcomes, *, with_soon: bool = True) -> tuple[str, Outcome] | None:
    """Returns the first host on which an order failed; `with_soon`: also if it is to be tried again soon."""
    failed = ((host, one) for host, one in sorted(outcomes.items()) if one.error and (with_soon or not one.is_soon))
    return next(failed, None)


def on(host: str) -> str:
    """Says where something failed; nothing of a job on one node."""
    return "" if host == ALONE else f" (on {host})"


def _with_line(ledger: JobLedger, line: str) -> JobLedger:
    return replace(ledger, lines=(*ledger.lines, line))


# ---- the start


def after_begin(ledger: JobLedger, order: JobOrder, outcomes: Outcomes, first: str) -> JobLedger:
    """Notes that a state lies in all directories; what is said of it the host `first` knows."""
    facts = [one.facts for one in outcomes.values()]
    said = outcomes[first].facts
    is_drained = order.body["state"] is None or all(one["is_drained"] for one in facts)
    return replace(
        ledger,
        is_begun=True,
        restored=said["restored"],
        is_unsaved=not is_drained,
        seen=tuple(sorted({name for one in facts for name in one["seen"]})),
        next_number=max(ledger.next_number, *(one["floor"] + 1 for one in facts)),
        after_ns=max(ledger.after_ns, *(one["after_ns"] for one in facts)),
        lines=(*ledger.lines, *said["lines"]),
    )


def after_failed_begin(ledger: JobLedger, keys: Sequence[str], line: str) -> JobLedger:
    """Notes the states that cannot be had."""
    return _with_line(replace(ledger, failed=(*ledger.failed, *keys)), line)


# ---- a generation


def after_save(
    ledger: JobLedger, order: JobOrder, outcomes: Outcomes, reports: Mapping[str, NodeReport], plan: ProtectionPlan
) -> JobLedger:
    """Notes a generation that all nodes have committed."""
    facts = {host: one.facts for host, one in outcomes.items()}
    made = replace(
        read(JobGeneration, order.body["generation"]),
        created_ns=max(one["created_ns"] for one in facts.values()),
        needs=tuple(sorted({need for one in facts.values() for need in one["needs"]})),
        state_bytes=sum(one["state_bytes"] for one in facts.values()),
    )
    if not ledger.is_unsaved and not ledger.generations:  # the target has the state at the start
        ledger = replace(ledger, drained_marks=_marks_of_put(made, reports))
    return replace(
        ledger,
        generations=(*ledger.generations, made),
        next_number=made.number + 1,
        after_ns=made.created_ns,
        is_last_whole=True,
        is_unsaved=False,
        since_drain=ledger.since_drain + 1,
        saved_count=ledger.saved_count + 1,
        rows=(*ledger.rows, _row(made, facts))[-MOST_ROWS:],
        plan=described(plan),
    )


def after_no_room(ledger: JobLedger) -> JobLedger | None:
    """Returns the ledger without the generations that can give way to a newer one; None if there are none."""
    last = ledger.last
    if last is None or (not last.size and any(one.size for one in ledger.generations)):
        return None
    stay = tuple(one for one in ledger.generations if one.number in last.numbers)
    return replace(ledger, generations=stay) if len(stay) < len(ledger.generations) else None


def after_failed_save(
    ledger: JobLedger, order: JobOrder, outcomes: Outcomes, failure: tuple[str, Outcome] | None
) -> JobLedger:
    """Notes that a number is spent, and a failure that is not about to pass. What no node has saved leaves the
    generation before the newest of all."""
    is_none = all(one.error for one in outcomes.values())
    number = int(order.body["generation"]["number"])
    spent = replace(ledger, next_number=number + 1, is_last_whole=ledger.is_last_whole and is_none)
    if failure is None:
        return spent
    what = f"a state could not be saved on {failure[0].replace(ALONE, 'the local disk')}, and was copied as it is: "
    others = tuple(line for line in spent.lines if not line.startswith(what))
    return replace(spent, lines=(*others, f"{what}{failure[1].error}"))


def _marks_of_put(made: JobGeneration, reports: Mapping[str, NodeReport]) -> dict[str, dict[str, str]]:
    """Returns the marks of what came from the target at the start: it has that already."""
    found = {name: made.marks(name) for name in made.names}
    return {
        name: marks
        for name, marks in found.items()
        if marks and all(name in reports[host].entries and reports[host].entries[name].is_restored for host in marks)
    }


def _row(made: JobGeneration, facts: Mapping[str, Mapping[str, Any]]) -> GenerationRow:
    largest = max(facts.values(), key=lambda one: int(one["state_bytes"]))
    kinds = sorted({str(one["kind"]) for one in facts.values() if one["state_bytes"]} or {str(largest["kind"])})
    return GenerationRow(
        number=made.number,
        kind=kinds[0] if len(kinds) == 1 else str(largest["kind"]),
        why=str(largest["why"]),
        state_bytes=made.state_bytes,
        written_bytes=sum(int(one["written_bytes"]) for one in facts.values()),
        took_s=max(float(one["took_s"]) for one in facts.values()),
    )


# ---- protection


def after_protect(ledger: JobLedger, order: JobOrder, outcomes: Outcomes, plan: ProtectionPlan) -> JobLedger:
    """Notes that the newest generation is protected, or why it is not."""
    failure, row = first_failure(outcomes), ledger.rows[-1]
    if failure is not None:
        why = f"not protected: {failure[1].error} (on {failure[0]})"
        noted = replace(ledger, rows=(*ledger.rows[:-1], replace(row, protected=why)))
        return _with_line(noted, f"state {order.body['number']} is {why}")
    size = f"{order.body['k']}+{order.body['m']}"
    seconds = max(float(one.facts.get("seconds", 0.0)) for one in outcomes.values())
    return replace(
        ledger,
        generations=(*ledger.generations[:-1], replace(ledger.generations[-1], size=size)),
        rows=(*ledger.rows[:-1], replace(row, protected=size, encode_s=round(seconds, 6))),
        plan=described(plan),
    )


def described(plan: ProtectionPlan) -> str:
    """Says how the nodes protect each other, for people."""
    if plan.size is None:
        return plan.line or "one node has no other that could keep parities"
    count = len(plan.groups)
    groups = "one group" if count == 1 else f"{count} groups"
    more = f"; {plan.line}" if plan.line else ""
    return f"{plan.size}: any {plan.size.m} of the nodes of a group may be lost, {groups}{more}"


def after_drop(ledger: JobLedger) -> JobLedger:
    """Notes which generations stay on the local disks: the two newest, and older ones that have entries of theirs.

    As long as no newer one is protected or in the target, the newest that is protected stays in the place of the last
    but one, so that it takes no more space.
    """
    generations = ledger.generations
    newest = generations[-LOCAL_KEPT:]
    safe = next((one for one in reversed(generations) if one.size), None)
    if safe is not None and safe not in newest and ledger.drained < safe.number:
        newest = (safe, *generations[1 - LOCAL_KEPT :])
        line = (
            f"state {safe.number} stays on the local disks, in the place of the last but one, until a newer one is "
            "protected or copied"
        )
        ledger = ledger if line in ledger.lines else _with_line(ledger, line)
    kept = {number for one in newest for number in one.numbers}
    return replace(ledger, generations=tuple(one for one in generations if one.number in kept))


# ---- the target


def after_failed_publish(ledger: JobLedger, failure: tuple[str, Outcome]) -> JobLedger:
    """Notes why the newest generation is not in the target."""
    return replace(ledger, undrained_why=f"{failure[1].error}{on(failure[0])}")


def after_place(ledger: JobLedger, order: JobOrder, outcome: Outcome) -> JobLedger:
    """Notes that what was brought has its names in the target, or why it has not."""
    if outcome.error:
        return replace(ledger, undrained_why=outcome.error)
    facts = outcome.facts
    done = replace(
        ledger,
        undrained_why="",
        beside={**ledger.beside, **facts["beside"]},
        size_bytes=ledger.size_bytes + facts["size_bytes"],
        lines=(*ledger.lines, *(line for line in facts["lines"] if line not in ledger.lines)),
    )
    if "generation" not in order.body:
        return replace(done, copied=tuple(order.body["copied"]))
    placed, gone = read(JobGeneration, order.body["generation"]), tuple(facts["gone"])
    marks = {name: placed.marks(name) for name in placed.names.difference(gone)}
    since = ledger.since_drain - order.body["since"]
    return replace(done, drained=placed.number, drained_marks=marks, gone=gone, since_drain=since)
