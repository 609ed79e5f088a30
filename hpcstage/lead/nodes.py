"""Brings the other nodes of a run up and ends them: by agents that a launcher starts, or, for virtual nodes, itself.

Owns the launchers' processes, the files that agents write, and the virtual nodes' daemons. `states` owns what is known
of each node.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hpcstage import job as jobs
from hpcstage.errors import HpcstageError
from hpcstage.job import launchers
from hpcstage.lead import children
from hpcstage.lead.agent import LINE, PULSE_LOST_S
from hpcstage.lead.kept import HostedDirectories
from hpcstage.lead.states import ENDED_EARLY, NodeStates
from hpcstage.node.hosted import Hosted, bring_up
from hpcstage.protocol import leadspec
from hpcstage.protocol.leadspec import LeadSpec

_FILES_EVERY_S = 0.2
_STAGED_EVERY_S = 1.0
_LAST_S = 1.0
"""A launcher ends within so many seconds after the last of its processes."""


class DrainWatch:
    """Knows whether the nodes were asked to drain their output files, and which of them show no sign of life since."""

    def __init__(self) -> None:
        self.is_asked = False
        self._beats: dict[int, tuple[object, float]] = {}

    def silent(self, beats: Mapping[int, object], now: float) -> list[int]:
        """Returns the nodes whose beat has not changed for so long that they are taken for dead."""
        for index, beat in beats.items():
            if index not in self._beats or self._beats[index][0] != beat:
                self._beats[index] = beat, now
        return [index for index in beats if now - self._beats[index][1] > PULSE_LOST_S]


class Nodes:
    """Owns the nodes that the wrapper did not start."""

    def __init__(self, spec: LeadSpec, directory: Path) -> None:
        self.spec = spec
        self.directory = directory
        self.states = NodeStates(spec.daemon.run_id, spec.daemon.membership.nodes)
        self.hosted: dict[int, Hosted] = {}
        self._outputs: dict[int, HostedDirectories] = {}
        self._drain = DrainWatch()
        self._launched: list[children.Output] = []
        self._next_files = 0.0
        self._began = time.monotonic()
        self._read: set[str] = set()
        """Names of the state files that have been read."""

    def begin(self, mpi: launchers.Mpi) -> None:
        """Starts the nodes that the wrapper did not start. A node whose start fails at once is missing."""
        if not self.spec.starts_daemons:
            return
        if self.spec.virtual:
            self._host_all()
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

    def _host_all(self) -> None:
        job = jobs.detect(os.environ, hostname=socket.gethostname())
        for index in range(1, len(self.states.all)):
            outputs = HostedDirectories(self.spec, index)
            try:
                hosted = bring_up(self.spec, index, os.environ, job, partial(outputs.make, os.environ, job))
            except (HpcstageError, OSError) as error:
                outputs.abandon()
                reason = error.line() if isinstance(error, HpcstageError) else str(error)
                self.states.set(index, "missing", reason)
                continue
            self.hosted[index], self._outputs[index] = hosted, outputs
            self.states.set_up(index, "ready", **hosted.place())

    # ---- how they do

    def fds(self) -> dict[int, children.Output]:
        """Returns the outputs to wait for, by file descriptor."""
        return {output.fd: output for output in self._launched if output.fd >= 0}

    def look(self, now: float) -> None:
        """Takes the news: dead daemons, state files, launchers that have ended."""
        for index, hosted in self.hosted.items():
            if self.states.all[index].alive and hosted.dead():
                self.states.set(index, "dead", ENDED_EARLY)
        for index, outputs in self._outputs.items():
            if self.states.all[index].alive:
                for word, why in outputs.news(self.hosted[index], is_asked=self._drain.is_asked).items():
                    self.states.set_outputs(index, word, why)
        if not self.spec.virtual and now >= self._next_files:
            self._next_files = now + self._pace_s(now)
            self._read_files()
        if self._launched and all(output.ended for output in self._launched):
            for output in self._launched:
                output.read()
            self.states.lose_others(self._said() or "its agent ended")

    def _pace_s(self, now: float) -> float:
        """Returns the seconds until the state files are read again: few while the command is held back, else more, to
        spare the shared file system."""
        soon = now - self._began < self.spec.wait_s + self.spec.join_s
        if self._drain.is_asked or (soon and not self.joined()):
            return _FILES_EVERY_S
        return _STAGED_EVERY_S if self.spec.daemon.mode == "upfront" else leadspec.PULSE_S

    def joined(self) -> bool:
        """Returns whether the daemons of all other nodes know the files."""
        for index, hosted in self.hosted.items():
            self.states.all[index].joined = self.states.all[index].joined or hosted.is_staging()
        return self.states.have_others_joined

    def staged(self) -> bool:
        """Returns whether, with mode upfront, all other nodes hold what they will hold."""
        for index, hosted in self.hosted.items():
            if self.states.all[index].state == "ready" and hosted.staged():
                self.states.all[index].state = "staged"
        return self.states.have_others_staged

    def ask_drained(self) -> None:
        """Tells all nodes that the command has ended, so that they drain their output files."""
        self._drain.is_asked = True
        self._next_files = 0.0
        with contextlib.suppress(OSError):
            (self.directory / leadspec.DRAIN).touch()
        for output in self._launched:
            output.tell(leadspec.DRAIN)

    def drained(self, now: float) -> bool:
        """Returns whether no other node still drains output files. A node that shows no sign of life is dead."""
        if not self._drain.is_asked:
            return False
        if not self.spec.virtual:
            waiting = {
                i: node.beat for i, node in enumerate(self.states.all) if i and node.alive and not node.is_drained
            }
            for index in self._drain.silent(waiting, now):
                self.states.set(index, "dead", "it does not answer")
        return self.states.have_others_drained

    def ask_staged(self) -> None:
        """Asks the daemons of virtual nodes for `staged`."""
        for hosted in self.hosted.values():
            hosted.ask_staged()

    def attach(self, child_pid: int) -> None:
        """Tells the daemons of virtual nodes that the command runs; they serve it to its end even if the lead dies."""
        for hosted in self.hosted.values():
            hosted.attach(child_pid)

    def give_up_waiting(self) -> None:
        """Leaves out the nodes that have not come by now."""
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
        """Tells all nodes that the run is over."""
        with contextlib.suppress(OSError):
            (self.directory / leadspec.END).touch()
        for hosted in self.hosted.values():
            hosted.tell_end()
        for output in self._launched:
            output.close_stdin()

    def ended(self, deadline: float) -> bool:
        """Waits until all other nodes have written their parts, at most until the deadline. Returns whether they
        have."""
        for index, hosted in self.hosted.items():
            has_ended = hosted.ended(max(0.0, deadline - time.monotonic())) if self.states.all[index].alive else False
            self._outputs[index].end()
            if has_ended:
                self.states.set(index, "ended")
        while not self.spec.virtual and self._others_alive() and time.monotonic() < deadline:
            children.wait_some(self.fds().values(), _FILES_EVERY_S)
            self._read_files()
            if self._launched and all(output.ended for output in self._launched):
                break
        return not self._others_alive()

    def _others_alive(self) -> bool:
        return self.spec.starts_daemons and self.states.are_others_alive

    def close(self, removal_s: float) -> None:
        """Waits until the nodes that still answer are clean, then makes sure that nothing of the run is left on this
        machine. A launcher may never return for a node that is lost."""
        for hosted in self.hosted.values():
            hosted.close(removal_s)
        deadline = time.monotonic() + removal_s
        last = time.monotonic() + _LAST_S
        while any(not output.ended for output in self._launched) and time.monotonic() < min(deadline, last):
            children.wait_some(self.fds().values(), 0.1)
            self._read_files()
            if self.states.is_any_cleaning:
                last = time.monotonic() + _LAST_S
        for output in self._launched:
            output.kill()
