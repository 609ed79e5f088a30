"""Decides, among the keepers of a job, what is saved, protected, drained and dropped, and when. Pure: it has no clock.

Owns the order of a job: one order at a time, which all nodes that are there carry out before the next one is given. The
lowest node that is there gives them, and puts what it decided into each; when the membership changes, whoever is lowest
then goes on from the newest order that anybody knows. An order that was interrupted is not finished: a generation that
not all have committed is none, and the next one has another number.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from hpcstage.checkpoint.jobwide.families import FoundStore, earlier_states
from hpcstage.checkpoint.jobwide.naming import NamedShares, name_shares
from hpcstage.checkpoint.jobwide.words import (
    CommandEnding,
    EntryState,
    JobGeneration,
    JobLedger,
    JobOrder,
    KeeperWord,
    OrderKind,
    Outcome,
)
from hpcstage.checkpoint.keeping.facts import LOCAL_KEPT, MOST_ROWS, SavedRow
from hpcstage.checkpoint.protection.groups import CodeSize, ProtectionPlan, protect

SOON_S = 0.3
"""A state that changed while it was saved is tried again so much later."""
RETRY_S = 60.0
"""A state that could not be saved is tried again so much later."""
END_S = 5.0
"""The longest that a state which changes is tried again after the program has ended."""
_TARGET = "target"


@dataclass(frozen=True)
class CouncilTerms:
    """The terms of a job's decisions."""

    asked: CodeSize | None = None
    domains: Mapping[str, str] = field(default_factory=dict)
    drain_every: int | None = None
    new_attempt: Callable[[], str] = str
    """Returns a random name for an attempt at a generation."""


@dataclass(frozen=True)
class Say:
    """The word is to be told to all other nodes that are there."""

    word: KeeperWord


@dataclass(frozen=True)
class Do:
    """An order is to be carried out, and `did` to be called with the outcome."""

    order: JobOrder


@dataclass(frozen=True)
class PlaceShares:
    """All shares of an order are in the target: they are to be given their names, and `placed` to be called."""

    order: JobOrder


Act = Say | Do | PlaceShares


