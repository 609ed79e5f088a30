"""Runs as `python -m hpcstage.lead SPEC`; the first node's wrapper starts it when there are other nodes.

The lead owns the sequence: it brings the nodes up, connects them, keeps them connected, and ends them when the wrapper
says so or is gone. It talks with the wrapper over standard input and output (see `wrapper.leadlink`). Nothing here
holds up the command: the lead reports what fails, and the nodes go on alone.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports look for their modules
    from hpcstage.inherited import own_packages_first

    own_packages_first()

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from hpcstage.lead import world
from hpcstage.lead.bringup import Nodes
from hpcstage.lead.nodestates import ENDED_EARLY, NodeState, problem_of
from hpcstage.lead.world import World
from hpcstage.node.control import REMOVAL_S
from hpcstage.node.kept import CHECKPOINTS
from hpcstage.problem import Problem
from hpcstage.protocol.leadspec import JOIN_S, SPEC, STANDING, LeadSpec, write_json
from hpcstage.stderr import log

_LOOK_S = 0.2
_SOON_S = 0.02
_GOODBYE_S = 2.0


class Lead:
    """Runs the sequence that the module describes, and owns what has been told to the wrapper."""

    def __init__(self, spec: LeadSpec, directory: Path) -> None:
        self.started = time.monotonic()
        self.started_unix_s = time.time()
        self.world = World(spec.launcher, directory, spec.parts)
        if self.world.over:  # no exchange will come: the nodes need not wait for each other
            spec = replace(spec, daemon=replace(spec.daemon, group_wait_s=0.0))
            spec.save(directory / SPEC)
        self.spec = spec
        self.directory = directory
        self.nodes = Nodes(spec, directory)
        self.ending = False
        self._ready_at: float | None = None
        self._joined = False
        self._said: set[int] = set()
        self._buffer = b""
        self._why_said = ""
        self._standing: list[int] = []
        self._told: set[str] = set()
        """The messages that the wrapper was given; each is given once."""

    def run(self) -> None:
        """Runs until the wrapper says that the command has ended, or is gone."""
        self.nodes.begin(self.world.mpi)
        while not self.ending:
            now = time.monotonic()
            self.nodes.look(now)
            self._say_news(now)
            self._tell_standing()
            if self.spec.exchanges:
                self._keep_connected(now)
            self._wait()
        self._end()

    def _wait(self) -> None:
        outputs = {output.fd: output for output in self.nodes.outputs()}
        if self.world.output is not None and self.world.output.fd >= 0:
            outputs[self.world.output.fd] = self.world.output
        for fd in select.select([0, *outputs], [], [], _LOOK_S if self._joined else _SOON_S)[0]:
            if fd == 0:
                self._hear()
            else:
                outputs[fd].read()

    # ---- the wrapper

    def _hear(self) -> None:
        data = os.read(0, 65536)
        if not data:
            self.ending = True
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            if line == b"end":
                self.ending = True
            elif line == b"dead":
                self.nodes.states.set(0, "dead", ENDED_EARLY)
            elif line == b"drain":
                self.nodes.ask_drained()

    def _say_news(self, now: float) -> None:
        if self.nodes.states.waiting and now - self.started > self.spec.wait_s:
            self.nodes.give_up_waiting()
        for index, node in enumerate(self.nodes.states.all):
            if index and node.state in ("missing", "dead") and index not in self._said:
                self._said.add(index)
                say("problem", problem_of(node).to_line())
                if node.state == "missing":
                    self._write_missing(index, node)
        if not self.nodes.states.waiting and self._ready_at is None:
            self._ready_at = now
            log(f"{len(self.nodes.states.alive)} of {len(self.nodes.states.all)} nodes are up")
        if not self._joined and self._ready_at is not None and self._may_start(now - self._ready_at):
            self._joined = True
            say("joined")
        self._say_of_directories(now)
        if "staged" not in self._told and not self.nodes.states.waiting and self.nodes.states.have_others_staged:
            self._told.add("staged")
            say("staged")

    def _say_of_directories(self, now: float) -> None:
        for kind in self.spec.directories:
            if kind not in self._told and (why := self._unwatched_why(kind)) is not None:
                self._told.add(kind)
                say(kind, why.replace("\n", " "))
        if "drained" not in self._told and self.nodes.drained(now):
            self._told.add("drained")
            say("drained")

    def _unwatched_why(self, kind: str) -> str | None:
        """Returns why not all nodes watch a directory. Checkpoint agents talk over the exchanges."""
        if kind == CHECKPOINTS.key and self.world.is_hopeless:
            return f"the nodes are not connected: {self.world.why}"
        return self.nodes.states.unwatched_why(kind)

    def _tell_standing(self) -> None:
        """Says to checkpoint agents which nodes live: the only one that is left goes on without an exchange."""
        alive = self.nodes.states.alive
        if CHECKPOINTS.key in self.spec.directories and self._ready_at is not None and alive != self._standing:
            self._standing = alive
            with contextlib.suppress(OSError):
                write_json(self.directory / STANDING, {"alive": alive, "generation": self.world.generation})

    def _may_start(self, waited_s: float) -> bool:
        """Returns whether the command may start. Each node reads from the source what is opened before the nodes know
        the files, so it pays to wait a little: the nodes are connected sooner than most programs read."""
        return not self.spec.exchanges or self.world.over or waited_s > JOIN_S or self.nodes.states.have_others_joined

    def _write_missing(self, index: int, node: NodeState) -> None:
        """Writes the part of a missing node, since the record has a part for every node."""
        from hpcstage.record.parts.part import NodePart, write_part

        part = NodePart(
            host=node.entry.host,
            mode="direct",
            started_unix_s=self.started_unix_s,
            node_index=index,
            node_count=len(self.spec.hosts),
            problems=[problem_of(node)],
        )
        with contextlib.suppress(OSError):
            write_part(part, Path(self.spec.daemon.run_dir), node.entry.host)

    # ---- the group

    def _keep_connected(self, now: float) -> None:
        if self.world.look(now):
            log(self.world.why)
            if world.is_job_ending(os.environ):
                self.world.over, self.world.why = True, self._why_said  # it is no failure of ours
                return
            for host in world.lost(self.spec.hosts, os.environ):
                self._lose(host)
            self._say_not_yet()
        elif self.world.is_late(now):
            self._say_not_yet()
        if self.world.over:
            self._say_unconnected()
        elif not self.world.running and not self.nodes.states.waiting and now >= self.world.next_at:
            alive = self.nodes.states.alive
            if len(alive) < 2:
                return
            if self.world.start(self.nodes.states.entries(), now):
                log(f"generation {self.world.generation}: {', '.join(self.spec.hosts[index] for index in alive)}")

    def _lose(self, host: str) -> None:
        """Leaves out a node that the next program cannot have."""
        index = self.spec.hosts.index(host) if host in self.spec.hosts else 0
        if index and self.nodes.states.all[index].alive:
            self.nodes.states.set(index, "dead", "Slurm takes the node for lost")

    def _say_not_yet(self) -> None:
        """Reports the failure at once, and once: the user may know what is wrong before all ways have been tried."""
        tells = self.world.tells or self.world.programs > 1 or self.world.running
        if tells and not self.world.connected and not self.world.over and "notice" not in self._told:
            self._told.add("notice")
            say("notice", f"the nodes are not connected yet: {self.world.why}; it is tried again".replace("\n", " "))

    def _say_unconnected(self) -> None:
        if (self.ending or not self.world.running) and self.world.why != self._why_said:
            self._why_said = self.world.why
            text = f"{world.UNCONNECTED}: {self.world.why}"
            say("problem", Problem("group-lost", text, "see nodes/lead.log in the run directory").to_line())

    # ---- the end

    def _end(self) -> None:
        deadline = time.monotonic() + self.spec.daemon.drain_s
        if "notice" in self._told and not self.world.connected:
            self._say_unconnected()
        self.nodes.tell_end()
        self.nodes.await_end(deadline)
        say("ended")
        self.world.end(max(0.0, min(_GOODBYE_S, deadline - time.monotonic())))
        self.nodes.close(REMOVAL_S)
        # The group's directory is of no more use where nothing failed; the wrapper still reads in it.
        if not self._said and not self._why_said and not self.nodes.states.waiting and not say("done"):
            shutil.rmtree(self.directory, ignore_errors=True)


def say(message: str, rest: str = "") -> bool:
    """Writes a line for the wrapper. Returns False if that is gone."""
    with contextlib.suppress(OSError, ValueError):
        os.write(1, f"{message} {rest}".rstrip().encode(errors="replace") + b"\n")
        return True
    return False


def main(arguments: list[str]) -> int:
    """Runs the lead; see the module."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # they are the command's; the wrapper says when to end
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the wrapper blocks signals, and children would inherit that
    spec = Path(arguments[0])
    Lead(LeadSpec.load(spec), spec.parent).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
