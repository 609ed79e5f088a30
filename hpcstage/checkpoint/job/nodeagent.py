"""Keeps the share that one node has in the checkpoints of a job: does what the council of all agents decides. A job on
one node is a council of one.

Owns the loop and the report. It works in a process of its own, one thing after the other; what it does in the target,
it does in another process (`targetprocess`). What it restores and saves is in `work`, what it brings to the target in
`targetwork`.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path

from hpcstage.checkpoint.entries import CompleteEntries, mark_of
from hpcstage.checkpoint.generations.files import OURS
from hpcstage.checkpoint.generations.manifest import GenerationManifest
from hpcstage.checkpoint.job.completed import CompletedNote
from hpcstage.checkpoint.job.coordinator import CouncilTerms
from hpcstage.checkpoint.job.council import Council, Do, Say
from hpcstage.checkpoint.job.late import end_alone
from hpcstage.checkpoint.job.ledger import EntryState, JobLedger, JobOrder, Lane, OrderKind, Outcome
from hpcstage.checkpoint.job.leftovers import bytes_of
from hpcstage.checkpoint.job.pacing import SHARE, ProcessorShare
from hpcstage.checkpoint.job.place import (
    HIDDEN,
    CannotKeep,
    CheckpointCharter,
    CheckpointPlace,
    CheckpointReport,
    DrainTerms,
    UndrainedEntry,
)
from hpcstage.checkpoint.job.plain import names_in
from hpcstage.checkpoint.job.talking import Heard, PresentNodes, Talk, wait
from hpcstage.checkpoint.job.targetprocess import TargetProcess
from hpcstage.checkpoint.job.targetwork import TargetWork
from hpcstage.checkpoint.job.work import NodeWork
from hpcstage.checkpoint.protection.exchangesocket import LinkLost
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.checkpoint.protection.link import Encoded
from hpcstage.reading import readable
from hpcstage.upload.copying import Pace

CONNECT_S = 60.0
"""The longest wait for the other nodes before the command starts."""
APART_S = 20.0
"""At the end the other nodes are waited for so long."""
END_S = 5.0
"""The longest wait at the end until the command's entries are closed."""
_LOOK_S = 0.05
_GOODBYE_S = 3.0
_LONGEST_WAIT_S = 5.0
_DIED = "the process that copied it died"
_NOT_CONNECTED = "the nodes of the job are not connected"