class Council:
    """The part that one node has in the decisions."""

    def __init__(self, me: int, hosts: Sequence[str], terms: CouncilTerms, domain: str = "") -> None:
        self._me = me
        self._hosts = hosts
        self._terms = terms
        self._word = KeeperWord(domain=domain)
        self._is_dirty = False
        self._heard: dict[int, KeeperWord] = {}
        self._present: frozenset[int] = frozenset()
        self._doing: tuple[int, int] | None = None
        self._acts: list[Act] = []
        self._led = -1
        """The view in which this node has taken over."""
        self._current: JobOrder | None = None
        """The order that this node gave and that is not concluded."""
        self._placing: JobOrder | None = None
        self._ledger = JobLedger()
        self._seq = 0
        self._tried: set[str] = set()
        self._retry_at = self._end_at = 0.0
        self._copy_due = self._is_done = False
        self.is_over = False
        """Whether this node has carried out the last order."""

    # ---- what happens

    def membership(self, view: int, present: Collection[int]) -> None:
        """Takes the nodes that are there; none: this node is not connected."""
        there = frozenset(present) if self._me in present else frozenset()
        if (view, there) != (self._word.view, self._present):
            self._present, self._doing = there, None
            self._tell(view=view)

    def heard(self, node: int, word: KeeperWord) -> None:
        """Takes the word of another node."""
        self._heard[node] = word

    def see(self, entries: Mapping[str, EntryState], removed: Sequence[str] = (), *, is_gone: bool = False) -> None:
        """Takes the entries of this node's directory."""
        self._tell(entries=dict(entries), removed=tuple(removed), is_gone=is_gone)

    def find(self, found: Sequence[FoundStore], target_ns: int) -> None:
        """Takes what earlier runs left on this node, and when the state in the target was made."""
        self._tell(found=tuple(one.to_json() for one in found), target_ns=target_ns)

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
        if outcome.key == self._doing:
            self._doing = None
            self._tell(outcome=outcome)
            order = self._word.order
            self.is_over = order is not None and order.kind in (OrderKind.FINISH, OrderKind.REFUSE)

    def placed(self, order: JobOrder, outcome: Outcome) -> None:
        """Takes the result of a PlaceShares."""
        if self._placing is not None and self._placing.key == order.key:
            self._placing = None
            self._ledger = _after_place(self._ledger, order, outcome)

    # ---- what follows from it

    def take(self, now: float) -> list[Act]:
        """Returns what is to be done, in its order."""
        self._lead(now)
        self._follow()
        if self._is_dirty:
            self._is_dirty = False
            self._acts.insert(0, Say(self._word))
        acts, self._acts = self._acts, []
        return acts

    def wake_at(self) -> float | None:
        """Returns the time at which there is something to do though nothing happens; None for never."""
        is_free = self._leads and self._current is None and not self._is_done
        return self._retry_at if is_free and self._retry_at else None

    @property
    def present(self) -> frozenset[int]:
        """The nodes that are there; none while this node is not connected."""
        return self._present

    @property
    def ledger(self) -> JobLedger:
        """The newest ledger that this node knows."""
        order = self._word.order
        if self._leads and self._led == self._word.view:
            return self._ledger
        return JobLedger() if order is None else order.ledger

    @property
    def are_all_over(self) -> bool:
        """Whether all nodes that are there have carried out the last order, as far as this one knows."""
        order = self._word.order
        words = [self._of(node) for node in self._present]
        return order is not None and all(w is not None and w.outcome and w.outcome.key == order.key for w in words)

    @property
    def _leads(self) -> bool:
        return bool(self._present) and self._me == min(self._present)

    def _of(self, node: int) -> KeeperWord | None:
        return self._word if node == self._me else self._heard.get(node)

    def _tell(self, **news: Any) -> None:  # noqa: ANN401  a KeeperWord's fields
        changed = replace(self._word, **news)
        if changed != self._word:
            self._word, self._is_dirty = changed, True

    def _follow(self) -> None:
        """Begins to carry out the coordinator's order, if it is a new one."""
        word = self._of(min(self._present)) if self._present else None
        order = None if word is None else word.order
        if order is None or order.view != self._word.view or order.by != min(self._present):
            return
        done = self._word.outcome
        if order.key != self._doing and (done is None or order.key > done.key):
            self._doing = order.key
            self._tell(order=order)
            self._acts.append(Do(order))

    # ---- the coordinator

    def _lead(self, now: float) -> None:
        if not self._leads or self._placing is not None:
            return
        words: dict[int, KeeperWord] = {}
        for node in self._present:
            word = self._of(node)
            if word is None or word.view != self._word.view:
                return
            words[node] = word
        if self._led != self._word.view:
            self._take_over(words, now)
        if self._current is not None:
            outcomes = {node: word.outcome for node, word in words.items()}
            found = {n: o for n, o in outcomes.items() if o is not None and o.key == self._current.key}
            if len(found) < len(words):
                return
            order, self._current = self._current, None
            self._conclude(order, {self._hosts[n]: one for n, one in found.items()}, now)
        if self._placing is None and self._current is None and not self._is_done:
            self._next(words, now)

    def _take_over(self, words: Mapping[int, KeeperWord], now: float) -> None:
        """Goes on from the newest order that a node knows."""
        self._led, self._current, self._tried, self._retry_at = self._word.view, None, set(), 0.0
        self._end_at = now + END_S
        newest = max((word.order for word in words.values() if word.order), key=lambda one: one.key, default=None)
        if newest is None:
            return
        self._seq = max(self._seq, newest.seq)
        if newest.by != self._me or newest.ledger.saved_count > self._ledger.saved_count:
            self._ledger = newest.ledger
        if newest.kind is OrderKind.COMMIT and newest.body["number"] >= self._ledger.next_number:
            self._ledger = replace(self._ledger, next_number=newest.body["number"] + 1, is_last_whole=False)

    def _give(self, kind: OrderKind, **body: Any) -> None:  # noqa: ANN401  what JSON takes
        self._seq += 1
        self._current = JobOrder(self._seq, self._me, self._word.view, kind, body, self._ledger)
        self._tell(order=self._current)
        self._doing = self._current.key
        self._acts.append(Do(self._current))

    def _next(self, words: Mapping[int, KeeperWord], now: float) -> None:
        """Gives the next order, if there is one to give."""
        if not self._ledger.is_begun or not all(word.is_ready for word in words.values()):
            self._begin(words)
            return
        if all(word.ending is not CommandEnding.NOT for word in words.values()):
            steps: tuple[Callable[[], bool], ...] = (
                lambda: self._close(words),
                lambda: self._commit(words, now),
                lambda: now < self._retry_at <= self._end_at,
                lambda: self._copy(words),
                lambda: self._share(is_due=True),
                lambda: self._encode(is_ending=True),
                self._keep,
                self._finish,
            )
        else:
            is_due = any(word.hurries for word in words.values())
            steps = (
                self._encode,
                lambda: self._share(is_due=is_due),
                self._keep,
                lambda: self._copy(words),
                lambda: self._commit(words, now),
            )
        any(step() for step in steps)

    # ---- the start

    def _begin(self, words: Mapping[int, KeeperWord]) -> None:
        """Chooses the state that is put into all directories: the newest of which nothing says that it cannot be."""
        if len(words) < len(self._hosts) or any(word.found is None for word in words.values()):
            return
        if self._ledger.is_begun:
            self._give(OrderKind.READY)
            return
        found = {node: [FoundStore.from_json(one) for one in word.found or ()] for node, word in words.items()}
        for state in earlier_states(found):
            if state.generation.created_ns < self._word.target_ns:
                break
            if state.key not in self._ledger.failed:
                self._give(OrderKind.BEGIN, key=state.key, state=state.to_json())
                return
        if _TARGET in self._ledger.failed:
            self._give(OrderKind.REFUSE, why=self._ledger.lines[-1])
        else:
            self._give(OrderKind.BEGIN, key=_TARGET, state=None)

    def _after_begin(self, order: JobOrder, outcomes: Mapping[str, Outcome]) -> None:
        ledger = self._ledger
        failed = {node: one for node, one in outcomes.items() if one.error}
        if failed:
            node, outcome = next(iter(sorted(failed.items())))
            refused = outcome.facts.get("refuses")
            line = outcome.error if refused or order.body["key"] == _TARGET else f"{outcome.error} (on {node})"
            keys = (_TARGET,) if refused else ()
            self._ledger = replace(
                ledger, failed=(*ledger.failed, order.body["key"], *keys), lines=(*ledger.lines, line)
            )
            if refused:
                self._give(OrderKind.REFUSE, why=line)
            return
        facts = [one.facts for one in outcomes.values()]
        first = outcomes[self._hosts[self._me]].facts
        self._ledger = replace(
            ledger,
            is_begun=True,
            restored=first["restored"],
            is_unsaved=order.body["state"] is not None,
            seen=tuple(sorted({name for one in facts for name in one["seen"]})),
            next_number=max(ledger.next_number, *(one["floor"] + 1 for one in facts)),
            after_ns=max(ledger.after_ns, *(one["after_ns"] for one in facts)),
            lines=(*ledger.lines, *first["lines"]),
            is_from_target=order.body["state"] is None,
        )

    # ---- a generation

    def _commit(self, words: Mapping[int, KeeperWord], now: float) -> bool:
        if now < self._retry_at:
            return False
        self._retry_at = 0.0
        named = name_shares(self._by_name(words), self._ledger.last)
        if not self._is_wanted(named):
            return False
        last = self._ledger.last
        plan = self._plan()
        is_chained = last is not None and self._is_of_present(last) and (last.size != "" or plan.size is None)
        self._give(
            OrderKind.COMMIT,
            number=self._ledger.next_number,
            attempt=self._terms.new_attempt(),
            after_ns=self._ledger.after_ns,
            is_full=not (is_chained and self._ledger.is_last_whole),
            **asdict(named) | {"removed": sorted(named.removed)},
        )
        return True

    def _is_wanted(self, named: NamedShares) -> bool:
        """Tells whether there is something to save that no generation has."""
        last, ledger = self._ledger.last, self._ledger
        if named.is_empty:
            return False
        if last is not None:
            return not self._is_of_present(last) or named.differ(last)
        return ledger.is_unsaved or self._is_made(named)

    def _is_made(self, named: NamedShares) -> bool:
        """Tells whether the program made one of the entries."""
        for node, share in named.shares.items():
            word = self._of(self._hosts.index(node))
            if word is not None and any(not word.entries[name].is_restored for name in share):
                return True
        return False

    def _put_there(self, made: JobGeneration) -> dict[str, dict[str, str]]:
        """Returns the marks of what came from the target at the start: it has that already."""
        words = {self._hosts[node]: word for node in self._present if (word := self._of(node)) is not None}
        found = {name: made.marks(name) for name in made.names}
        return {
            name: marks
            for name, marks in found.items()
            if marks and all(name in words[node].entries and words[node].entries[name].is_restored for node in marks)
        }

    def _after_commit(self, order: JobOrder, outcomes: Mapping[str, Outcome], now: float) -> None:
        body, ledger = order.body, self._ledger
        number = int(body["number"])
        failed = {node: one for node, one in outcomes.items() if one.error}
        if failed:
            self._ledger = replace(ledger, next_number=number + 1, is_last_whole=False)
            hard = {node: one for node, one in failed.items() if not one.is_soon}
            self._retry_at = now + (RETRY_S if hard else SOON_S)
            if hard:
                node, outcome = next(iter(sorted(hard.items())))
                line = f"a state could not be saved on {node}, and was copied as it is: {outcome.error}"
                if line not in ledger.lines:
                    self._ledger = replace(self._ledger, lines=(*ledger.lines, line))
                self._copy_due = True
            return
        facts = {node: one.facts for node, one in outcomes.items()}
        made = JobGeneration.from_json(
            {
                "number": number,
                "attempt": body["attempt"],
                "created_ns": max(one["created_ns"] for one in facts.values()),
                "shares": body["shares"],
                "carried": body["carried"],
                "dropped": body["dropped"],
                "needs": sorted({need for one in facts.values() for need in one["needs"]}),
                "size": "",
                "state_bytes": sum(one["state_bytes"] for one in facts.values()),
            }
        )
        plan = self._plan()
        if ledger.is_from_target and not ledger.generations:
            ledger = replace(ledger, drained_marks=self._put_there(made))
        self._ledger = replace(
            ledger,
            generations=(*ledger.generations, made),
            next_number=number + 1,
            after_ns=made.created_ns,
            is_last_whole=True,
            is_unsaved=False,
            since_drain=ledger.since_drain + 1,
            saved_count=ledger.saved_count + 1,
            rows=(*ledger.rows, _row(made, facts))[-MOST_ROWS:],
            plan=_said(plan),
        )

    # ---- protection

    def _plan(self) -> ProtectionPlan:
        words = {self._hosts[node]: self._of(node) for node in sorted(self._present)}
        told = {host: word.domain for host, word in words.items() if word is not None and word.domain}
        return protect(list(words), self._terms.asked, {**told, **self._terms.domains})

    def _is_of_present(self, generation: JobGeneration) -> bool:
        return generation.shares.keys() == {self._hosts[node] for node in self._present}

    def _encode(self, *, is_ending: bool = False) -> bool:
        last, plan = self._ledger.last, self._plan()
        if last is None or last.size or plan.size is None or not self._is_of_present(last):
            return False
        if (is_ending and self._ledger.drained == last.number) or not self._try(f"encode {last.number}"):
            return False
        groups = [list(group) for group in plan.groups]
        self._give(
            OrderKind.ENCODE, number=last.number, attempt=last.attempt, groups=groups, k=plan.size.k, m=plan.size.m
        )
        return True

    def _after_encode(self, order: JobOrder, outcomes: Mapping[str, Outcome]) -> None:
        ledger, plan = self._ledger, self._plan()
        failed = {node: one for node, one in outcomes.items() if one.error}
        row = ledger.rows[-1]
        if failed:
            node, outcome = next(iter(sorted(failed.items())))
            why = f"not protected: {outcome.error} (on {node})"
            line = f"state {order.body['number']} is {why}"
            self._ledger = replace(
                ledger, rows=(*ledger.rows[:-1], replace(row, protected=why)), lines=(*ledger.lines, line)
            )
            return
        size = f"{order.body['k']}+{order.body['m']}"
        made = replace(ledger.generations[-1], size=size)
        seconds = max(float(one.facts.get("seconds", 0.0)) for one in outcomes.values())
        row = replace(row, protected=size, encode_s=round(seconds, 6))
        self._ledger = replace(
            ledger, generations=(*ledger.generations[:-1], made), rows=(*ledger.rows[:-1], row), plan=_said(plan)
        )

    # ---- the target

    def _share(self, *, is_due: bool) -> bool:
        ledger, last = self._ledger, self._ledger.last
        if last is None or ledger.drained == last.number:
            return False
        lost = not last.shares.keys() <= {self._hosts[node] for node in self._present}
        if not (is_due or lost or ledger.since_drain >= (self._terms.drain_every or 1)):
            return False
        if not self._try(f"share {last.number}"):
            return False
        names = sorted(name for name in last.names if last.marks(name) != ledger.drained_marks.get(name))
        staging = self._terms.new_attempt()
        self._give(OrderKind.SHARE, number=last.number, attempt=last.attempt, staging=staging, names=names)
        return True

    def _copy(self, words: Mapping[int, KeeperWord]) -> bool:
        """Has complete entries copied as they are, since no generation could be saved."""
        if not self._copy_due:
            return False
        self._copy_due = False
        named = name_shares(self._by_name(words), self._ledger.last)
        marks = [f"{node}\0{name}\0{mark}" for node, share in named.shares.items() for name, mark in share.items()]
        if set(marks) <= set(self._ledger.copied):
            return False
        shares = {node: dict(share) for node, share in named.shares.items()}
        self._give(OrderKind.COPY, staging=self._terms.new_attempt(), shares=shares, copied=sorted(marks))
        return True

    def _after_share(self, order: JobOrder, outcomes: Mapping[str, Outcome]) -> None:
        failed = {node: one for node, one in outcomes.items() if one.error}
        if failed:
            node, outcome = next(iter(sorted(failed.items())))
            self._ledger = replace(self._ledger, undrained_why=f"{outcome.error} (on {node})")
            return
        self._placing = order
        self._acts.append(PlaceShares(order))

    def _keep(self) -> bool:
        """Has all nodes know the ledger, and drop what none retains."""
        newest = self._word.order
        if newest is not None and newest.ledger == self._ledger:
            return False
        generations = self._ledger.generations
        kept = {one.number for one in generations[-LOCAL_KEPT:]}
        kept |= {one.number for each in generations[-LOCAL_KEPT:] for one in each.carried.values()}
        stay = [one for one in generations if one.number in kept]
        retained = kept | {need for one in stay for need in one.needs}
        self._ledger = replace(self._ledger, generations=tuple(stay))
        self._give(OrderKind.KEEP, retained=sorted(retained), newest=max(kept, default=0))
        return True

    # ---- the end

    def _close(self, words: Mapping[int, KeeperWord]) -> bool:
        if self._ledger.is_closed:
            return False
        first = words.get(0)
        self._give(OrderKind.CLOSE, is_orderly=first is not None and first.ending is CommandEnding.ORDERLY)
        return True

    def _finish(self) -> bool:
        self._give(OrderKind.FINISH, is_orderly=self._ledger.is_orderly)
        return True

    # ---- all of them

    def _conclude(self, order: JobOrder, outcomes: Mapping[str, Outcome], now: float) -> None:
        kind, ledger = order.kind, self._ledger
        if kind is OrderKind.BEGIN:
            self._after_begin(order, outcomes)
        elif kind is OrderKind.COMMIT:
            self._after_commit(order, outcomes, now)
        elif kind is OrderKind.ENCODE:
            self._after_encode(order, outcomes)
        elif kind in (OrderKind.SHARE, OrderKind.COPY):
            self._after_share(order, outcomes)
        elif kind is OrderKind.CLOSE:
            self._ledger = replace(ledger, is_closed=True, is_orderly=bool(order.body["is_orderly"]))
            self._retry_at, self._end_at = 0.0, now + END_S
        elif kind in (OrderKind.FINISH, OrderKind.REFUSE):
            self._is_done = True

    def _try(self, what: str) -> bool:
        """Tells whether something was not tried yet by this node for this membership."""
        is_first = what not in self._tried
        self._tried.add(what)
        return is_first

    def _by_name(self, words: Mapping[int, KeeperWord]) -> dict[str, KeeperWord]:
        return {self._hosts[node]: words[node] for node in sorted(words)}


