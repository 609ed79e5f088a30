"""Keeps the share that one node has in the checkpoints of a job: does what the council of all agents decides. A job on
one node is a council of one.

Owns the loop and the report. It works in a process of its own, one thing after the other; what it does in the target,
it does in another process: a shared file system that hangs holds up nobody else. What it restores and saves is in
`work`, what it brings to the target in `targetwork`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from hpcstage.checkpoint.entries import CompleteEntries, mark_of
from hpcstage.checkpoint.generations.files import OURS
from hpcstage.checkpoint.job.completed import CompletedNote
from hpcstage.checkpoint.job.coordinator import CouncilTerms
from hpcstage.checkpoint.job.council import Council, Say
from hpcstage.checkpoint.job.late import end_alone, unsaved
from hpcstage.checkpoint.job.ledger import EntryState, JobLedger, JobOrder, OrderKind, OrderLane, Outcome
from hpcstage.checkpoint.job.leftovers import bytes_of, place_leftovers
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
from hpcstage.checkpoint.job.targetwork import DAMAGED, TargetWork
from hpcstage.checkpoint.job.work import NodeWork
from hpcstage.checkpoint.protection.exchangesocket import LinkLost
from hpcstage.checkpoint.protection.groups import CodeSize
from hpcstage.forked import Helpers
from hpcstage.jsonform import read
from hpcstage.protocol.coding import EncodeEnded
from hpcstage.reading import readable
from hpcstage.upload.target import Target

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
_UPLOAD = "upload"
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
        self._target = TargetWork(place, charter, self._me, node_dir, self._begin_naming)
        self._helpers = Helpers()
        self._hurried = mmap.mmap(-1, 1)
        """Not zero once nobody is slowed down any more by what is done in the target."""
        self._next_upload: JobOrder | None = None
        """The order about the target that is carried out next."""
        self._naming = mmap.mmap(-1, 1)
        """Not zero once what all brought gets its names in the target."""
        self._entries: CompleteEntries | None = None
        self._noted: CompletedNote | None = None
        self._restored: dict[str, str] = {}
        """The entries that were put into the directory at the start, with their marks."""
        self._is_gone = False
        self._encoding: dict[int, JobOrder] = {}
        self._lost: set[str] = set()
        self._why_refused = ""
        self._is_ready = False
        self._restored_s = 0.0
        self._unclosed: tuple[str, ...] = ()
        self._undrained: tuple[UndrainedEntry, ...] = ()
        self._own_bytes = 0
        """What this node brought by itself, of which the ledger does not tell."""
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
                        self._helpers.close()
                        self._end_apart()
                        break
                else:
                    apart_until = math.inf
            self._say_goodbye()
        finally:
            if self._entries is not None:
                self._entries.close()
            self._helpers.close()
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
        has_ended_one = any(self._helpers.receive(fd) for fd in readable(self._helpers.fds(), 0))
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
            else:
                self._do(act.order)
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
        wait(self._talk, [*fds, *self._helpers.fds()], max(0.0, min(waits)))

    def _meet(self, view: PresentNodes) -> None:
        if self._is_ready:
            there = {self._charter.nodes[node] for node in view.present}
            self._lost = set(self._charter.nodes) - there if there else self._lost
        self._encoding.clear()
        if self._next_upload is not None and self._next_upload.kind is not OrderKind.PLACE:
            self._next_upload = None
        if not self._naming[0]:  # else some have their names, and the parts of the others were moved there
            self._helpers.stop(_UPLOAD)  # what comes next begins when it is gone
        self._council.membership(view.number, view.present)

    def _hear_command(self) -> None:
        if self._is_ready and not self._has_ended and readable([self._commands], 0):
            self._is_orderly, self._has_ended = os.read(self._commands, 1) == b"0", True
            self._hurried[0] = 1
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
        if kind.lane is OrderLane.TARGET:
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
        self._encoding[order.seq] = order
        why = ""
        try:
            if self._work.encode(order):
                return
        except (LinkLost, ValueError) as error:
            why = str(error)
        del self._encoding[order.seq]
        self._council.did(Outcome(order.key, why))

    def _encoded(self, event: EncodeEnded) -> None:
        order = self._encoding.pop(event.trial, None)
        if order is not None:
            facts = {"seconds": event.seconds, "bytes": event.bytes_sent}
            self._council.did(Outcome(order.key, event.failure, facts=facts))

    # ---- the target

    def _upload(self, order: JobOrder) -> None:
        """Has this node's part of an order about the target carried out in the other process."""
        self._next_upload = order
        self._begin_upload()

    def _begin_upload(self) -> None:
        """Begins the next order about the target, if the one before has gone."""
        if self._next_upload is None or self._helpers.names():
            return
        order, self._next_upload = self._next_upload, None
        self._naming[0] = 0
        there = {self._charter.nodes[index]: index for index in self._council.present}

        def work() -> bytes:
            share = ProcessorShare(SHARE, lambda: bool(self._hurried[0]) or self._terms.hurries())
            outcome = self._target.done(order, there, share.and_below(self._terms.pace))
            return json.dumps(asdict(outcome)).encode()

        if self._helpers.start(_UPLOAD, work, lambda data: self._uploaded(order, data)) is None:
            self._uploaded(order, None)

    def _begin_naming(self) -> None:
        self._naming[0] = 1

    def _uploaded(self, order: JobOrder, data: bytes | None) -> None:
        self._naming[0] = 0
        try:
            outcome = read(Outcome, json.loads(data or b""))
        except ValueError:  # none of it, or not all
            outcome = Outcome(order.key, _DIED)
        if outcome.facts.get(DAMAGED):
            self._work.doubt()
        self._council.did(outcome)
        self._begin_upload()

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
            beside = self._carry_leftovers(order.ledger)
            if lost := ", ".join(order.body["lost"]):
                why = f"the parts of {lost} are missing, which was lost; what there is lies there as"
                self._undrained += tuple(UndrainedEntry(name, f"{why} {other}") for name, other in beside.items())
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
        self._carry_leftovers(ledger, end.brought)
        self._undrained = (*end.missing, *self._undrained)
        self._own_bytes += end.size_bytes

    def _carry_leftovers(self, ledger: JobLedger, brought: Mapping[str, str] | None = None) -> dict[str, str]:
        """Brings what is in no generation to the target, under names that no program takes for checkpoints, which are
        returned. `brought` are the entries that this node brought there by itself, with their marks."""
        node = self._charter.node
        copied = {(name, mark) for host, name, mark in (one.split("\0") for one in ledger.copied) if host == node}
        known = {*self._restored.items(), *(brought or {}).items(), *copied}
        names = unsaved(self._place, node, ledger.last, known)
        missing, beside = place_leftovers(self._place, names, Target(self._charter.run))
        self._undrained, self._unclosed = tuple(missing), tuple(beside.values())
        self._own_bytes = bytes_of(self._place, beside)
        return beside

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
            findings={"beside": dict(ledger.beside)},
            bytes_carried=ledger.size_bytes + self._own_bytes,
            own_bytes=self._own_bytes,
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
