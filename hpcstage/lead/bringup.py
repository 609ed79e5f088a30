"""Brings the other nodes of a run up, hears of them and ends them: a launcher starts an agent on each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcstage.job import launchers
from hpcstage.lead import children
from hpcstage.lead.agent import LINE, PULSE_LOST_S
from hpcstage.lead.children import Output
from hpcstage.lead.nodestates import NodeStates
from hpcstage.protocol import leadspec
from hpcstage.protocol.leadspec import LeadSpec

_FILES_EVERY_S = 0.2
_STAGED_EVERY_S = 1.0
_LAST_S = 1.0
"""A launcher ends within so many seconds after the last of its processes."""


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


class Nodes:
    """Owns the launchers of the agents, one for each node that the wrapper did not start, and what the agents say."""

    def __init__(self, spec: LeadSpec, directory: Path) -> None:
        self.spec = spec
        self.directory = directory
        self.states = NodeStates(spec.daemon.run_id, spec.daemon.membership.nodes)
        self._launched: list[Output] = []
        self._signs = LifeSigns()
        self._next_files = 0.0
        self._began = time.monotonic()
        self._is_drain_asked = False
        self._read: set[str] = set()
        """Names of the state files that have been read."""

    def begin(self, mpi: launchers.Mpi) -> None:
        """Starts the nodes. A node whose start fails at once is missing."""
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

    def outputs(self) -> Sequence[Output]:
        """Returns the outputs of processes to wait for."""
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
        if self._is_drain_asked or (soon and not self.states.have_others_joined):
            return _FILES_EVERY_S
        return _STAGED_EVERY_S if self.spec.daemon.mode == "upfront" else leadspec.PULSE_S

    def ask_drained(self) -> None:
        """Tells all nodes that the command has ended, so that they drain their output files."""
        self._is_drain_asked = True
        self._next_files = 0.0
        with contextlib.suppress(OSError):
            (self.directory / leadspec.DRAIN).touch()
        for output in self._launched:
            output.tell(leadspec.DRAIN)

    def drained(self, now: float) -> bool:
        """Returns whether no other node still drains output files. One that shows no sign of life is dead."""
        if not self._is_drain_asked:
            return False
        others = list(enumerate(self.states.all))[1:]
        waiting = {index: node.beat for index, node in others if node.alive and not node.is_drained}
        for index in self._signs.silent(waiting, now):
            self.states.set(index, "dead", "it does not answer")
        return self.states.have_others_drained

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
        for output in self._launched:
            output.close_stdin()

    def await_end(self, deadline: float) -> None:
        """Waits until all other nodes have written their parts, at most until the deadline."""
        while self._are_others_alive() and time.monotonic() < deadline:
            children.wait_some(self.outputs(), _FILES_EVERY_S)
            self._read_files()
            if self._has_ended():
                break

    def _are_others_alive(self) -> bool:
        return self.spec.starts_daemons and self.states.are_others_alive

    def close(self, removal_s: float) -> None:
        """Waits until the nodes that still answer are clean, then ends their launchers: one may never return for a node
        that is lost."""
        deadline = time.monotonic() + removal_s
        last = time.monotonic() + _LAST_S
        while any(not output.ended for output in self._launched) and time.monotonic() < min(deadline, last):
            children.wait_some(self.outputs(), 0.1)
            self._read_files()
            if self.states.is_any_cleaning:
                last = time.monotonic() + _LAST_S
        for output in self._launched:
            output.kill()
