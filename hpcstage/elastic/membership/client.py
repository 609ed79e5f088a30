"""Takes part in a membership for one agent: finds the store, speaks and listens, takes over from a lost host.

The module owns the agent's thread. `torchrun`'s own thread asks what is agreed; it never waits for the network here.

A node takes the store's host for lost only if that is silent in the run directory, too. One that cannot reach the store
while its host lives is cut off: it stops training and waits to be let in again.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hpcstage import stderr
from hpcstage.elastic.membership.arbiter import Arbiter
from hpcstage.elastic.membership.leading import Leader
from hpcstage.elastic.membership.termstore import LATE_S, Board, StoreLost, connect, serve
from hpcstage.elastic.membership.values import AgentSetting, Beat, Generation, State, Term, TrainingEnd, View
from hpcstage.elastic.waiting import Caller, NoAnswer, Watch
from hpcstage.errors import HpcstageError
from hpcstage.units import format_duration

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

T = TypeVar("T")
_WATCHERS = 4
"""The number of nodes, by rank, that always watch the store's host in the run directory; others do in its silence."""


class CutOff(HpcstageError):
    """The store cannot be reached from here, though its host lives."""


class TrainingEnded(HpcstageError):
    """The training ends on every host."""

    def __init__(self, end: TrainingEnd) -> None:
        super().__init__(end.line)
        self.exit_code = end.exit_code


