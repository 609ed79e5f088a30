"""Decides, among the agents of a job, what is saved, protected, drained and dropped, and when. Pure: it has no clock.

Owns the report of one node, and who is the coordinator: the lowest node that is there. It gives one order at a time in
each lane, which all nodes that are there carry out before the next one is given, and puts what it decided into each;
when the membership changes, whoever is lowest then goes on from the newest order that anybody knows. An order that was
interrupted is not finished: a generation that not all have committed is none, and the next one has another number.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpcstage.checkpoint.job.coordinator import Coordinator, CouncilTerms
from hpcstage.checkpoint.job.ledger import (
    CommandEnding,
    EntryState,
    FoundStore,
    JobLedger,
    JobOrder,
    NodeReport,
    OrderKind,
    OrderLane,
    Outcome,
)


@dataclass(frozen=True)
class Say:
    """The report is to be told to some nodes: by the coordinator to all that are there, by the others to it alone."""

    report: NodeReport
    to: frozenset[int]


@dataclass(frozen=True)
class Do:
    """An order is to be carried out, and `did` to be called with the outcome."""

    order: JobOrder


Act = Say | Do


class Council:
    """The part that one node has in the decisions."""

    def __init__(self, me: int, hosts: Sequence[str], terms: CouncilTerms, domain: str = "") -> None:
        self._me = me
        self._coordinator = Coordinator(me, hosts, terms)
        self._own = NodeReport(domain=domain)
        self._is_dirty = False
        self._heard: dict[int, NodeReport] = {}
        self._present: frozenset[int] = frozenset()
        self._doing: dict[OrderLane, tuple[int, int]] = {}
        self._acts: list[Act] = []
        self.is_over = False
        """Whether this node has carried out the last order."""

    # ---- what happens

    def membership(self, view: int, present: Collection[int]) -> None:
        """Takes the nodes that are there; none: this node is not connected."""
        there = frozenset(present) if self._me in present else frozenset()
        if (view, there) != (self._own.view, self._present):
            orders = self._own.orders
            placing = {k: key for k, key in self._doing.items() if orders[k].kind is OrderKind.PLACE}
            self._present, self._doing, self._is_dirty = there, placing, True
            self._tell(view=view)

    def heard(self, node: int, report: NodeReport) -> None:
        """Takes the report of another node."""
        self._heard[node] = report

    def see(self, entries: Mapping[str, EntryState], removed: Sequence[str] = (), *, is_gone: bool = False) -> None:
        """Takes the entries of this node's directory."""
        self._tell(entries=dict(entries), removed=tuple(removed), is_gone=is_gone)

    def find(self, found: Sequence[FoundStore], target_ns: int) -> None:
        """Takes what earlier runs left on this node, and when the state in the target was made."""
        self._tell(found=tuple(found), target_ns=target_ns)

    def ready(self) -> None:
        """Notes that the program may use the directory of this node."""
        self._tell(is_ready=True)

    def end(self, *, is_orderly: bool) -> None:
        """Notes that the program has ended."""
        self._tell(ending=CommandEnding.ORDERLY if is_orderly else CommandEnding.DISORDERLY)

    def hurry(self) -> None:
        """Notes that the job's time ends: all that is saved is drained at once."""
        self._tell(hurries=True)

    def did(self, outcome: Outcome) -> None:
        """Takes the outcome of an order; that of one that does not count any more is ignored."""
        lane = next((lane for lane, key in self._doing.items() if key == outcome.key), None)
        if lane is not None:
            del self._doing[lane]
            self._tell(outcomes={**self._own.outcomes, lane: outcome})
            self.is_over = self._own.orders[lane].kind in (OrderKind.FINISH, OrderKind.REFUSE)

    # ---- what follows from it

    def take(self, now: float) -> list[Act]:
        """Returns what is to be done, in its order."""
        self._lead(now)
        self._follow()
        if self._is_dirty:
            self._is_dirty = False
            to = self._present - {self._me} if self._leads else frozenset(sorted(self._present)[:1])
            self._acts.insert(0, Say(self._own, to))
        acts, self._acts = self._acts, []
        return acts

    def wake_at(self) -> float | None:
        """Returns the time at which there is something to do though nothing happens; None for never."""
        return self._coordinator.wake_at() if self._leads else None

    @property
    def present(self) -> frozenset[int]:
        """The nodes that are there; none while this node is not connected."""
        return self._present

    @property
    def ledger(self) -> JobLedger:
        """The newest ledger that this node knows."""
        if self._leads and self._coordinator.has_taken_over(self._own.view):
            return self._coordinator.ledger
        newest = max(self._own.orders.values(), key=lambda one: one.key, default=None)
        return JobLedger() if newest is None else newest.ledger

    @property
    def are_all_over(self) -> bool:
        """Whether all nodes that are there have carried out the last order, as far as the coordinator knows."""
        order = self._own.orders.get(OrderLane.LOCAL)
        outcomes = [report and report.outcomes.get(OrderLane.LOCAL) for report in map(self._of, self._present)]
        return order is not None and all(one and one.key == order.key for one in outcomes)

    @property
    def _leads(self) -> bool:
        return bool(self._present) and self._me == min(self._present)

    def _of(self, node: int) -> NodeReport | None:
        return self._own if node == self._me else self._heard.get(node)

    def _tell(self, **news: Any) -> None:  # noqa: ANN401  a NodeReport's fields
        changed = replace(self._own, **news)
        if changed != self._own:
            self._own, self._is_dirty = changed, True

    def _follow(self) -> None:
        """Begins to carry out the coordinator's orders that are new."""
        report = self._of(min(self._present)) if self._present else None
        for lane, order in () if report is None else report.orders.items():
            if order.view == self._own.view and order.by == min(self._present) and order.kind is not OrderKind.PLACE:
                done = self._own.outcomes.get(lane)
                if order.key != self._doing.get(lane) and (done is None or order.key > done.key):
                    self._begin(order)

    def _lead(self, now: float) -> None:
        """Gives the next orders, if this node is the coordinator and knows what all others say for this membership."""
        leader = self._coordinator
        if not self._leads:
            return
        reports = {
            node: report for node in self._present if (report := self._of(node)) and report.view == self._own.view
        }
        if len(reports) < len(self._present):
            return
        for order in leader.lead(self._own.view, reports, now):
            self._begin(order)

    def _begin(self, order: JobOrder) -> None:
        lane = order.kind.lane
        self._doing[lane] = order.key
        self._tell(orders={**self._own.orders, lane: order})
        self._acts.append(Do(order))
