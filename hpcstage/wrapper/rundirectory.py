"""Owns a directory of a run, that of `--out` or `--checkpoint`: where the command writes, and what became of its files.

`{out}` is a directory on the local disk of each node, at the same path, that the node's daemon drains to DIR, the
directory of `--out`. Where that cannot be on a node, `{out}` is DIR itself on all, and one line says why. `outdir` owns
DIR. The wrapper has the directory of the first node; the lead brings those of the others up, and what became of their
files is in the group's directory. A run on one node has no others. `checkpoints` has what is different there.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpcstage import inherited, owner
from hpcstage.errors import HpcstageError, LocalDiskProblem, NotDrained
from hpcstage.node import kept
from hpcstage.node.directory import outputs_base
from hpcstage.node.keptdirectory import CannotFill, Earlier, KeptDirectory, NodeResult, take_earlier
from hpcstage.problem import Problem
from hpcstage.record.parts.outputs import OutputsPart
from hpcstage.wrapper import leftovers, messages, outdir, outputpart
from hpcstage.wrapper.leftovers import LONGEST_S, LateDrain
from hpcstage.wrapper.outdir import NamedDirectory

if TYPE_CHECKING:
    from pathlib import Path

    from hpcstage.config import Config
    from hpcstage.job import Job
    from hpcstage.job.localdir import LocalDir
    from hpcstage.job.together import Grouping
    from hpcstage.node.control import DaemonControl
    from hpcstage.record.parts.run import RunPart
    from hpcstage.wrapper.leadlink import OtherNodes

EARLIER_S = 3600.0
"""The longest time for which what killed runs left is copied to DIR, where the command looks for it."""
_SHOWN = 20
"""The lines of names that are printed at most."""
_LOOK_S = 0.002
_TELLS_AFTER_S = 3.0
"""A drain that takes longer at the end of the command is told of."""
_LEFT_S = 1.0
"""The longest wait for the end of programs that the command left behind."""
_FREE_S = 2.0
"""The longest wait until nobody else works on the files of a daemon that died."""
_NOT_WATCHED = "the staging daemon does not watch the local directory"
_NOT_REACHED = "the other nodes of the job are not reached"


@dataclass(frozen=True)
class RunNode:
    """The node of this wrapper in a run."""

    run_id: str
    suffix: str = ""
    """What the names of the node's directories end in, where several nodes are one machine."""
    why_not: str = ""
    """Why what the command writes cannot be kept on the local disk; empty: it can."""


