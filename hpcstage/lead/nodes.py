"""Owns the lead's view of the nodes: brings them up, knows the state of each, ends them.

The module owns the launch of agents and the virtual nodes' daemons, and words the problems of nodes that are not in the
group.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

from hpcstage import job as jobs
from hpcstage.errors import HpcstageError
from hpcstage.job import launchers
from hpcstage.lead import children
from hpcstage.lead.agent import LINE
from hpcstage.node.hosted import Hosted, bring_up
from hpcstage.problem import Problem
from hpcstage.protocol import leadspec
from hpcstage.protocol.leadspec import LeadSpec
from hpcstage.protocol.membership import GroupNode

_FILES_EVERY_S = 0.2
_STAGED_EVERY_S = 1.0
_WORDS = ("ready", "joined", "staged", "missing", "dead", "ended")
"""States in the order in which a node says them."""
_GONE = "gone"
"""The last state: nothing of the run is left on the node."""
_LAST_S = 1.0
"""A launcher ends within so many seconds after the last of its processes."""
_KILL_S = 2.0


@dataclass
class NodeState:
    """The state of one node."""

    entry: GroupNode
    """Its entry in the membership; directory and socket are known once it is up."""
    state: str = "waiting"
    """One of waiting, ready, staged, ended; or missing or dead, with a reason."""
    reason: str = ""
    joined: bool = False
    """Whether its daemon knows the files."""
    cleaning: bool = False
    """Whether its agent has said that the end has come or that the daemon is dead, but not yet that it is gone."""

    @property
    def alive(self) -> bool:
        """Whether it has a daemon."""
        return self.state in ("ready", "staged")


class Nodes:
    """All nodes of the run, by index. The first node belongs to the wrapper."""

    def __init__(self, spec: LeadSpec, directory: Path) -> None:
        self.spec = spec
        self.directory = directory
        self.all = list(map(NodeState, spec.daemon.membership.nodes))
        self.all[0].state = "ready"
        self.hosted: dict[int, Hosted] = {}
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
                self._give_up(f"{command[0]} cannot be started: {error.strerror}")
                return
        if not plan.commands:
            self._give_up("no launcher is known for this job (--launcher names one)")

    def _host_all(self) -> None:
        job = jobs.detect(os.environ, hostname=socket.gethostname())
        for index in range(1, len(self.all)):
            try:
                hosted = bring_up(self.spec, index, os.environ, job)
            except (HpcstageError, OSError) as error:
                reason = error.line() if isinstance(error, HpcstageError) else str(error)
                self._set(index, "missing", reason)
                continue
            self.hosted[index] = hosted
            self._set_up(index, "ready", **hosted.place())

    # ---- how they do

    def fds(self) -> dict[int, children.Output]:
        """Returns the outputs to wait for, by file descriptor."""
        return {output.fd: output for output in self._launched if output.fd >= 0}

    def look(self, now: float) -> None:
        """Takes the news: dead daemons, state files, launchers that have ended."""
        for index, hosted in self.hosted.items():
            if self.all[index].alive and hosted.dead():
                self._set(index, "dead", "its daemon ended early")
        if not self.spec.virtual and now >= self._next_files:
            self._next_files = now + self._pace_s(now)
            self._read_files()
        if self._launched and all(output.ended for output in self._launched):
            for output in self._launched:
                output.read()
            reason = next((output.reason for output in self._launched if output.reason), "its agent ended")
            self._give_up(reason)
            for index in (index for index in self.alive if index != 0):
                self._set(index, "dead", reason)

    def _pace_s(self, now: float) -> float:
        """Returns the seconds until the state files are read again: few while the command is held back, else more, to
        spare the shared file system."""
        soon = now - self._began < self.spec.wait_s + self.spec.join_s
        if soon and not self.joined():
            return _FILES_EVERY_S
        return _STAGED_EVERY_S if self.spec.daemon.mode == "upfront" else leadspec.PULSE_S

    @property
    def waiting(self) -> list[int]:
        """Returns the nodes that may still come."""
        return [index for index, node in enumerate(self.all) if node.state == "waiting"]

    @property
    def alive(self) -> list[int]:
        """Returns the nodes that can be in a group, in order."""
        return [index for index, node in enumerate(self.all) if node.alive]

    def entries(self) -> list[GroupNode]:
        """Returns the nodes as they are now: those that have a daemon are there."""
        return [replace(node.entry, is_present=node.alive) for node in self.all]

    def joined(self) -> bool:
        """Whether the daemons of all other nodes know the files."""
        for index, hosted in self.hosted.items():
            self.all[index].joined = self.all[index].joined or hosted.is_staging()
        return all(node.joined for node in self.all[1:] if node.alive or node.state == "waiting")

    def staged(self) -> bool:
        """Whether, with mode upfront, all other nodes hold what they will hold."""
        for index, hosted in self.hosted.items():
            if self.all[index].state == "ready" and hosted.staged():
                self.all[index].state = "staged"
        return all(node.state not in ("waiting", "ready") for node in self.all[1:])

    def ask_staged(self) -> None:
        """Asks the daemons of virtual nodes for `staged`."""
        for hosted in self.hosted.values():
            hosted.ask_staged()

    def attach(self, child_pid: int) -> None:
        """Tells the daemons of virtual nodes that the command runs; they serve it to its end even if the lead dies."""
        for hosted in self.hosted.values():
            hosted.attach(child_pid)

    def first_is_dead(self) -> None:
        """Takes from the wrapper that the first node's daemon is dead."""
        self._set(0, "dead", "its daemon ended early")

    def give_up_waiting(self) -> None:
        """Leaves out the nodes that have not come by now."""
        said = next((output.reason for output in self._launched if output.reason), "")
        reason = f"no answer within {self.spec.wait_s:g} s" + (f" ({said})" if said else "")
        self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        for index in self.waiting:
            self._set(index, "missing", reason)

    def _set(self, index: int, state: str, reason: str = "") -> None:
        self.all[index].state, self.all[index].reason = state, reason

    def _set_up(self, index: int, state: str, node_dir: str, sock: str) -> None:
        self._set(index, state)
        self.all[index].entry = replace(self.all[index].entry, node_dir=node_dir, sock=sock)

    # ---- what agents say

    def _heard(self, line: str) -> bool:
        """Takes a line of a launcher's output; returns True if an agent said it."""
        at = line.find(LINE)
        if at < 0:
            return False
        with contextlib.suppress(ValueError):
            self._word(json.loads(line[at + len(LINE) :]))
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
                self._read.add(name)
        order = [*_WORDS, _GONE]
        found = [data for data in found if data.get("state") in order]
        for data in sorted(found, key=lambda data: order.index(data["state"])):
            self._word(data)

    def _word(self, data: dict[str, object]) -> None:
        index, state = data.get("index"), data.get("state")
        if data.get("run_id") != self.spec.daemon.run_id or not isinstance(index, int) or not 0 < index < len(self.all):
            return
        node = self.all[index]
        node.cleaning = state in ("ended", "dead") or (node.cleaning and state != _GONE)
        if state not in _WORDS or node.state in ("dead", "ended"):
            return
        node.joined = node.joined or state in ("joined", "staged")
        if state in ("ready", "joined") and node.state == "staged":
            return
        if state in ("ready", "joined", "staged"):
            up = "staged" if state == "staged" else "ready"
            self._set_up(index, up, str(data.get("node_dir")), str(data.get("sock")))
        else:
            self._set(index, str(state), str(data.get("reason") or ""))

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
            if self.all[index].alive and hosted.ended(max(0.0, deadline - time.monotonic())):
                self._set(index, "ended")
        while not self.spec.virtual and self._others_alive() and time.monotonic() < deadline:
            children.wait_some(self.fds().values(), _FILES_EVERY_S)
            self._read_files()
            if self._launched and all(output.ended for output in self._launched):
                break
        return not self._others_alive()

    def _others_alive(self) -> bool:
        return self.spec.starts_daemons and any(node.alive for node in self.all[1:])

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
            if any(node.cleaning for node in self.all):
                last = time.monotonic() + _LAST_S
        for output in self._launched:
            output.kill(_KILL_S)


def problem_of(node: NodeState) -> Problem:
    """Returns what to say of a node that is not in the group."""
    host = node.entry.host
    if node.state == "missing":
        text = f"nothing is staged on {host}: {node.reason}"
        remedy = "its ranks read the source; see nodes/lead.log in the run directory, or try another --launcher"
        return Problem("node-missing", text, remedy)
    text = f"the staging daemon on {host} ended early: {node.reason}"
    remedy = f"its ranks read the source; its log is nodes/{host}.log in the run directory"
    return Problem("node-dead", text, remedy)
