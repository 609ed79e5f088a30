"""Decides which orders the nodes of a job get next, on the node that gives them. Pure: it has no clock.

Owns the order of things: what is saved, protected, published and dropped, and when. It sees the reports of all nodes
that are there, gives one order in each lane, and gives the next when all of them have carried it out (`conclusions`).
What hangs with the target holds up no save.

    lane     at the start       while a program runs       when it has ended on all nodes
    local    begin, ready       save, protect, drop        close, save; then, behind the target: protect, drop, finish
             or refuse
    target                      publish or copy, place     copy or publish, place

A node that goes, or joins, ends all orders but `place`, which one node carries out: whoever is the lowest then goes on
from the newest ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hpcstage.checkpoint.job import conclusions
from hpcstage.checkpoint.job.conclusions import Outcomes, first_failure
from hpcstage.checkpoint.job.families import earlier_states
from hpcstage.checkpoint.job.ledger import (
    NO_ROOM,
    CommandEnding,
    JobGeneration,
    JobLedger,
    JobOrder,
    NodeReport,
    OrderKind,
    OrderLane,
)
from hpcstage.checkpoint.job.naming import (
    arriving,
    half_rewritten,
    is_new,
    lost_writers,
    name_entries,
    with_writers,
)
from hpcstage.checkpoint.job.place import RETRY_S
from hpcstage.checkpoint.protection.groups import CodeSize, ProtectionPlan, protect
from hpcstage.jsonform import read

SOON_S = 0.3
"""A state that changed while it was saved is tried again so much later."""
END_S = 5.0
"""The longest that a state which changes is tried again after the program has ended."""
SETTLE_S = 10.0
"""An entry of which some nodes have new parts and others old ones or none is taken as it is after so long."""
_TARGET = "target"


@dataclass(frozen=True)
class CouncilTerms:
    """The terms of a job's decisions."""

    asked: CodeSize | None = None
    drain_every: int | None = None
    new_attempt: Callable[[], str] = str
    """Returns a random name for an attempt at a generation."""
    is_elastic: bool = False
    """Whether the program is started anew without a node that is lost, and then writes what that would have written."""