class NodeAgent:
    """Keeps one node's directory in a job. `commands` is a descriptor that has a byte when the command has ended."""

    def __init__(
        self,
        place: CheckpointPlace,
        charter: CheckpointCharter,
        node_dir: Path,
        commands: int,
        tell: Callable[[CheckpointReport], object],
        terms: DrainTerms,
    ) -> None:
        """`node_dir` is where the exchange of this node is found. Puts the newest state into the directory, as all
        nodes do. Raises CannotKeep, OSError and HpcstageError."""
        self._began_s = time.monotonic()
        self._place = place
        self._charter = charter
        self._commands = commands
        self._tell_report = tell
        self._terms = terms
        self._me = charter.nodes.index(charter.node)
        self._talk = Talk(node_dir, Path(charter.group_dir), self._me, is_alone=charter.is_alone)
        asked = None if charter.protect is None else CodeSize(*charter.protect)
        council_terms = CouncilTerms(asked, charter.drain_every, lambda: os.urandom(16).hex(), charter.is_elastic)
        self._council = Council(self._me, charter.nodes, council_terms, charter.domain)
        self._has_ended = self._is_orderly = False
        capped = ProcessorShare(SHARE, lambda: self._has_ended or bool(readable([commands], 0)) or terms.hurries())
        self._work = NodeWork(place, charter, self._me, self._talk, capped, lambda: self._look(time.monotonic()))
        self._target = TargetWork(place, charter, self._me, node_dir)
        self._target_process = TargetProcess()
        self._entries: CompleteEntries | None = None
        self._noted: CompletedNote | None = None
        self._restored: dict[str, str] = {}
        """The entries that were put into the directory at the start, with their marks."""
        self._is_gone = False
        self._encoding: dict[tuple[int, str, int], JobOrder] = {}
        self._lost: set[str] = set()
        self._why_refused = ""
        self._is_ready = False
        self._restored_s = 0.0
        self._unclosed: tuple[str, ...] = ()
        self._undrained: tuple[UndrainedEntry, ...] = ()
        self._unclosed_bytes = 0
        self._said: tuple[object, ...] = ()
        self._begin()

    def _begin(self) -> None:
        self._council.find(*self._work.found())
        deadline = self._began_s + CONNECT_S
        while not self._is_ready:
            self._turn()
            if self._why_refused:
                raise CannotKeep(self._why_refused)
            if len(self._council.present) == len(self._charter.nodes):
                deadline = time.monotonic() + CONNECT_S
            if time.monotonic() > deadline:
                raise CannotKeep(_NOT_CONNECTED)
            if readable([self._commands], 0):
                raise CannotKeep("the command ended before it began")
        self._restored_s = round(time.monotonic() - self._began_s, 3)

    def keep(self) -> None:
        """Does what is to be done until the command has ended on all nodes, and all of it is in the target."""
        try:
            self._report()
            apart_until = math.inf
            while not self._council.is_over:
                self._turn()
                if self._has_ended and self._talk.apart_since is not None:
                    apart_until = min(apart_until, time.monotonic() + APART_S)
                    if time.monotonic() >= apart_until:
                        self._target_process.close()
                        self._end_apart()
                        break
                else:
                    apart_until = math.inf
            self._say_goodbye()
        finally:
            if self._entries is not None:
                self._entries.close()
            self._target_process.close()
        self._report()
        self._talk.close()
        self._work.close()

    # ---- the loop

    def _turn(self) -> None:
        """Takes in what happened, does what is to be done, and waits if that was nothing."""
        now = time.monotonic()
        self._look(now)
        self._hear_command()
        if self._terms.hurries():
            self._council.hurry()
        has_ended_one = self._target_process.turn()
        news = self._talk.news()
        for one in news:
            if isinstance(one, PresentNodes):
                self._meet(one)
            elif isinstance(one, Heard):
                self._council.heard(one.node, one.report)
            else:
                self._encoded(one)
        acts = self._council.take(now)
        for act in acts:
            if isinstance(act, Say):
                self._talk.say(act.report, act.to)
            elif isinstance(act, Do):
                self._do(act.order)
            else:
                self._put_in_place(act.order)
        if acts:
            self._report()
        elif not news and not has_ended_one:
            self._wait(now)

    def _wait(self, now: float) -> None:
        waits = [_LONGEST_WAIT_S]
        if (at := self._council.wake_at()) is not None:
            waits.append(at - now)
        if (hurry_s := self._terms.wake_after()) is not None:
            waits.append(hurry_s)
        fds = [] if self._has_ended else [self._commands]
        if self._entries is not None and not self._entries.is_gone:
            fds.append(self._entries.fd)
            if (look_s := self._entries.wake_after(now)) is not None:
                waits.append(look_s)
        wait(self._talk, [*fds, *self._target_process.fds], max(0.0, min(waits)))

    def _meet(self, view: PresentNodes) -> None:
        if self._is_ready:
            there = {self._charter.nodes[node] for node in view.present}
            self._lost = set(self._charter.nodes) - there if there else self._lost
        self._encoding.clear()
        self._target_process.give_up()
        self._council.membership(view.number, view.present)

    def _hear_command(self) -> None:
        if self._is_ready and not self._has_ended and readable([self._commands], 0):
            self._is_orderly, self._has_ended = os.read(self._commands, 1) == b"0", True
            self._target_process.hurry()
            self._council.end(is_orderly=self._is_orderly)

    def _look(self, now: float) -> None:
        if self._entries is not None and not self._is_gone:
            self._entries.look(now)
            self._is_gone = self._entries.is_gone
            if self._noted is not None:
                self._noted.note()
            self._see(self._entries.states())

    def _see(self, states: dict[str, tuple[str, bool]]) -> None:
        found = {}
        for name, (mark, is_complete) in states.items():
            is_restored = self._restored.get(name) == mark
            found[name] = EntryState(mark, is_complete or is_restored, is_restored)
        shown = [] if self._is_gone else [name for name in self._restored if not name.startswith(HIDDEN)]
        removed = sorted(name for name in shown if name not in states)
        self._council.see(found, removed, is_gone=self._is_gone)

    # ---- orders

    def _do(self, order: JobOrder) -> None:
        """Carries out an order; that of encoding ends when the exchange says so."""
        self._work.know(order.ledger)
        kind = order.kind
        if kind is OrderKind.PROTECT:
            self._protect(order)
            return
        if kind.lane is Lane.TARGET:
            self._upload(order)
            return
        if kind is OrderKind.READY:
            outcome = self._make_ready(order)
        elif kind is OrderKind.REFUSE:
            self._why_refused = str(order.body["why"])
            outcome = Outcome(order.key)
        elif kind is OrderKind.CLOSE:
            outcome = self._close(order)
        elif kind is OrderKind.FINISH:
            outcome = self._finish(order)
        else:
            outcome = self._work.done(order)
        self._council.did(outcome)

    def _make_ready(self, order: JobOrder) -> Outcome:
        tree = self._place.tree
        if self._entries is not None:
            self._entries.close()
        self._restored = {name: mark_of(tree, name) for name in names_in(tree)}
        self._entries = CompleteEntries(tree, time.monotonic(), known=names_in(tree))
        self._entries.look(time.monotonic())  # before the program may write: what is there is complete as it is now
        self._noted = CompletedNote(self._place, self._charter, self._entries)
        self._look(time.monotonic())
        self._is_ready = True
        self._council.ready()
        return Outcome(order.key)

    def _protect(self, order: JobOrder) -> None:
        try:
            key = self._work.encode(order)
        except (LinkLost, ValueError) as error:
            self._council.did(Outcome(order.key, str(error)))
            return
        if key is None:
            self._council.did(Outcome(order.key))
        else:
            self._encoding[key] = order

    def _encoded(self, event: Encoded) -> None:
        order = self._encoding.pop((event.generation.number, event.generation.attempt, event.trial), None)
        if order is not None:
            facts = {"seconds": event.seconds, "bytes": event.bytes_sent}
            self._council.did(Outcome(order.key, event.failure, facts=facts))

    # ---- the target

    def _upload(self, order: JobOrder) -> None:
        """Has this node's part of an order about the target carried out in the other process."""
        self._apart(lambda pace: self._target.done(order, pace), order, self._council.did)

    def _put_in_place(self, order: JobOrder) -> None:
        """Has what all nodes brought to the target given its names there."""
        there = {self._charter.nodes[index]: index for index in self._council.present}
        self._apart(
            lambda pace: self._target.placed(order, there, pace),
            order,
            lambda outcome: self._council.placed(order, outcome),
        )

    def _apart(self, work: Callable[[Pace], Outcome], order: JobOrder, take: Callable[[Outcome], object]) -> None:
        """Has something done in the other process."""
        terms = self._terms

        def done(is_hurried: Callable[[], bool]) -> tuple[Outcome, dict[str, str]]:
            share = ProcessorShare(SHARE, lambda: is_hurried() or terms.hurries())
            outcome = work(share.and_below(terms.pace))
            return outcome, {name: made.to_bytes().decode() for name, made in self._target.superseded.items()}

        def taken(outcome: Outcome, known: dict[str, str]) -> None:
            read = {name: GenerationManifest.from_bytes(text.encode()) for name, text in known.items()}
            self._target.superseded = read
            take(outcome)

        died = Outcome(order.key, _DIED)
        self._target_process.begin(done, taken, lambda: take(died))
        if self._has_ended:
            self._target_process.hurry()

    # ---- the end

    def _close(self, order: JobOrder) -> Outcome:
        """Looks for the last time. After an orderly end all is complete that is closed."""
        tree, now = self._place.tree, time.monotonic()
        if self._entries is not None:
            self._entries.look_at_end(now)
            self._is_gone = self._entries.is_gone
            if self._noted is not None:
                self._noted.note()
            states = self._entries.states()
            self._entries.close()
            self._entries = self._noted = None
            if self._is_gone and not tree.is_dir():
                states = {}
            elif order.body["is_orderly"]:
                states = {name: (mark_of(tree, name), True) for name in all_closed(tree)}
            self._see(states)
        return Outcome(order.key)

    def _finish(self, order: JobOrder) -> Outcome:
        if not (self._is_gone and not self._place.tree.is_dir()):
            missing, beside = self._work.carry_leftovers(order.ledger, self._restored)
            if lost := ", ".join(order.body["lost"]):
                why = f"the parts of {lost} are missing, which was lost; what there is lies there as"
                missing += [UndrainedEntry(name, f"{why} {other}") for name, other in beside.items()]
            self._undrained, self._unclosed = tuple(missing), tuple(beside.values())
            self._unclosed_bytes = bytes_of(self._place, beside)
        last, ledger = order.ledger.last, order.ledger
        if last is not None and ledger.drained != last.number:
            self._undrained += tuple(
                UndrainedEntry(name, ledger.undrained_why)
                for name in last.share(self._charter.node)
                if name in last.own or last.marks(name) != ledger.drained_marks.get(name)
            )
        elif order.by == self._me:
            self._undrained += tuple(
                UndrainedEntry(name, "parts of it are gone with their nodes") for name in ledger.gone
            )
        return Outcome(order.key)

    def _end_apart(self) -> None:
        """Ends without the others, which are not connected any more."""
        self._close(JobOrder(0, 0, 0, OrderKind.CLOSE, {"is_orderly": self._is_orderly}))
        ledger = self._council.ledger
        end = end_alone(self._place, self._charter, ledger.last)
        leftovers, beside = self._work.carry_leftovers(ledger, self._restored, end.brought)
        self._undrained, self._unclosed = (*end.missing, *leftovers), tuple(beside.values())
        self._unclosed_bytes = bytes_of(self._place, beside)

    def _say_goodbye(self) -> None:
        """Stays until the others have carried out the last order, too: the coordinator knows, and goes first."""
        deadline = time.monotonic() + _GOODBYE_S
        while self._council.is_over and not self._council.are_all_over and time.monotonic() < deadline:
            for one in self._talk.news():
                if isinstance(one, Heard):
                    self._council.heard(one.node, one.report)
                elif isinstance(one, PresentNodes):
                    return
            for act in self._council.take(time.monotonic()):
                if isinstance(act, Say):
                    self._talk.say(act.report, act.to)
            wait(self._talk, [], max(0.0, min(0.1, deadline - time.monotonic())))

    # ---- the report

    def _report(self) -> None:
        ledger = self._council.ledger
        said = ledger, self._unclosed, self._undrained, self._is_gone, tuple(sorted(self._lost)), self._restored_s
        if said != self._said:
            self._said = said
            self._tell_report(self._reported(ledger))

    def _reported(self, ledger: JobLedger) -> CheckpointReport:
        protected = max((one.number for one in ledger.generations if one.size), default=None)
        return CheckpointReport(
            restored=ledger.restored,
            restored_s=self._restored_s,
            saved=ledger.rows,
            saved_count=ledger.saved_count,
            drained_number=ledger.drained or None,
            protection="" if self._charter.is_alone else ledger.plan or "none was needed yet",
            protected_number=protected,
            lost=tuple(sorted(self._lost)),
            refused=ledger.lines,
            undrained=self._undrained,
            unclosed=self._unclosed,
            unclosed_bytes=self._unclosed_bytes,
            findings={"beside": dict(ledger.beside)},
            files=ledger.files + len(self._unclosed),
            bytes_carried=ledger.size_bytes + self._unclosed_bytes,
            is_gone=self._is_gone and not self._place.tree.is_dir(),
        )


def all_closed(tree: Path) -> tuple[str, ...]:
    """Returns the entries that nobody has open, hidden ones, too: the command has ended. Waits for a program that lives
    on."""
    deadline = time.monotonic() + END_S
    entries = CompleteEntries(tree, time.monotonic(), 0.0, skipped=OURS)
    try:
        while True:
            entries.look(time.monotonic())
            if list(entries.names()) == names_in(tree) or time.monotonic() >= deadline:
                return entries.names()
            time.sleep(_LOOK_S)
    finally:
        entries.close()
