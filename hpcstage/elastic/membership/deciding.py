"""Decides when the membership has to change, what the policy is asked, and what follows from its answer.

Pure: what is seen and the time go in, a decision comes out. The host of the store uses it; another host that takes the
store over begins a new one, and comes to the same from what it sees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcstage.elastic.membership.values import GONE, Beat, Generation, Node, Times, TrainingEnd
from hpcstage.elastic.policy import Answer, Cause, Facts, Host, PolicyFailed, Progress
from hpcstage.units import format_duration

MOST_FAILURES, SOON_S = 5, 300.0
"""A training whose processes ended by themselves so often, one time after the other and each within `SOON_S` of their
start, has a fault that restarts do not mend."""
SETTLE_S = 0.3
"""A change is decided on when nothing more has changed for so long: hosts that come or go together are one change."""
ASK_AGAIN_S = 1.0
"""A policy that has said `wait` is asked again after so long."""
AWAITED_EVERY_S = 0.05
"""Hosts that come to a new store are looked for so often: all of them wait for the last."""
APART_S = 600.0
"""Nodes that do not reach each other do not train together for so long."""


@dataclass(frozen=True)
class SeenNode:
    """A node, as the host of the store sees it."""

    beat: Beat
    silent_s: float

    def is_there(self, lease_s: float) -> bool:
        """Returns whether it lives, and has not gone."""
        return self.silent_s < lease_s and self.beat.state not in GONE


class Apart:
    """The pairs of nodes that do not reach each other though the leading host hears both: a network that is cut between
    two nodes makes every collective of theirs hang."""

    def __init__(self, known: Sequence[tuple[str, str, float]] = (), now_s: float = 0.0) -> None:
        """`known`: what `pairs` returned where another host led before."""
        self._until_s = {frozenset(pair): now_s + left_s for *pair, left_s in known}
        self.told: list[tuple[str, str]] = []
        """The hosts of pairs that are new since the caller has emptied this."""

    def pairs(self, now_s: float) -> tuple[tuple[str, str, float], ...]:
        """Returns the nodes of each pair, by their ids, and the seconds for which they are apart."""
        return tuple((*sorted(pair), until_s - now_s) for pair, until_s in self._until_s.items())  # type: ignore[misc]

    def sorted_out(
        self, now_s: float, current: Generation | None, seen: Sequence[SeenNode], lease_s: float
    ) -> Sequence[SeenNode]:
        """Returns the nodes as if those had left that cannot train with others that are there. As few as possible are
        left out, and of two the one with the higher rank."""
        there = {node.beat.node.id: node.beat for node in seen if node.is_there(lease_s)}
        self._hear(now_s, current, there)
        self._until_s = {pair: until_s for pair, until_s in self._until_s.items() if now_s < until_s}
        pairs = [pair for pair in self._until_s if pair <= there.keys()]
        if not pairs:
            return seen
        ranks = {node.id: rank for rank, node in enumerate(current.nodes)} if current else {}
        counts = Counter(id_ for pair in pairs for id_ in pair)
        kept: set[str] = set()
        for id_ in sorted(there, key=lambda id_: (id_ not in ranks, counts[id_], ranks.get(id_, 0))):
            if not any(frozenset((id_, other)) in self._until_s for other in kept):
                kept.add(id_)
        return [
            node if node.beat.node.id in kept or node.beat.node.id not in there else _as_left(node) for node in seen
        ]

    def _hear(self, now_s: float, current: Generation | None, there: dict[str, Beat]) -> None:
        for beat in there.values():
            if current is None or beat.generation != current.number:
                continue
            for id_ in beat.unreached:
                pair = frozenset((beat.node.id, id_))
                if id_ in there and id_ != beat.node.id:
                    if pair not in self._until_s:
                        self.told.append((beat.node.host, there[id_].node.host))
                    self._until_s[pair] = now_s + APART_S


def _as_left(node: SeenNode) -> SeenNode:
    return replace(node, beat=replace(node.beat, state="left"))


@dataclass(frozen=True)
class Proposal:
    """A membership that a policy is asked about."""

    nodes: tuple[Node, ...]
    facts: Facts
    silent_s: float

    def generation(self, number: int, term: int) -> Generation:
        """Returns the membership as it is agreed on."""
        cause = self.facts.cause
        return Generation(number, term, self.nodes, cause.kind, cause.lost, cause.joined, cause.waited_s, self.silent_s)


@dataclass(frozen=True)
class MembershipChange:
    """The difference between the generation that is agreed and the nodes that are there."""

    kind: str
    lost: tuple[Node, ...]
    failed: tuple[Node, ...]
    """The nodes that have no processes any more, but are there."""
    stay: tuple[Node, ...]
    join: tuple[Node, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """Identifies the change: while it is the same, nothing more has changed. Processes that end after a loss are no
        further change."""
        groups = (self.lost, () if self.lost else self.failed, self.join)
        return (self.kind, *(f"{index}{node.id}" for index, group in enumerate(groups) for node in group))


class Decider:
    """Follows the changes of one training."""

    def __init__(
        self,
        most: int,
        takes: Callable[[Sequence[Host]], int],
        times: Times,
        hosts_at_start: int | None = None,
        awaited: frozenset[str] | None = None,
        apart: Apart | None = None,
    ) -> None:
        """`most` hosts train at once; `takes` is the policy's own bound. `awaited` are the nodes, by their ids, that
        were there when the store's host before was lost, those that train and those that wait: that loss is decided on
        as soon as they have all spoken, or after a grace."""
        self._most = most
        self._takes = takes
        self._times = times
        self._ids: tuple[str, ...] = ()
        self._same_since_s = 0.0
        self._change_since_s: float | None = None
        self._ask_at_s = 0.0
        self._hosts_at_start = hosts_at_start
        self._awaited = awaited
        self.again_s = math.inf
        """The time after which to look again, where that matters."""
        self._failures = 0
        self._agreed_s = float("-inf")
        self.apart = apart or Apart()

    def look(self, now_s: float, current: Generation | None, seen: Sequence[SeenNode]) -> tuple[bool, Proposal | None]:
        """Returns whether the generation is over, and what to ask the policy, if it is time to."""
        self.again_s = math.inf
        seen = self.apart.sorted_out(now_s, current, seen, self._times.lease_s)
        change = change_of(current, seen, self._times.lease_s)
        chosen = self._chosen(change) if change else ()
        if change is None or not chosen or (change.kind == "join" and len(chosen) == len(change.stay)):
            # With nobody there, the wait for somebody has begun nonetheless.
            self._change_since_s = None if change is None or change.kind == "join" else self._since(now_s)
            self._ids = ()
            return bool(change and change.lost), None
        is_over = bool(change.lost) or change.kind == "start"
        if change.ids != self._ids:
            self._ids, self._same_since_s, self._ask_at_s = change.ids, now_s, 0.0
        self._since(now_s)
        left_s = self._same_since_s + self._settled_after_s(change, chosen, seen) - now_s
        if left_s > 0:
            self.again_s = AWAITED_EVERY_S if self._awaited is not None else left_s
        if left_s > 0 or now_s < self._ask_at_s:
            return is_over, None
        return is_over, self._proposal(now_s, change, chosen, seen)

    def answered(self, now_s: float, proposal: Proposal, answer: Answer, policy: str) -> TrainingEnd | None:
        """Takes the policy's answer. Returns why the training ends, if it does."""
        cause = proposal.facts.cause
        hosts = ", ".join(proposal.facts.hosts)
        self._awaited = None
        if answer == "fail":
            what = f"policy {policy} said fail for {hosts}" + (
                f" without {', '.join(cause.lost)}" if cause.lost else ""
            )
            return TrainingEnd(
                f"{what}: the training ends (submit it again, or choose another policy)", PolicyFailed.exit_code
            )
        if answer == "ok":
            self._ids, self._change_since_s = (), None
            if cause.kind == "start":
                self._hosts_at_start = len(proposal.nodes)
            return self._too_many_failures(now_s, cause)
        self._ask_at_s = now_s + ASK_AGAIN_S
        limit_s = self._times.wait_limit_s
        if cause.kind != "join" and cause.waited_s >= limit_s:
            waited = f"policy {policy} said wait for {format_duration(limit_s)} with {hosts}: the training ends"
            return TrainingEnd(f"{waited} (submit it with the hosts that it needs)", PolicyFailed.exit_code)
        return None

    def _too_many_failures(self, now_s: float, cause: Cause) -> TrainingEnd | None:
        is_soon = now_s - self._agreed_s < SOON_S
        self._failures = 0 if cause.kind != "failure" else self._failures + 1 if is_soon else 1
        self._agreed_s = now_s
        if self._failures < MOST_FAILURES:
            return None
        what = f"processes ended {MOST_FAILURES} times in a row, though no host was lost: the training ends"
        return TrainingEnd(f"{what} (look at what they said)", 1)

    def _since(self, now_s: float) -> float:
        if self._change_since_s is None:
            self._change_since_s = now_s
        return self._change_since_s

    def _settled_after_s(self, change: MembershipChange, chosen: Sequence[Node], seen: Sequence[SeenNode]) -> float:
        if change.kind == "loss" and self._awaited is not None:
            return 0.0 if self._awaited <= _spoken(seen) else max(self._times.grace_s, SETTLE_S)
        if change.kind == "start":
            return 0.0 if len(chosen) >= self._most else self._times.last_call_s
        if change.kind == "failure" and len(change.failed) < len(change.stay):
            return self._times.failure_s
        return SETTLE_S

    def _chosen(self, change: MembershipChange) -> tuple[Node, ...]:
        """Returns the nodes that would train: who stays comes first, and who is too many is a spare. A policy that
        would take none is asked about one, so that its answer ends the wait."""
        there = (*change.stay, *change.join)
        hosts = [Host(node.host, node.processes) for node in there[: self._most]]
        return there[: max(1, self._takes(hosts))] if hosts else ()

    def _proposal(
        self, now_s: float, change: MembershipChange, chosen: tuple[Node, ...], seen: Sequence[SeenNode]
    ) -> Proposal:
        lost, joined = _names(change.lost), _names([node for node in change.join if node in chosen])
        cause = Cause(change.kind, lost, joined, now_s - self._since(now_s))  # type: ignore[arg-type]
        hosts = tuple(Host(node.host, node.processes) for node in chosen)
        progress = _progress([node.beat.progress for node in seen if node.beat.progress], self._hosts_at_start)
        recoverable = _recoverable(seen, chosen, progress)
        facts = Facts(hosts, change.kind == "start", cause, progress, recoverable=recoverable)
        gone = {node.id for node in change.lost}
        return Proposal(chosen, facts, max((node.silent_s for node in seen if node.beat.node.id in gone), default=0.0))