class Coordinator:
    """Gives orders, from the moment at which its node takes over."""

    def __init__(self, me: int, hosts: Sequence[str], terms: CouncilTerms) -> None:
        self._me = me
        self._hosts = hosts
        self._terms = terms
        self.ledger = JobLedger()
        self._reports: Mapping[str, NodeReport] = {}
        """The reports of the nodes that are there, by host."""
        self._view = -1
        """The membership for which this node has taken over."""
        self._seq = 0
        self._given: dict[OrderLane, JobOrder] = {}
        """The orders that were given and are not concluded."""
        self._writers: dict[str, tuple[str, ...]] = {}
        self._tried: set[str] = set()
        self._retry_at = self._end_at = self._settles_at = 0.0
        self._half_since: dict[str, float] = {}
        """By entry: since when some nodes have a new part and others an old one, or none."""
        self._copy_due = self._is_done = False

    def has_taken_over(self, view: int) -> bool:
        """Tells whether this node is the coordinator of a membership."""
        return self._view == view

    def wake_at(self) -> float | None:
        """Returns the time at which there is an order to give though nothing happens; None for never."""
        if OrderLane.LOCAL in self._given or self._is_done:
            return None
        return min((at for at in (self._retry_at, self._settles_at) if at), default=None)

    def lead(self, view: int, reports: Mapping[int, NodeReport], now: float) -> list[JobOrder]:
        """Returns the orders that are to be given now. `reports` are those of all nodes that are there."""
        self._reports = {self._hosts[node]: reports[node] for node in sorted(reports)}
        if self._view != view:
            self._take_over(view, now)
        self._writers = with_writers((self.ledger.writers, self._writers), self._reports)
        before = dict(self._given)
        for lane, order in before.items():
            doing = [self._hosts[self._me]] if order.kind is OrderKind.PLACE else list(self._reports)
            found = {host: self._reports[host].outcomes.get(lane) for host in doing}
            outcomes = {host: one for host, one in found.items() if one and one.key == order.key}
            if len(outcomes) == len(doing):
                del self._given[lane]
                self._conclude(order, outcomes, now)
        if not self._is_done:
            self._next(now)
        return [order for order in self._given.values() if order not in before.values()]

    def _take_over(self, view: int, now: float) -> None:
        """Goes on from the newest order that a node knows. Giving names goes on: this node does that alone."""
        own = self._reports[self._hosts[self._me]].orders
        placing = {k: v for k, v in self._given.items() if v.kind is OrderKind.PLACE and own.get(k) == v}
        self._view, self._given, self._tried, self._retry_at = view, placing, set(), 0.0
        self._end_at = now + END_S
        orders = sorted(
            (one for report in self._reports.values() for one in report.orders.values()), key=lambda one: one.key
        )
        if not orders:
            return
        newest = orders[-1]
        self._seq = max(self._seq, newest.seq)
        if newest.by != self._me or newest.ledger.saved_count > self.ledger.saved_count:
            self.ledger = newest.ledger
        numbers = [one.body["generation"]["number"] for one in orders if one.kind is OrderKind.SAVE]
        if numbers and max(numbers) >= self.ledger.next_number:
            self.ledger = replace(self.ledger, next_number=max(numbers) + 1, is_last_whole=False)

    def _give(self, kind: OrderKind, **body: Any) -> None:  # noqa: ANN401  what JSON takes
        self._seq += 1
        self._given[kind.lane] = JobOrder(self._seq, self._me, self._view, kind, body, self.ledger)

    def _next(self, now: float) -> None:
        """Gives the next orders, if there are some to give."""
        reports = self._reports.values()
        is_local_free = OrderLane.LOCAL not in self._given
        is_target_free = OrderLane.TARGET not in self._given
        if not self.ledger.is_begun or not all(report.is_ready for report in reports):
            if is_local_free:
                self._begin()
        elif any(report.ending is CommandEnding.NOT for report in reports):
            is_due = any(report.hurries for report in reports)
            if is_local_free:
                _ = self._protect() or self._drop() or self._save(now)
            if is_target_free:
                _ = self._publish(is_due=is_due) or self._copy(now)
        elif is_local_free and not (self._close() or self._save(now) or now < self._retry_at <= self._end_at):
            is_busy = not is_target_free or self._copy(now) or self._publish(is_due=True)
            _ = is_busy or self._protect(is_ending=True) or self._drop() or self._finish()

    def _conclude(self, order: JobOrder, outcomes: Outcomes, now: float) -> None:
        if order.kind is OrderKind.BEGIN:
            self._after_begin(order, outcomes)
        elif order.kind is OrderKind.SAVE:
            self._after_save(order, outcomes, now)
        elif order.kind is OrderKind.PROTECT:
            self.ledger = conclusions.after_protect(self.ledger, order, outcomes, self._plan())
        elif order.kind in (OrderKind.PUBLISH, OrderKind.COPY):
            self._after_publish(order, outcomes)
        elif order.kind is OrderKind.PLACE:
            self.ledger = conclusions.after_place(self.ledger, order, outcomes[self._hosts[self._me]])
        elif order.kind is OrderKind.CLOSE:
            self.ledger = replace(self.ledger, is_closed=True, is_orderly=bool(order.body["is_orderly"]))
            self._retry_at, self._end_at = 0.0, now + END_S
            self._tried.clear()  # what failed while the program ran is tried once more
        elif order.kind in (OrderKind.FINISH, OrderKind.REFUSE):
            self._is_done = True

    # ---- the start

    def _begin(self) -> None:
        """Chooses the state that is put into all directories: the newest of which nothing says that it cannot be."""
        reports = self._reports
        if len(reports) < len(self._hosts) or any(report.found is None for report in reports.values()):
            return
        if self.ledger.is_begun:
            self._give(OrderKind.READY)
            return
        found = {self._hosts.index(host): report.found or () for host, report in reports.items()}
        target_ns = reports[self._hosts[self._me]].target_ns
        is_alone = len(self._hosts) == 1
        for state in earlier_states(found, with_completed=is_alone):
            # What the target has, too, one node takes from there: somebody may have changed it. For many that is slow.
            if state.time_ns < target_ns or (is_alone and state.time_ns == target_ns and not state.completed):
                break
            if state.key not in self.ledger.failed:
                self._give(OrderKind.BEGIN, key=state.key, state=asdict(state))
                return
        if _TARGET in self.ledger.failed:
            self._give(OrderKind.REFUSE, why=self.ledger.lines[-1])
        else:
            self._give(OrderKind.BEGIN, key=_TARGET, state=None)

    def _after_begin(self, order: JobOrder, outcomes: Outcomes) -> None:
        failure = first_failure(outcomes)
        if failure is None:
            self.ledger = conclusions.after_begin(self.ledger, order, outcomes, self._hosts[self._me])
            return
        host, outcome = failure
        key, is_refused = order.body["key"], outcome.facts.get("refuses")
        line = outcome.error if is_refused or key == _TARGET else f"{outcome.error}{conclusions.on(host)}"
        keys = (key, _TARGET) if is_refused else (key,)
        self.ledger = conclusions.after_failed_begin(self.ledger, keys, line)
        if is_refused:
            self._give(OrderKind.REFUSE, why=line)

    # ---- a generation

    def _save(self, now: float) -> bool:
        held, last = self._held(now), self.ledger.last
        if now < self._retry_at:
            return False
        self._retry_at = 0.0
        if self._lost_writers():
            return False
        if last is None and not self.ledger.is_closed and held & half_rewritten(self._reports, None):
            return False  # no generation could stand for what is held
        named = name_entries(self._reports, self.ledger.generations, held, self.ledger.next_number)
        if not self._is_wanted(named):
            return False
        self.ledger = replace(self.ledger, writers=self._writers)
        made = asdict(replace(named, attempt=self._terms.new_attempt()))
        self._give(OrderKind.SAVE, generation=made, after_ns=self.ledger.after_ns, full_why=self._full_why(last))
        return True

    def _lost_writers(self) -> list[str]:
        """Returns the lost nodes whose parts the state of now lacks: it is none, and the last whole one stays."""
        if self._terms.is_elastic:
            return []
        return sorted(lost_writers(self._reports, self.ledger.last, self._writers, self._hosts))

    def _full_why(self, last: JobGeneration | None) -> str:
        """Returns why the next generation cannot build on the one before; empty if it can."""
        if last is None:
            return "it is the first of this run"
        if not self._is_of_present(last):
            return "the nodes are not those of the generation before"
        if not self.ledger.is_last_whole:
            return "a try before was not saved by all nodes"
        if not last.size and self._plan().size is not None:
            return "the generation before is not protected"
        return ""

    def _held(self, now: float) -> frozenset[str]:
        """Returns the entries of which some nodes have new parts and others old ones or none, as long as those of the
        others may still come. After an orderly end all is as the program left it; after another one they do not
        come."""
        half = half_rewritten(self._reports, self.ledger.last) | arriving(self._reports, self.ledger.last)
        self._half_since = {name: self._half_since.get(name, now) for name in half}
        ledger, self._settles_at = self.ledger, 0.0
        if ledger.last is None and ledger.is_unsaved:
            return frozenset()
        if ledger.is_closed:
            return frozenset() if ledger.is_orderly else half
        held = {name: since + SETTLE_S for name, since in self._half_since.items() if now < since + SETTLE_S}
        self._settles_at = min(held.values(), default=0.0)
        return frozenset(held)

    def _is_wanted(self, named: JobGeneration) -> bool:
        """Tells whether there is something to save that no generation has."""
        last = self.ledger.last
        if not named.own:
            return False
        if last is not None:
            return not self._is_of_present(last) or is_new(named, self._reports, last)
        return self.ledger.is_unsaved or self._is_made(named)

    def _is_made(self, named: JobGeneration) -> bool:
        """Tells whether the program made one of the entries."""
        parts = [(host, name) for name, one in named.own.items() for host in one.marks]
        return any(not self._reports[host].entries[name].is_restored for host, name in parts)

    def _after_save(self, order: JobOrder, outcomes: Outcomes, now: float) -> None:
        if first_failure(outcomes) is None:
            self.ledger = conclusions.after_save(self.ledger, order, outcomes, self._reports, self._plan())
            return
        hard = first_failure(outcomes, with_soon=False)
        if hard is not None and hard[1].facts.get(NO_ROOM) and (without := conclusions.after_no_room(self.ledger)):
            self.ledger = conclusions.after_failed_save(without, order, outcomes, None)
            return
        self.ledger = conclusions.after_failed_save(self.ledger, order, outcomes, hard)
        self._retry_at = now + (SOON_S if hard is None else RETRY_S)
        self._copy_due = self._copy_due or hard is not None

    def _is_of_present(self, generation: JobGeneration) -> bool:
        return set(generation.nodes) == self._reports.keys()

    # ---- protection

    def _plan(self) -> ProtectionPlan:
        told = {host: report.domain for host, report in self._reports.items() if report.domain}
        return protect(list(self._reports), self._terms.asked, told)

    def _protect(self, *, is_ending: bool = False) -> bool:
        last, plan = self.ledger.last, self._plan()
        if last is None or last.size or plan.size is None or not self._is_of_present(last):
            return False
        if (is_ending and self.ledger.drained == last.number) or not self._try(f"encode {last.number}"):
            return False
        groups = [list(group) for group in plan.groups]
        self._give(
            OrderKind.PROTECT, number=last.number, attempt=last.attempt, groups=groups, k=plan.size.k, m=plan.size.m
        )
        return True

    # ---- the target

    def _publish(self, *, is_due: bool) -> bool:
        last = self.ledger.last
        if last is None or self.ledger.drained == last.number:
            return False
        is_lost = not self._reports.keys() >= {*last.nodes}
        if not (is_due or is_lost or self.ledger.since_drain >= (self._terms.drain_every or 1)):
            return False
        if not self._try(f"share {last.number}"):
            return False
        names = sorted(name for name in last.names if last.marks(name) != self.ledger.drained_marks.get(name))
        told = {name for report in self._reports.values() for name in report.entries}
        self._give(
            OrderKind.PUBLISH,
            generation=asdict(last),
            since=self.ledger.since_drain,
            staging=self._terms.new_attempt(),
            names=names,
            spared=sorted(told.union(last.lacking) - last.names - last.dropped.keys()),
        )
        return True

    def _copy(self, now: float) -> bool:
        """Has complete entries copied as they are, since no generation could be saved."""
        if not self._copy_due or self._lost_writers():
            return False
        self._copy_due = False
        own = name_entries(self._reports, self.ledger.generations, self._held(now)).own
        marks = {(h, name): f"{h}\0{name}\0{mark}" for name, one in own.items() for h, mark in one.marks.items()}
        new = {name for (_, name), mark in marks.items() if mark not in self.ledger.copied}
        if not new:
            return False
        shares: dict[str, list[str]] = {}
        for host, name in marks:
            if name in new:
                shares.setdefault(host, []).append(name)
        self._give(OrderKind.COPY, staging=self._terms.new_attempt(), shares=shares, copied=sorted(marks.values()))
        return True

    def _after_publish(self, order: JobOrder, outcomes: Outcomes) -> None:
        failure = first_failure(outcomes)
        if failure is None:
            self._give(OrderKind.PLACE, **order.body)
        else:
            self.ledger = conclusions.after_failed_publish(self.ledger, failure)

    def _drop(self) -> bool:
        """Has all nodes know the ledger, and drop what none retains."""
        newest = self._reports[self._hosts[self._me]].orders.get(OrderLane.LOCAL)
        if newest is not None and newest.ledger == self.ledger:
            return False
        self.ledger = conclusions.after_drop(self.ledger)
        stay = self.ledger.generations
        newest_number = max((one.number for one in stay), default=0)
        given = self._given.get(OrderLane.TARGET)
        under_way = [read(JobGeneration, given.body["generation"])] if given and "generation" in given.body else []
        retained = {need for one in (*stay, *under_way) for need in (*one.numbers, *one.needs)}
        self._give(OrderKind.DROP, retained=sorted(retained), newest=newest_number)
        return True

    # ---- the end

    def _close(self) -> bool:
        if self.ledger.is_closed:
            return False
        first = self._reports.get(self._hosts[0])
        self._give(OrderKind.CLOSE, is_orderly=first is not None and first.ending is CommandEnding.ORDERLY)
        return True

    def _finish(self) -> bool:
        self._give(OrderKind.FINISH, is_orderly=self.ledger.is_orderly, lost=self._lost_writers())
        return True

    def _try(self, what: str) -> bool:
        """Tells whether something was not tried yet by this node for this membership."""
        is_first = what not in self._tried
        self._tried.add(what)
        return is_first
