"""Brings virtual nodes up and ends them: the lead itself starts their daemons, all on this machine."""

from __future__ import annotations

import os
import socket
import time
from functools import partial
from pathlib import Path

from hpcstage import job as jobs
from hpcstage.errors import HpcstageError
from hpcstage.job.launchers import Mpi
from hpcstage.lead.kept import HostedDirectories
from hpcstage.lead.nodes import Nodes
from hpcstage.lead.states import ENDED_EARLY
from hpcstage.node.hosted import Hosted, bring_up
from hpcstage.protocol.leadspec import LeadSpec


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
        job = jobs.detect(os.environ, hostname=socket.gethostname())
        for index in range(1, len(self.states.all)):
            directories = HostedDirectories(self.spec, index)
            try:
                hosted = bring_up(self.spec, index, os.environ, job, partial(directories.make, os.environ, job))
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
                for word, why in directories.news(self._hosted[index], is_asked=self.is_drain_asked).items():
                    self.states.set_outputs(index, word, why)

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
