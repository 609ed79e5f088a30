"""Runs as `python -m hpcstage.lead.agent SPEC [INDEX]`: brings up one other node of a run, and stays until the run is
over.

The scheduler's launcher starts an agent on each node. The agent owns this node's daemon and reports its state (by a
line for the lead where the launcher passes output on, and by a file in any case). It ends when the lead does: the
launcher passes on an end of input, or the file `end` appears, or the lead's pulse stops.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the other imports look for their modules
    from hpcstage.inherited import own_packages_first

    own_packages_first()

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcstage import job as jobs
from hpcstage.errors import HpcstageError
from hpcstage.forked import die_with_parent
from hpcstage.job import localdir
from hpcstage.job.localdir import LocalDir
from hpcstage.lead.directories import HostedDirectories
from hpcstage.node import childenv, control, kept
from hpcstage.node.directory import outputs_base
from hpcstage.node.hosted import Hosted, Taken, bring_up, claim
from hpcstage.protocol import leadspec, nodedir
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.leadspec import LeadSpec
from hpcstage.protocol.rundir import log_path
from hpcstage.writing import replacing

LINE = "hpcstage-node "
"""A line for the lead begins with this."""
PULSE_LOST_S = 60.0
"""Seconds after which the lead is taken for dead; no shared file system hides a change for so long."""
END_EVERY_S = 2.0
OTHERS_SPEC_S = 5.0
_LOOK_S = 1.0
_POLL_S = 0.02


AT_START_S = 4.0
"""The start of this node waits for so long; what takes longer goes on beside the run."""


class LeftoverDrain:
    """The drain of what earlier runs left on one node; there is no process where nothing was left."""

    def __init__(self, lead: LeadSpec, local_dir: Path, above: Path, host: str) -> None:
        """`above` is the directory of all runs' output directories below `local_dir`."""
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            if any(kept.places(above)):
                log = log_path(Path(lead.daemon.run_dir), f"{host}.late")
                # The drain may write to a directory which this run has locked.
                self._process = _clean(local_dir, log, {**os.environ, kept.RUN_ID: lead.daemon.run_id})

    def wait(self) -> None:
        """Waits for the end for a while."""
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(AT_START_S)

    def end(self) -> None:
        """Ends it; what is not drained stays for the next run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _clean(local_dir: Path, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    parent = os.getpid()
    with replacing(log) as said:
        return subprocess.Popen(
            [sys.executable, "-s", "-m", "hpcstage", "clean", "--drain", "--local-dir", os.fspath(local_dir)],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=childenv.for_daemon(env, control.package_parent()),
            cwd="/",
            preexec_fn=lambda: die_with_parent(parent),  # noqa: PLW1509  the agent has one thread
        )


class Agent:
    """The agent of one node."""

    def __init__(self, spec: Path, index: int | None) -> None:
        """`index` is that of a virtual node; others find theirs by their host's name."""
        self.lead = LeadSpec.load(spec)
        self.directory = spec.parent
        self.job = jobs.here()
        self.index = index_of(self.lead.hosts, self.job.hostname) if index is None else index
        self._stdin_open = True
        self._joined = self._is_drain_asked = False
        self._started = time.monotonic()
        self._pulse = (b"", time.monotonic())
        self._next_end = self._next_pulse = self._next_beat = 0.0

    def run(self) -> int:
        """Runs until the run is over. Returns 1 if this node could not be brought up, else 0."""
        if self.index is None or self.index == 0:
            return 0  # some launchers start an agent on all nodes; the first node has its wrapper
        try:
            local = localdir.require(self.lead.local_dir, os.environ, self.job)
        except HpcstageError as error:
            self._say("missing", reason=error.line())
            return 1
        above = outputs_base(local, self.job.hostname)
        outputs = HostedDirectories(self.lead, self.index, above)
        if self.lead.virtual:  # the wrapper drains what earlier runs left on this machine
            return self._serve(self.index, local, outputs)
        outputs.take_earlier()
        late = LeftoverDrain(self.lead, local.path, above, self.job.hostname)
        try:
            late.wait()
            return self._serve(self.index, local, outputs)
        finally:
            late.end()

    def _serve(self, index: int, local: LocalDir, outputs: HostedDirectories) -> int:
        try:
            node = claim(self.lead, index, local, self.job)
            hosted = bring_up(self.lead, index, node, local, os.environ, self.job, outputs.make())
        except (HpcstageError, OSError) as error:
            outputs.abandon()
            if isinstance(error, Taken) and self._is_served(error.path):
                return 0
            self._say("missing", reason=error.line() if isinstance(error, HpcstageError) else str(error))
            return 1
        try:
            self._say("ready", **hosted.place())
            self._stay(hosted, outputs)
        finally:
            outputs.news(hosted, is_asked=self._is_drain_asked)
            hosted.tell_end()
            has_ended = hosted.ended(self.lead.daemon.drain_s)
            outputs.end()
            if has_ended:
                self._say("ended")
            hosted.close()
            self._say("gone")
        return 0

    def _is_served(self, node_dir: Path) -> bool:
        """Returns whether another agent was first on this node: some launchers start one for each processor."""
        deadline = time.monotonic() + OTHERS_SPEC_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                return bool(DaemonSpec.load(node_dir / nodedir.SPEC).node_index == self.index)
            time.sleep(_POLL_S)
        return False

    def _stay(self, hosted: Hosted, outputs: HostedDirectories) -> None:
        asked = told = False
        while not self._is_over():
            for message, why in outputs.news(hosted, is_asked=self._is_drain_asked).items():
                self._say(message, why=why)
            if not self._joined and hosted.is_staging():
                self._joined = True
                self._say("joined", **hosted.place())
            if hosted.dead():
                self._say("dead", reason="its daemon ended early")
                return
            if self.lead.daemon.mode == "upfront" and not told:
                if not asked:
                    hosted.ask_staged()
                    asked = True
                if hosted.staged():
                    told = True
                    self._say("staged", **hosted.place())
            self._wait(is_pressing=outputs.is_pressing)

    def _wait(self, *, is_pressing: bool) -> None:
        """Waits until something comes by the input, if it is connected, but at most a second; less while somebody waits
        for this node."""
        is_urgent = is_pressing or (not self._joined and time.monotonic() - self._started < leadspec.JOIN_S)
        wait_s = _POLL_S if is_urgent else _LOOK_S
        if not self._stdin_open:
            time.sleep(wait_s)
        elif select.select([0], [], [], wait_s)[0]:
            said = os.read(0, 4096)
            self._stdin_open = bool(said)
            self._is_drain_asked = self._is_drain_asked or leadspec.DRAIN.encode() in said

    def _is_over(self) -> bool:
        """Returns whether the run is over. Looks at shared files as seldom as it can: there may be a thousand
        agents."""
        if self.lead.input_ends and not self._stdin_open:
            return True
        now = time.monotonic()
        if not self.lead.input_ends and now >= self._next_end:
            self._next_end = now + END_EVERY_S
            self._is_drain_asked = self._is_drain_asked or self._is_there(leadspec.DRAIN)
            if self._is_there(leadspec.END):
                return True
        if self._is_drain_asked and now >= self._next_beat:
            self._next_beat = now + leadspec.PULSE_S
            self._say("draining", beat=round(now))
        if now >= self._next_pulse:
            self._next_pulse = now + leadspec.PULSE_S
            self._is_drain_asked = self._is_drain_asked or bool(
                self.lead.directories and self._is_there(leadspec.DRAIN)
            )
            return self._pulse_lost()
        return False

    def _is_there(self, name: str) -> bool:
        return (self.directory / name).exists()

    def _pulse_lost(self) -> bool:
        try:
            beat = (self.directory / leadspec.PULSE).read_bytes()
        except OSError:
            beat = b""
        if beat != self._pulse[0]:
            self._pulse = (beat, time.monotonic())
        return time.monotonic() - self._pulse[1] > PULSE_LOST_S

    def _say(self, state: str, **more: Any) -> None:  # noqa: ANN401  what JSON takes
        data = {"run_id": self.lead.daemon.run_id, "index": self.index, "state": state, "pid": os.getpid(), **more}
        assert self.index is not None
        with contextlib.suppress(OSError):
            leadspec.write_json(leadspec.state_file(self.directory, self.index, state), data)
        if not self.lead.passes_output:
            return
        with contextlib.suppress(OSError, ValueError):
            print(LINE + json.dumps(data), flush=True)  # noqa: T201  for the lead


def index_of(hosts: list[str], host: str) -> int | None:
    """Returns the index of the node with this name, with or without its domain; None if there is none."""
    short = host.partition(".")[0]
    return next((index for index, name in enumerate(hosts) if name.partition(".")[0] == short), None)


def main(arguments: list[str]) -> int:
    """Runs the agent; see the module."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # meant for the command; the agent learns of the end otherwise
    os.chdir("/")
    return Agent(Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else None).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
