"""Brings the other nodes of a run up, hears of them and ends them: `VirtualNodes` on this machine, where the lead
starts the daemons itself, `LaunchedNodes` by a launcher, which starts an agent on each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcstage import job as jobs
from hpcstage.errors import HpcstageError
from hpcstage.job import launchers
from hpcstage.job.launchers import Mpi
from hpcstage.lead import children
from hpcstage.lead.agent import LINE, PULSE_LOST_S
from hpcstage.lead.children import Output
from hpcstage.lead.directories import HostedDirectories
from hpcstage.lead.nodestates import ENDED_EARLY, NodeStates
from hpcstage.node.hosted import Hosted, bring_up, claim
from hpcstage.protocol import leadspec
from hpcstage.protocol.leadspec import LeadSpec

_FILES_EVERY_S = 0.2
_STAGED_EVERY_S = 1.0
_LAST_S = 1.0
"""A launcher ends within so many seconds after the last of its processes."""


class Nodes:
    """Owns the nodes that the wrapper did not start; what it does not say of them it leaves to its two forms."""

    def __init__(self, spec: LeadSpec, directory: Path) -> None:
        self.spec = spec
        self.directory = directory
        self.states = NodeStates(spec.daemon.run_id, spec.daemon.membership.nodes)
        self.is_drain_asked = False

    def begin(self, mpi: Mpi) -> None:
        """Starts the nodes. A node whose start fails at once is missing."""

    def outputs(self) -> Sequence[Output]:
        """Returns the outputs of processes to wait for."""
        return ()

    def look(self, now: float) -> None:
        """Takes the news of the nodes."""

    def joined(self) -> bool:
        """Returns whether the daemons of all other nodes know the files."""
        return self.states.have_others_joined

    def staged(self) -> bool:
        """Returns whether, with mode upfront, all other nodes hold what they will hold."""
        return self.states.have_others_staged

    def ask_drained(self) -> None:
        """Tells all nodes that the command has ended, so that they drain their output files."""
        self.is_drain_asked = True

    def drained(self, now: float) -> bool:  # noqa: ARG002
        """Returns whether no other node still drains output files."""
        return self.is_drain_asked and self.states.have_others_drained

    def ask_staged(self) -> None:
        """Asks the daemons of this machine whether they hold what they will hold; agents ask theirs by themselves."""

    def attach(self, child_pid: int) -> None:
        """Tells the daemons of this machine that the command runs; they serve it to its end even if the lead dies."""

    def give_up_waiting(self) -> None:
        """Leaves out the nodes that have not come by now."""
        self.states.give_up_waiting(f"no answer within {self.spec.wait_s:g} s")

    def tell_end(self) -> None:
        """Tells all nodes that the run is over."""

    def ended(self, deadline: float) -> bool:
        """Waits until all other nodes have written their parts, at most until the deadline. Returns whether they
        have."""
        raise NotImplementedError

    def close(self, removal_s: float) -> None:
        """Waits until the nodes that still answer are clean, then makes sure that nothing of the run is left on this
        machine."""


class VirtualNodes(Nodes):
    """Owns the daemons of virtual nodes, and their directories for output files and checkpoints."""

    def __init__(self, spec: LeadSpec, directory: Path) -> None:
        super().__init__(spec, directory)
        self._hosted: dict[int, Hosted] = {}
        self._directories: dict[int, HostedDirectories] = {}

    def begin(self, mpi: Mpi) -> None:  # noqa: ARG002
        """See Nodes."""
        if not self.spec.starts_daemons:
            return
        job = jobs.here()
        for index in range(1, len(self.states.all)):
            directories = HostedDirectories(self.spec, index)
            try:
                node = claim(self.spec, index, os.environ, job)
                hosted = bring_up(self.spec, index, node, os.environ, job, directories.make(os.environ, job))
            except (HpcstageError, OSError) as error:
                directories.abandon()
                reason = error.line() if isinstance(error, HpcstageError) else str(error)
                self.states.set(index, "missing", reason)
                continue
            self._hosted[index], self._directories[index] = hosted, directories
            self.states.set_up(index, "ready", **hosted.place())

    def look(self, now: float) -> None:  # noqa: ARG002
        """Takes the news: dead daemons, and what became of their directories."""
        for index, hosted in self._hosted.items():
            if self.states.all[index].alive and hosted.dead():
                self.states.set(index, "dead", ENDED_EARLY)
        for index, directories in self._directories.items():
            if self.states.all[index].alive:
                for message, why in directories.news(self._hosted[index], is_asked=self.is_drain_asked).items():
                    self.states.set_directory(index, message, why)

    def joined(self) -> bool:
        """See Nodes."""
        for index, hosted in self._hosted.items():
            self.states.all[index].joined = self.states.all[index].joined or hosted.is_staging()
        return super().joined()

    def staged(self) -> bool:
        """See Nodes."""
        for index, hosted in self._hosted.items():
            if self.states.all[index].state == "ready" and hosted.staged():
                self.states.all[index].state = "staged"
        return super().staged()

    def ask_staged(self) -> None:
        """See Nodes."""
        for hosted in self._hosted.values():
            hosted.ask_staged()

    def attach(self, child_pid: int) -> None:
        """See Nodes."""
        for hosted in self._hosted.values():
            hosted.attach(child_pid)

    def tell_end(self) -> None:
        """See Nodes."""
        for hosted in self._hosted.values():
            hosted.tell_end()

    def ended(self, deadline: float) -> bool:
        """See Nodes."""
        for index, hosted in self._hosted.items():
            has_ended = hosted.ended(max(0.0, deadline - time.monotonic())) if self.states.all[index].alive else False
            self._directories[index].end()
            if has_ended:
                self.states.set(index, "ended")
        return not (self.spec.starts_daemons and self.states.are_others_alive)

    def close(self, removal_s: float) -> None:
        """See Nodes."""
        for hosted in self._hosted.values():
            hosted.close(removal_s)


class LifeSigns:
    """Knows which of the nodes that drain show no sign of life any more."""

    def __init__(self) -> None:
        self._beats: dict[int, tuple[object, float]] = {}

    def silent(self, beats: Mapping[int, object], now: float) -> list[int]:
        """Returns the nodes whose beat has not changed for so long that they are taken for dead."""
        for index, beat in beats.items():
            if index not in self._beats or self._beats[index][0] != beat:
                self._beats[index] = beat, now
        return [index for index in beats if now - self._beats[index][1] > PULSE_LOST_S]


class LaunchedNodes(Nodes):
    """Owns the launchers of the agents, and what the agents say."""

    def __init__(self, spec: LeadSpec, directory: Path) -> None:
        super().__init__(spec, directory)
        self._launched: list[children.Output] = []
        self._signs = LifeSigns()
        self._next_files = 0.0
        self._began = time.monotonic()
        self._read: set[str] = set()
        """Names of the state files that have been read."""

    def begin(self, mpi: launchers.Mpi) -> None:
        """See Nodes."""
        if not self.spec.starts_daemons:
            return
        script = ("/bin/sh", os.fspath(self.directory / leadspec.SCRIPT))
        plan = launchers.per_node(self.spec.launcher, script, self.spec.hosts[1:], mpi, self.spec.parts)
        env = launchers.scrubbed(os.environ)
        for command in plan.commands:
            try:
                self._launched.append(children.Output(command, env, self._heard, stdin=subprocess.PIPE))
            except OSError as error:
                self.states.give_up_waiting(f"{command[0]} cannot be started: {error.strerror}")
                return
        if not plan.commands:
            self.states.give_up_waiting("no launcher is known for this job (--launcher names one)")

    # ---- how they do

    def outputs(self) -> Sequence[children.Output]:
        """See Nodes."""
        return [output for output in self._launched if output.fd >= 0]

    def look(self, now: float) -> None:
        """Takes the news: state files, launchers that have ended."""
        if now >= self._next_files:
            self._next_files = now + self._pace_s(now)
            self._read_files()
        if self._has_ended():
            for output in self._launched:
                output.read()
            self.states.lose_others(self._said() or "its agent ended")

    def _has_ended(self) -> bool:
        """Tells whether there were launchers and all have ended."""
        return bool(self._launched) and all(output.ended for output in self._launched)

    def _pace_s(self, now: float) -> float:
        """Returns the seconds until the state files are read again: few while the command is held back, else more, to
        spare the shared file system."""
        soon = now - self._began < self.spec.wait_s + leadspec.JOIN_S
        if self.is_drain_asked or (soon and not self.joined()):
            return _FILES_EVERY_S
        return _STAGED_EVERY_S if self.spec.daemon.mode == "upfront" else leadspec.PULSE_S

    def ask_drained(self) -> None:
        """See Nodes."""
        super().ask_drained()
        self._next_files = 0.0
        with contextlib.suppress(OSError):
            (self.directory / leadspec.DRAIN).touch()
        for output in self._launched:
            output.tell(leadspec.DRAIN)

    def drained(self, now: float) -> bool:
        """See Nodes. A node that shows no sign of life is dead."""
        if self.is_drain_asked:
            others = list(enumerate(self.states.all))[1:]
            waiting = {index: node.beat for index, node in others if node.alive and not node.is_drained}
            for index in self._signs.silent(waiting, now):
                self.states.set(index, "dead", "it does not answer")
        return super().drained(now)

    def give_up_waiting(self) -> None:
        """See Nodes."""
        said = self._said()
        self.states.give_up_waiting(f"no answer within {self.spec.wait_s:g} s" + (f" ({said})" if said else ""))

    def _said(self) -> str:
        """Returns what tells best why a launcher failed; empty if none has said anything."""
        return next((output.reason for output in self._launched if output.reason), "")

    # ---- what agents say

    def _heard(self, line: str) -> bool:
        """Takes a line of a launcher's output; returns True if an agent said it."""
        at = line.find(LINE)
        if at < 0:
            return False
        with contextlib.suppress(ValueError):
            self.states.heard([json.loads(line[at + len(LINE) :])])
        return True

    def _read_files(self) -> None:
        # A change in the directory makes network file systems look at it again.
        with contextlib.suppress(OSError):
            leadspec.write_json(self.directory / leadspec.PULSE, {"at": time.monotonic()})
        names: set[str] = set()
        with contextlib.suppress(OSError):
            names = {name for name in os.listdir(self.directory) if name.startswith(leadspec.NODE)}
        found = []
        for name in sorted(names - self._read):
            with contextlib.suppress(OSError, ValueError):
                found.append(leadspec.read_json(self.directory / name))
                if not name.endswith("-draining.json"):  # it is written again and again
                    self._read.add(name)
        self.states.heard(found)

    # ---- the end

    def tell_end(self) -> None:
        """See Nodes."""
        with contextlib.suppress(OSError):
            (self.directory / leadspec.END).touch()
        for output in self._launched:
            output.close_stdin()

    def ended(self, deadline: float) -> bool:
        """See Nodes."""
        while self._are_others_alive() and time.monotonic() < deadline:
            children.wait_some(self.outputs(), _FILES_EVERY_S)
            self._read_files()
            if self._has_ended():
                break
        return not self._are_others_alive()

    def _are_others_alive(self) -> bool:
        return self.spec.starts_daemons and self.states.are_others_alive

    def close(self, removal_s: float) -> None:
        """See Nodes. A launcher may never return for a node that is lost."""
        deadline = time.monotonic() + removal_s
        last = time.monotonic() + _LAST_S
        while any(not output.ended for output in self._launched) and time.monotonic() < min(deadline, last):
            children.wait_some(self.outputs(), 0.1)
            self._read_files()
            if self.states.is_any_cleaning:
                last = time.monotonic() + _LAST_S
        for output in self._launched:
            output.kill()