class RunDirectory:
    """The directory of `--out` of one run. `part` is its part of the record."""

    def __init__(self, named: NamedDirectory, config: Config, job: Job, node: RunNode) -> None:
        self.named = named
        self.part = OutputsPart(directory="")
        self.own: KeptDirectory | None = None
        """The local directory of this node; None where the command writes to DIR."""
        self.lock: int | None = None
        """The descriptor of DIR's lock. The daemon keeps it, too: it copies to DIR also if this process was killed."""
        self.exit_code = 0
        """The exit code that takes the place of 0; not 0 where files were not drained."""
        self._config = config
        self._job = job
        self._node = node
        self._hosts = [socket.gethostname()]
        """The nodes of the run, this one first."""
        self._earlier: Earlier = []
        self._told: dict[str, Any] = {}
        self._goes_with_job = False
        self._since = self._free_until = 0.0
        self._is_orderly = self._has_told = self._has_told_of_nodes = False
        self._late: LateDrain | None = None

    # ---- before the command

    def take_earlier(self, above: Path) -> None:
        """Takes the checkpoints that runs which are over left here for the same DIR, before anybody drains them."""
        asked = self.named.asked(self._config)
        if self.named.kind is kept.CHECKPOINTS and asked is not None and not self._node.why_not:
            self._earlier = take_earlier(above, os.path.realpath(inherited.directory() / asked))

    def open(self, local: LocalDir) -> None:
        """Makes DIR and the local directory. Raises UsageError if DIR is on the local disk, or if another run uses it,
        and NotStarted."""
        named, cwd, host = self.named, inherited.directory(), socket.gethostname()
        asked = named.asked(self._config)
        assert asked is not None
        if not self._node.why_not:
            named.check_disk(asked, cwd, local)
        self.part = OutputsPart(directory=named.made(asked, cwd))
        if self._node.why_not:
            self.give_up(self._node.why_not, is_told=not self._job.rank)
            return
        self.lock = outdir.lock_for_run(self.part.directory, f"{named.option} {asked}", self._node.run_id, self._job)
        try:
            names, above = (kept.named_after(self.part.directory), self._node.run_id), outputs_base(local, host)
            self.own = KeptDirectory(above, named.kind, self._node.run_id, names, self._node.suffix)
        except LocalDiskProblem as error:
            self.give_up(error.what)
        else:
            self.part = replace(self.part, local_dir=os.fspath(self.own.place.tree))
            self._goes_with_job = local.goes_with_job

    def fill(self, group: Grouping | None) -> None:
        """Takes the nodes of the run, before a daemon starts, and fills the local directory. Raises NotStarted and
        CannotProtect."""
        if self.own is None:
            return
        if group is not None:
            self._hosts = list(group.hosts)
        self._told = self._terms(group)
        taken = self._told.get("earlier", [[]])[0]
        try:
            self.own.fill(self._told, "" if group is None else self._hosts[0], taken)
        except CannotFill as error:
            self.give_up(str(error))
            return
        if self._goes_with_job:
            text = f"{self.named.kind.what} that are not copied then are lost"
            messages.warn(f"{self.own.place.path.parent.parent} may be deleted with the job: {text}")

    def _terms(self, group: Grouping | None) -> dict[str, Any]:  # noqa: ARG002
        """Returns what all nodes of the run are told of the directory."""
        target = self.part.directory
        return {"run_id": self._node.run_id, "target": target, "target_inode": os.stat(target).st_ino}

    @property
    def out(self) -> str:
        """The directory that the command writes to."""
        return self.part.local_dir or self.part.directory

    def in_spec(self) -> dict[str, Any]:
        """Returns what the daemon is told of the directory."""
        return {} if self.own is None else {self.named.kind.key: os.fspath(self.own.place.path)}

    def in_lead(self) -> dict[str, dict[str, Any]]:
        """Returns what the lead is told, where other nodes have such a directory, too."""
        return {} if self.own is None else {self.named.kind.key: self._told}

    def is_watched(self, control: DaemonControl, others: OtherNodes | None, timeout_s: float) -> bool:
        """Tells whether the daemons of all nodes watch, since a program finds the same path everywhere, or none has to.
        Where one does not in time, `{out}` becomes DIR."""
        self._since = self._since or time.monotonic()
        deadline = time.monotonic() + timeout_s
        while self.own is not None:
            own, theirs = self.own.watched_why(), self._unwatched_why(others)
            if own is None and control.dead():
                own = _NOT_WATCHED
            if why := own or theirs:
                self.give_up(why)
            elif own is not None and theirs is not None:
                self._tell_of_nodes()
                break
            elif time.monotonic() > self._since + self.named.watched_s:
                silent = f"not all nodes said in time that they {self.named.silent}"
                self.give_up(silent if theirs is None else _NOT_WATCHED)
            elif time.monotonic() >= deadline:
                return False
            else:
                time.sleep(_LOOK_S)
        return True

    def _unwatched_why(self, others: OtherNodes | None) -> str | None:
        if len(self._hosts) == 1:
            return ""
        return _NOT_REACHED if others is None else others.lead.unwatched_why(self.named.kind, 0.0)

    def _tell_of_nodes(self) -> None:
        if len(self._hosts) > 1 and self.named is outdir.OUT and not self._has_told_of_nodes:
            self._has_told_of_nodes = True
            where = f"what others write is in {self.part.directory}, not in {{out}}"
            messages.warn(f"each node has a {{out}} of its own; {where}")

    def give_up(self, why: str, *, is_told: bool = True) -> None:
        """Makes the command's directory DIR; to be called before the command starts only. What killed runs left is
        copied to DIR first, where the command looks for it. Raises NotStarted."""
        if self.part.why:
            return
        self._drain_earlier(EARLIER_S)
        if self.own is not None:
            self.own.remove()
            self.own = None
        self.part = replace(self.part, local_dir=None, why=why)
        if is_told:
            messages.warn(f"{self.named.placeholder} is {self.part.directory}: {why}")

    def abandon(self) -> None:
        """Removes what was made; to be called before the command starts only."""
        if self.own is not None:
            self.own.remove()
        self._close()

    # ---- after the command

    def end(self, *, is_orderly: bool) -> bool:
        """Notes that the command has ended, and whether with exit code 0. Tells whether the daemon has something to
        drain."""
        self._since = time.monotonic()
        self._is_orderly = is_orderly
        return self.own is not None

    def is_drained(self, timeout_s: float, *, is_answered: bool) -> bool:
        """Tells whether nothing more can be done for the files; to be asked after `end`. `is_answered`: the daemons
        have said that they are done, or are dead."""
        if self.own is None:
            return True
        if not self._has_told and time.monotonic() > self._since + _TELLS_AFTER_S:
            self._has_told = True
            what = self.named.kind.what
            messages.warn(f"the command has ended; its {what} are being copied to {self.part.directory}")
        if self._late is not None:
            return self._late.is_over(timeout_s)
        if not is_answered:
            return False
        return self._said_by_daemon(self.own) is not None or not self._drains_late(self.own)

    def _said_by_daemon(self, own: KeptDirectory) -> dict[str, Any] | None:
        """Returns the daemon's report; None if it says nothing of what is there: the daemon stops watching a directory
        that is removed, and a program may make it again."""
        report = own.report()
        return None if report is None or (report.get("is_gone") and own.place.tree.is_dir()) else report

    def _drains_late(self, own: KeptDirectory) -> bool:
        """Begins to drain without the daemon, once nobody else works on the files. Tells whether that can be."""
        if (lock := own.exchange_lock()) is not None:
            owning = "" if self.lock is None else self._node.run_id
            self._late = LateDrain(own.place, lock, LONGEST_S, is_orderly=self._is_orderly, owning=owning)
            return True
        self._free_until = self._free_until or time.monotonic() + _FREE_S
        time.sleep(_LOOK_S)
        return time.monotonic() < self._free_until

    # ---- what became of it

    def collect(self, others: OtherNodes | None) -> list[Problem]:
        """Takes what became of the files, after the daemon's end, says what is not in DIR, and lets go of it. Deletes
        the local directory only if nothing is left in it. Returns what the record says of that."""
        if self.own is not None:
            self._collect(self.own, others)
            self._tell_differences()
        self._close()
        if others is not None:
            others.forget(self.named.kind)
        first = next((one.host for one in self.part.named("undrained")), None)
        left = self._left_at(first, others)
        return outputpart.problems(self.part, left, self.named.kind.what, self.named.unfinished)

    def _collect(self, own: KeptDirectory, others: OtherNodes | None) -> None:
        took_s = round(time.monotonic() - self._since, 3)
        results: dict[str, NodeResult | None] = {self._hosts[0]: self._own_result(own)}
        if others is not None:
            results |= {host: others.result_of(host, self.named.kind) for host in self._hosts[1:]}
        results = self._settled(results)
        parts: dict[str, OutputsPart] = {}
        for host, result in results.items():
            left = self._left_at(host, others)
            parts[host] = part = outputpart.of_node(result, replace(self.part, local_dir=left.tree, took_s=took_s))
            for line in outputpart.lines(part, left):
                messages.error(line)
            if part.undrained_count or part.is_gone:
                self.exit_code = NotDrained.exit_code
        self.part = self._joined(parts, results)
        if not self.exit_code:
            self._drain_earlier(leftovers.AT_START_S)
        if not parts[self._hosts[0]].undrained_count:
            self._end(own)

    def _own_result(self, own: KeptDirectory) -> NodeResult:
        if self._late is not None:
            self._late.end()
            return replace(own.result(self._late.report), is_late=True)
        if (report := self._said_by_daemon(own)) is not None:
            return own.result(report)
        silent = own.report() is None
        why = "the staging daemon did not say what became of them" if silent else "another process is working on them"
        return NodeResult(outputpart.not_drained(why), is_late=True)

    def _settled(self, results: dict[str, NodeResult | None]) -> dict[str, NodeResult | None]:
        """Returns what became of the files of each node, by what the nodes say."""
        return results

    def _joined(self, parts: Mapping[str, OutputsPart], results: Mapping[str, NodeResult | None]) -> OutputsPart:  # noqa: ARG002
        """Returns what became of the files of all nodes."""
        return outputpart.joined(parts) if len(parts) > 1 else parts[self._hosts[0]]

    def _left_at(self, host: str | None, others: OtherNodes | None) -> outputpart.LeftAt:
        """Returns where what a node could not drain still is."""
        left = outputpart.LeftAt(socket.gethostname(), self.part.local_dir)
        if host is not None and self.own is not None and others is not None and host in others.suffixes:
            tree = self.own.of_node(others.suffixes[host]).tree
            left = outputpart.LeftAt(others.machine or host, os.fspath(tree))
        return replace(left, goes_with_job=self._goes_with_job)

    def _end(self, own: KeptDirectory) -> None:
        """Deletes the local directory, of which all is in DIR."""
        if own.place.is_left(_LEFT_S):
            self._unlock()  # before the last thing that leads to DIR from here is gone
            own.place.remove()
        else:
            command = outputpart.clean_command(own.place.path.parent.parent)
            where = f"copies what they still write to {own.place.tree}"
            messages.warn(f"programs of the command live on; `{command}` {where}")

    def _tell_differences(self) -> None:
        if self.named.kind is kept.CHECKPOINTS:
            return
        found = outputpart.differences(self.part, "the command")
        for line in found[:_SHOWN]:
            messages.warn(line)
        if more := len(found) - len(found[:_SHOWN]):
            where = f"in {self.part.directory} are not as the command left them: see the record"
            messages.warn(f"{more} more names {where}")

    def tell(self, run: RunPart) -> None:
        """Puts what became of the files into the wrapper's part of the record."""
        run.drains[self.named.key] = self.part

    # ---- locks

    def _drain_earlier(self, longest_s: float) -> None:
        for earlier, lock in self._earlier:
            with suppress(HpcstageError):  # a signal came
                leftovers.drain(earlier, lock, longest_s, owning=self._node.run_id)

    def _close(self) -> None:
        """Lets go of the locks."""
        if self._late is not None:
            self._late.end()
        self._unlock()
        if self.own is not None:
            self.own.let_go()
        for _, lock in self._earlier:
            lock.let_go()
        self._earlier = []

    def _unlock(self) -> None:
        """Lets go of DIR, if that has not been done."""
        if self.lock is not None:
            owner.let_go(self.lock)
        self.lock = None