def _after_place(ledger: JobLedger, order: JobOrder, outcome: Outcome) -> JobLedger:
    if outcome.error:
        return replace(ledger, undrained_why=outcome.error)
    facts = outcome.facts
    done = replace(
        ledger,
        undrained_why="",
        beside={**ledger.beside, **facts["beside"]},
        files=ledger.files + facts["files"],
        size_bytes=ledger.size_bytes + facts["size_bytes"],
        lines=(*ledger.lines, *facts["lines"]),
    )
    if order.kind is OrderKind.COPY:
        return replace(done, copied=tuple(order.body["copied"]))
    last = order.ledger.last
    marks = {} if last is None else {name: last.marks(name) for name in last.names}
    return replace(done, drained=int(order.body["number"]), drained_marks=marks, since_drain=0)


def _row(made: JobGeneration, facts: Mapping[str, Mapping[str, Any]]) -> SavedRow:
    largest = max(facts.values(), key=lambda one: int(one["state_bytes"]))
    kinds = sorted({str(one["kind"]) for one in facts.values() if one["state_bytes"]} or {str(largest["kind"])})
    shares = sum(one["changed_share"] * one["state_bytes"] for one in facts.values())
    return SavedRow(
        made.number,
        kinds[0] if len(kinds) == 1 else str(largest["kind"]),
        str(largest["why"]),
        len({name for share in made.shares.values() for name in share}),
        made.state_bytes,
        sum(int(one["written_bytes"]) for one in facts.values()),
        round(shares / made.state_bytes, 6) if made.state_bytes else 0.0,
        max(float(one["took_s"]) for one in facts.values()),
    )


def _said(plan: ProtectionPlan) -> str:
    """Says how the nodes protect each other, for people."""
    if plan.size is None:
        return plan.line or "one node has no other that could keep parities"
    count = len(plan.groups)
    groups = "one group" if count == 1 else f"{count} groups"
    more = f"; {plan.line}" if plan.line else ""
    return f"{plan.size}: any {plan.size.m} of the nodes of a group may be lost, {groups}{more}"