class MembershipClient:
    """Takes part in a membership for one agent."""

    def __init__(self, arbiter: Arbiter, setting: AgentSetting) -> None:
        self._arbiter = arbiter
        self._setting = setting
        self._changed = threading.Condition()
        self._beat = Beat(setting.node, 0, "ready", 0)
        self._agreed: Generation | None = None
        self._view = View(0)
        self._end: TrainingEnd | None = None
        self._error: Exception | None = None
        self._contact_s = time.monotonic()
        self._leader: Leader | None = None
        self._term: Term | None = None
        self._has_heard = False
        """Whether a host has led the training since this node came: the word of one that is lost may still be there."""
        self._board: Board | None = None
        self._place = 0
        self._host_watch = Watch(time.monotonic())
        self._newest: Term | None = None
        self._looked_s = time.monotonic()
        self._directory = Caller(f"the run directory {arbiter.directory}")
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elastic membership", daemon=True)

    def start(self) -> None:
        """Begins to look for the store."""
        self._thread.start()

    def next_generation(self) -> Generation:
        """Says that this node has no processes and is ready for some, and returns the membership in which it trains.

        Raises what ended the thread. A spare waits as long as the others train; the thread bounds the wait for a store,
        and the store's host the wait for the policy.
        """
        before = self._beat.generation
        self.offer()
        with self._changed:
            while not self._changed.wait_for(lambda: self._over() or self._member_since(before) is not None, 1.0):
                if not self._thread.is_alive():
                    raise StoreLost(f"{self._setting.node.host} has left the training")
        agreed = self.taken()
        assert agreed is not None
        return agreed

    def offer(self) -> None:
        """Says that this node has no processes that train, and is ready for some."""
        self._say("ready", self._beat.generation)

    def tell(self, progress: Mapping[str, float]) -> None:
        """Takes what this node's processes say of the training, for the policy."""
        with self._changed:
            self._beat = replace(self._beat, progress=progress)

    def tell_state(self, has_state: bool | None) -> None:
        """Takes whether this node's processes have a state to go on from, or could load one."""
        with self._changed:
            self._beat = replace(self._beat, has_state=has_state)

    def tell_unreached(self, nodes: Collection[str]) -> None:
        """Takes the nodes, by their ids, that this node's processes do not reach in the generation in which they
        train."""
        with self._changed:
            self._beat = replace(self._beat, unreached=tuple(sorted({*self._beat.unreached, *nodes})))
        self._wake.set()

    def taken(self) -> Generation | None:
        """Returns the membership in which this node trains from now on, if one is agreed on since `offer`. Raises what
        ended the thread."""
        with self._changed:
            self._raise_over()
            agreed = self._member_since(self._beat.generation)
        if agreed is not None:
            self._say("training", agreed.number)
            if self._setting.joins:
                stderr.say(f"elastic: {self._setting.node.host} trains in generation {agreed.number}")
        return agreed

    def must_stop(self) -> bool:
        """Returns whether this node may not train in its generation any more. Raises what ended the thread."""
        with self._changed:
            self._raise_over()
            lease_s = self._setting.times.lease_s
            # The others train on without this node when it has been silent for a lease.
            is_cut = time.monotonic() - self._contact_s > 2 * lease_s
            mine = self._beat.generation
            return is_cut or self._view.generation > mine or (self._view.is_over and self._view.generation == mine)

    @property
    def end(self) -> TrainingEnd | None:
        """Why the training ends on every host, if it does."""
        return self._end

    def put(self, name: str, value: object) -> None:
        """Keeps a value in the store. Raises StoreLost."""
        self._connected().put(name, value)

    def get(self, name: str) -> object:
        """Returns a value of the store, or None. Raises StoreLost."""
        return self._connected().get(name)

    def part(self, name: str) -> Store:
        """Returns a part of the store, for others than this room. Raises StoreLost."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        if self._term is None:
            raise StoreLost("the store is lost")
        return PrefixStore(name, self._store_of(self._term, self._setting.times.call_s))

    def finish(self, limit_s: float) -> None:
        """Says that this node has finished, and stays until all others have, at most so long: who leaves before is
        taken for lost if this node leads."""
        self._say("finished", self._beat.generation)
        with self._changed:
            self._changed.wait_for(lambda: self._over() or not self._thread.is_alive(), limit_s)

    def leave(self, *, has_finished: bool) -> None:
        """Says that this node goes, and ends the threads. The store's host waits for the others, up to a lease."""
        self._say("finished" if has_finished else "left", self._beat.generation)
        board = self._board
        if board is not None:
            with contextlib.suppress(StoreLost):
                board.tell(self._place, self._next_beat())
        leader = self._leader
        if leader is not None:
            leader.stop(self._setting.times.lease_s, awaits_end=has_finished)
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(3 * self._setting.times.call_s)

    def _connected(self) -> Board:
        board = self._board
        if board is None:
            raise StoreLost("the store is lost")
        return board

    def _say(self, state: State, generation: int) -> None:
        with self._changed:
            self._beat = replace(self._beat, state=state, generation=generation, unreached=())
        self._wake.set()

    def _next_beat(self) -> Beat:
        with self._changed:
            self._beat = replace(self._beat, count=self._beat.count + 1)
            return self._beat

    def _member_since(self, number: int) -> Generation | None:
        agreed = self._agreed
        if agreed is None or agreed.number <= number or agreed.rank(self._setting.node.id) is None:
            return None
        return agreed if not self._view.is_over or self._view.generation != agreed.number else None

    def _over(self) -> bool:
        return self._end is not None or self._error is not None

    def _raise_over(self) -> None:
        if self._end is not None:
            raise TrainingEnded(self._end)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while not self._stopping.is_set() and self._end is None:
                try:
                    self._meet()
                    self._live()
                except (StoreLost, NoAnswer, OSError):  # the store or the run directory cannot be reached
                    self._forget_store()
                    if time.monotonic() - self._contact_s > self._setting.times.join_limit_s:
                        raise
        except Exception as error:  # noqa: BLE001 - torchrun's thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            self._directory.close()

    def _forget_store(self) -> None:
        if self._board is not None:
            self._board.close()
        self._board = None
        self._wake.wait(self._setting.times.beat_s)
        self._wake.clear()

    def _meet(self) -> None:
        """Connects to the store, wherever it is; makes it here if there is none, or its host is lost."""
        began_s = time.monotonic()
        while not self._stopping.is_set():
            now_s = time.monotonic()
            term = self._watch_host(now_s)
            if now_s - began_s > self._setting.times.join_limit_s:
                raise self._cut_off(term)
            if term is None:
                if self._setting.may_begin:
                    self._take_over(None)
                    continue
            elif self._ended_in(term):
                return
            elif (silent_s := self._host_watch.unchanged_s(now_s)) >= self._setting.times.lease_s:
                if self._may_take_over and silent_s >= self._take_over_s():
                    self._take_over(term)
                    continue
            elif self._joined(term, self._setting.times.lease_s - silent_s):
                return
            self._stopping.wait(self._pause_s(term))

    def _pause_s(self, term: Term | None) -> float:
        """Returns the time until a look at the run directory can show something."""
        beat_s = self._setting.times.beat_s
        if term != self._newest:
            return 0.0  # the store has moved
        left_s = self._setting.times.lease_s - self._host_watch.unchanged_s(time.monotonic())
        if term is None or not self._may_take_over or left_s <= 0:
            return beat_s
        return min(beat_s, left_s)

    def _take_over_s(self) -> float:
        """Returns the silence of the store's host after which this node takes the store over. Those that train come
        first: a node that does not may be cut off from them, and has no state that is new."""
        newest = self._ask_directory(self._arbiter.newest_generation)
        trains = newest is None or newest.rank(self._setting.node.id) is not None
        return self._setting.times.lease_s * (1 if trains else 2)

    def _watch_host(self, now_s: float) -> Term | None:
        try:
            term, beat = self._ask_directory(lambda: (self._arbiter.newest_term(), self._arbiter.last_beat()))
        except (NoAnswer, OSError):
            self._host_watch.miss(time.monotonic())
            raise
        self._host_watch.see((term, beat), now_s)
        self._newest, self._looked_s = term, now_s
        return term

    def _watch_meanwhile(self, term: Term) -> None:
        """Watches the store's host in the run directory while an answer of the store is late: otherwise the host's last
        beat would be seen only when the wait is over. Raises StoreLost if the store has moved."""
        now_s = time.monotonic()
        if now_s - self._looked_s < self._setting.times.beat_s:
            return
        newest = self._watch_host(now_s)
        if newest is not None and newest.number > term.number:
            raise StoreLost("the store has moved")

    def _ended_in(self, term: Term) -> bool:
        """Returns whether the training, in which this node was or which it was to join, has ended in this term."""
        was_in = self._term is not None and self._term.number == term.number
        if not (was_in or self._setting.joins):
            return False
        end = self._ask_directory(lambda: self._arbiter.end_of(term.number))
        self._set_end(end)
        return end is not None

    @property
    def _may_take_over(self) -> bool:
        """Whether this node may go on where the store's host was lost: who is to join has to have been there before."""
        return not self._setting.joins or self._has_heard

    def _joined(self, term: Term, limit_s: float) -> bool:
        times = self._setting.times
        limit_s = min(times.call_s, max(limit_s - LATE_S, times.beat_s))
        watch = partial(self._watch_meanwhile, term)
        try:
            board = Board(self._store_of(term, limit_s, watch), self._arbiter.signer, times.call_s)
            self._place = board.join(watch)
        except StoreLost:
            return False
        if self._setting.joins and self._term is None:
            stderr.say(f"elastic: {self._setting.node.host} has come to the training and waits to be taken")
        self._board, self._term = board, term
        return True

    def _store_of(self, term: Term, limit_s: float, meanwhile: Callable[[], object] = int) -> Store:
        address = "localhost" if term.node == self._setting.node.id else term.address
        return connect(address, term.port, limit_s, meanwhile)

    def _take_over(self, term: Term | None) -> None:
        """Makes a store on this host, and claims the next term for it."""
        number = 1 if term is None else term.number + 1
        time.sleep(random.uniform(0, self._setting.times.beat_s))  # noqa: S311 - so that few hosts make one for nothing
        limit_s = self._setting.times.call_s
        if self._newest_number() >= number:
            return
        try:
            server = serve(self._setting.port if term is None else 0, limit_s)
        except StoreLost:
            if self._newest_number() >= number:
                return  # another agent of this host has it
            server = serve(0, limit_s)
        node = self._setting.node
        wanted = Term(number, node.id, node.host, node.address, server.port)
        if not self._ask_directory(lambda: self._arbiter.claim_term(wanted)):
            return
        heard = self._view if self._view.generation else None
        self._leader = Leader(self._arbiter, server, wanted, self._setting, heard)
        self._leader.start()
        if term is not None:
            stderr.say(f"elastic: {node.host} has taken the store over from {term.host}, which was silent too long")

    def _newest_number(self) -> int:
        term = self._ask_directory(self._arbiter.newest_term)
        return term.number if term else 0

    def _live(self) -> None:
        """Speaks and listens until the store is lost, the training ends, or this node leaves."""
        board, term = self._board, self._term
        if board is None or term is None:
            return
        watch = Watch(time.monotonic())
        heard: int | None = None
        meanwhile = partial(self._watch_meanwhile, term)
        while not self._stopping.is_set():
            if not self._is_watcher():
                self._looked_s = time.monotonic()
            view = board.tell(self._place, self._next_beat(), meanwhile)
            now_s = time.monotonic()
            if view is not None:
                self._has_heard = self._has_heard or (heard is not None and view.count != heard)
                heard = view.count
                watch.see(heard, now_s)
                if watch.unchanged_s(now_s) == 0:
                    self._take(view, now_s)
            if self._end is not None:
                return
            silent_s = watch.unchanged_s(now_s)
            if silent_s > 2 * self._setting.times.beat_s or self._is_watcher():
                self._check_host(now_s, silent_s)
            self._wake.wait(self._setting.times.beat_s)
            self._wake.clear()

    def _is_watcher(self) -> bool:
        rank = self._agreed.rank(self._setting.node.id) if self._agreed else None
        return rank is not None and rank < _WATCHERS

    def _check_host(self, now_s: float, silent_s: float) -> None:
        """Raises StoreLost if the store's host is silent, in the store and in the run directory, or has changed."""
        term = self._watch_host(now_s)
        lease_s = self._setting.times.lease_s
        has_moved = term is not None and self._term is not None and term.number > self._term.number
        if has_moved or (silent_s >= lease_s and self._host_watch.unchanged_s(now_s) >= lease_s):
            raise StoreLost("the store's host is lost")

    def _take(self, view: View, now_s: float) -> None:
        """Takes what the store's host says, and what is agreed, from the run directory."""
        agreed = self._agreed
        if view.generation > (agreed.number if agreed else 0):
            agreed = self._ask_directory(self._arbiter.newest_generation)
        with self._changed:
            self._contact_s, self._view, self._agreed = now_s, view, agreed
            if view.end is not None:
                self._end = view.end
            self._changed.notify_all()

    def _set_end(self, end: TrainingEnd | None) -> None:
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def _ask_directory(self, function: Callable[[], T]) -> T:
        return self._directory.call(function, self._setting.times.call_s)

    def _cut_off(self, term: Term | None) -> CutOff:
        waited = format_duration(self._setting.times.join_limit_s)
        host = self._setting.node.host
        if term is None:
            what = f"nobody began a store for {host} within {waited}"
            return CutOff(what, "start an agent on the host that the endpoint names")
        what = f"{host} could not reach the store of {term.host} within {waited}"
        return CutOff(what, f"let {term.address} be reachable at port {term.port}")
