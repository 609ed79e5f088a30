"""Leads a training from the host of its store: sees who lives, asks the policy, and claims the next generation.

The module owns the leader's loop. A leader is one of the agents; its own beats go through the store like those of the
others. It leads only while it reaches the run directory, goes on when it does again, and stops as soon as another term
has begun there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hpcstage import stderr
from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.elastic.membership.deciding import APART_S, Apart, Decider, Proposal, SeenNode, is_complete
from hpcstage.elastic.membership.termstore import Board, StoreLost
from hpcstage.elastic.membership.values import GONE, AgentSetting, Beat, Generation, Term, TrainingEnd, View
from hpcstage.elastic.policy import Answer, PolicyError
from hpcstage.elastic.waiting import AwakeClock, Caller, NoAnswer, Watch
from hpcstage.errors import HpcstageError
from hpcstage.units import format_duration

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
AT_ONCE_S = 0.05
"""Most policies have answered by then. The leader speaks on while others think."""


class Superseded(HpcstageError):
    """Another host has taken the store over."""


class Leader:
    """Leads for one term, in a thread."""

    def __init__(
        self,
        arbiter: Arbiter,
        server: Store,
        term: Term,
        setting: AgentSetting,
        heard: View | None = None,
    ) -> None:
        """`heard`: what the store's host before said last, where this node has heard that."""
        self.term = term
        self._server: Store | None = server  # the store ends with it
        self._arbiter = arbiter
        self._policy, self._most, self._ends_unix_s = setting.policy, setting.most, setting.ends_unix_s
        self._times = setting.times
        self._heard = heard
        self._decider = Decider(self._most, self._policy.most, self._times)
        self._directory = Caller(f"the run directory {arbiter.directory}")
        self._board = Board(server, arbiter.signer, self._times.call_s)
        self._began_s = time.monotonic()
        self._clock = AwakeClock(self._began_s, 2 * self._times.beat_s)
        self._watches: dict[int, Watch] = {}
        self._beats: dict[int, Beat] = {}
        self._current: Generation | None = None
        self._former: Term | None = None
        self._view = View(0)
        self._asks = Caller("the scale policy")
        self._asked: tuple[Proposal, Future[Answer]] | None = None
        self._decides = True
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic leader", daemon=True)

    def start(self) -> None:
        """Begins to lead."""
        self._thread.start()

    def stop(self, linger_s: float, *, awaits_end: bool = False) -> None:
        """Ends, when the others have left, or after `linger_s`. `awaits_end`: this node has finished, and the end of
        the training is to be seen first, which those who started the agents look for."""
        self._decides = False  # those that are left have a leader of their own, or end as well
        deadline_s = time.monotonic() + linger_s
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            if not self._others() and not (awaits_end and self._view.end is None):
                break
            self._stopping.wait(self._times.beat_s)
        self._stopping.set()
        self._thread.join(3 * self._times.call_s)

    def _others(self) -> bool:
        """Returns whether another node than this one still speaks."""
        now_s = self._clock.show(time.monotonic())
        return any(
            beat.node.id != self.term.node
            and beat.state not in GONE
            and self._watches[place].unchanged_s(now_s) < self._times.lease_s
            for place, beat in list(self._beats.items())
        )

    def _run(self) -> None:
        try:
            self._current = self._call(self._arbiter.newest_generation)
            at_start = self._call(self._arbiter.hosts_at_start)
            self._former = self._call(lambda: self._arbiter.term_before(self.term.number))
            apart = Apart(self._heard.apart if self._heard else (), self._clock.show(time.monotonic()))
            self._decider = Decider(self._most, self._policy.most, self._times, at_start, self._awaited(), apart)
            done_s = time.monotonic()
            while not self._stopping.is_set():
                try:
                    if self._keeps_term():
                        self._step(self._clock.show(time.monotonic()))
                    done_s = time.monotonic()
                except (NoAnswer, StoreLost, OSError):  # it shows that it leads, and does not
                    if time.monotonic() - done_s > self._times.lease_s:
                        raise
                self._stopping.wait(min(self._times.beat_s, self._decider.again_s))
        except Superseded as error:
            stderr.say(f"elastic: {error.line()}")
        except (HpcstageError, OSError) as error:
            line = error.line() if isinstance(error, HpcstageError) else str(error)
            stderr.say(f"elastic: {self.term.host} gives the store up: {line}; the next host takes it over")
        finally:
            self._board.close()
            self._directory.close()
            self._asks.close()
            self._server = None

    def _awaited(self) -> frozenset[str] | None:
        """Returns the nodes that will come to this store if they live, where all of them are known."""
        if self._current is None or self._former is None or self._heard is None:
            return None
        members = {node.id for node in self._current.nodes}
        return frozenset((members | {*self._heard.spares}) - {self._former.node})

    def _keeps_term(self) -> bool:
        """Shows in the run directory that this host leads. Returns False if that cannot be reached: others that do
        reach it take the store over after a lease. Raises Superseded if they have."""
        try:
            self._call(self._keep_term)
        except (NoAnswer, OSError):
            return False
        return True

    def _step(self, now_s: float) -> None:
        self._look(now_s)
        seen = self._seen(now_s)
        before, is_over = self._current, False
        if self._view.end is None and is_complete(self._current, seen, self._times.lease_s):
            self._end(TrainingEnd("the training is complete", 0))
        if self._view.end is None and self._decides:
            try:
                is_over, proposal = self._decider.look(now_s, self._current, seen)
                self._tell_of_cuts()
                self._decide(now_s, proposal)
            except PolicyError as error:
                self._end(TrainingEnd(f"{error.line()}: the training ends", error.exit_code))
        number = self._current.number if self._current else 0
        is_over = is_over and self._current is before
        apart = self._decider.apart.pairs(now_s)
        self._view = self._view.followed(generation=number, is_over=is_over, spares=self._waiting(seen), apart=apart)
        self._board.show(self._view)

    def _tell_of_cuts(self) -> None:
        told, self._decider.apart.told = self._decider.apart.told, []
        for first, second in told:
            limit = format_duration(APART_S)
            stderr.say(f"elastic: {first} does not reach {second}: for {limit} they do not train together")

    def _waiting(self, seen: list[SeenNode]) -> tuple[str, ...]:
        """Returns the nodes that are there and do not train."""
        members = {node.id for node in self._current.nodes} if self._current else set()
        lease_s = self._times.lease_s
        there = (node.beat for node in seen if node.silent_s < lease_s and node.beat.state == "ready")
        return tuple(beat.node.id for beat in there if beat.node.id not in members)

    def _keep_term(self) -> None:
        newest = self._arbiter.newest_term()
        if newest and newest.number > self.term.number:
            raise Superseded(f"{newest.host} has taken the store over from {self.term.host}, which was silent too long")
        self._arbiter.beat(self.term.number, self._view.count)

    def _look(self, now_s: float) -> None:
        for place, beat in self._board.beats().items():
            watch = self._watches.setdefault(place, Watch(now_s))
            watch.see(beat.count, now_s)
            self._beats[place] = beat

    def _seen(self, now_s: float) -> list[SeenNode]:
        """Returns all nodes: those that have spoken in this term, and those of the generation that have yet to."""
        spoken: dict[str, SeenNode] = {}
        for place in sorted(self._beats):  # a node that lost its connection has two places
            node = SeenNode(self._beats[place], self._watches[place].unchanged_s(now_s))
            before = spoken.get(node.beat.node.id)
            if before is None or before.beat.count < node.beat.count:
                spoken[node.beat.node.id] = node
        return [*self._unspoken(now_s, spoken), *spoken.values()]

    def _unspoken(self, now_s: float, spoken: dict[str, SeenNode]) -> list[SeenNode]:
        if self._current is None:
            return []
        silent_s = max(0.0, now_s - self._began_s - self._times.grace_s)
        missing = [node for node in self._current.nodes if node.id not in spoken]
        lease_s = self._times.lease_s
        return [
            SeenNode(
                Beat(node, 0, "training", self._current.number),
                # The host of the store before has been silent for a lease: that is why this one leads.
                lease_s + now_s - self._began_s if self._former and self._former.node == node.id else silent_s,
            )
            for node in missing
        ]

    def _decide(self, now_s: float, proposal: Proposal | None) -> None:
        """Asks the policy in the background, for it may think; takes the answer if the same is still to be decided."""
        if self._asked is None:
            if proposal is None:
                return
            self._asked = proposal, self._ask(proposal)
        asked, future = self._asked
        if not wait([future], AT_ONCE_S).done:
            return
        self._asked = None
        answer = future.result()
        if proposal is None or proposal.nodes != asked.nodes:
            return  # it is asked about what is there now
        end = self._decider.answered(now_s, asked, answer, self._policy.name)
        if end is not None:
            self._end(end)
        elif answer == "ok":
            self._claim(asked)

    def _ask(self, proposal: Proposal) -> Future[Answer]:
        left_s = None if self._ends_unix_s is None else self._ends_unix_s - time.time()
        return self._asks.begin(partial(self._policy.ask, replace(proposal.facts, time_left=left_s)))

    def _claim(self, proposal: Proposal) -> None:
        number = self._current.number + 1 if self._current else 1
        wanted = proposal.generation(number, self.term.number)
        if self._call(lambda: self._arbiter.claim_generation(wanted)):
            self._current = wanted
            stderr.say(f"elastic: {_line(wanted, self._policy.name)}")
        else:
            self._current = self._call(self._arbiter.newest_generation)

    def _end(self, end: TrainingEnd) -> None:
        self._call(lambda: self._arbiter.end_term(self.term.number, end))
        self._view = self._view.followed(end=end)

    def _call(self, function: Callable[[], T]) -> T:
        """Bounds what asks the run directory. Raises NoAnswer."""
        return self._directory.call(function, self._times.call_s)


def _line(generation: Generation, policy: str) -> str:
    hosts = ", ".join(node.host for node in generation.nodes)
    changes = [
        f"{word} {', '.join(names)}"
        for word, names in (("lost", generation.lost), ("joined", generation.joined))
        if names
    ]
    silent = f" after {generation.silent_s:.1f} s of silence" if generation.lost else ""
    why = "; ".join(changes) or "processes ended"
    return f"generation {generation.number}: {why}{silent}; policy {policy} said ok; on {hosts}"