def change_of(current: Generation | None, seen: Sequence[SeenNode], lease_s: float) -> MembershipChange | None:
    """Returns what differs from the generation that is agreed, or None."""
    alive = [node.beat for node in seen if node.is_there(lease_s)]
    if current is None:
        members: list[Node] = []
        number = 0
    else:
        members, number = list(current.nodes), current.number
    there = {beat.node.id: beat for beat in alive}
    stay = [node for node in members if node.id in there]
    finished = {node.beat.node.id for node in seen if node.beat.state == "finished"}
    lost = [node for node in members if node.id not in there and node.id not in finished]
    if finished.intersection(node.id for node in members) and not lost:
        return None  # the others finish as well, and need nobody for it
    # A node that is ready has no processes; one that has yet to hear of this generation is ready for it.
    failed = [node for node in stay if there[node.id].state == "ready" and there[node.id].generation == number]
    known = {node.id for node in members}
    join = [beat.node for beat in alive if beat.node.id not in known and beat.state == "ready"]
    if not stay:
        if not join and not lost:
            return None
        return MembershipChange("start", tuple(lost) if current else (), (), (), tuple(join))
    kind = "loss" if lost else "failure" if failed else "join" if join else ""
    return MembershipChange(kind, tuple(lost), tuple(failed), tuple(stay), tuple(join)) if kind else None


def is_complete(current: Generation | None, seen: Sequence[SeenNode], lease_s: float) -> bool:
    """Returns whether the training has come to its end: a node has finished, and none of the others trains any more."""
    members = {node.id for node in current.nodes} if current else set()
    there = [node for node in seen if node.beat.node.id in members]
    trains = any(node.beat.state == "training" and node.silent_s < lease_s for node in there)
    return not trains and any(node.beat.state == "finished" for node in there)


def _progress(told: Sequence[Mapping[str, float]], hosts_at_start: int | None) -> Progress:
    """Returns what the node says that is furthest; nodes that are lost have said it as well."""
    newest = max(told, key=lambda one: one.get("step", 0), default={})
    share, left_s = newest.get("share"), newest.get("process_s_left")
    numbers = {name: None if name not in newest else int(newest[name]) for name in ("step", "batch_per_process")}
    return Progress(share=share, process_s_left=left_s, hosts_at_start=hosts_at_start, **numbers)


def _spoken(seen: Sequence[SeenNode]) -> set[str]:
    """Returns the nodes that have said something in this term; what is taken for granted of others has no count."""
    return {node.beat.node.id for node in seen if node.beat.count}


def _recoverable(seen: Sequence[SeenNode], chosen: Sequence[Node], progress: Progress) -> bool | None:
    """Returns whether one of the chosen nodes has a state from which all of them can go on. Before the first step there
    is nothing to recover; where nobody counts steps, a node that is lost may have said that it had a state."""
    told = {node.beat.has_state for node in seen if node.beat.node in chosen}
    if True in told or None in told:
        return True if True in told else None
    was_any = any(node.beat.has_state for node in seen) if progress.step is None else progress.step > 0
    return False if was_any else None


def _names(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(node.host for node in nodes)
