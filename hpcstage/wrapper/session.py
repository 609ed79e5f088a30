"""Owns one run on this node: its directories, its daemon, its node group, its part of the record.

The module owns what is made before the command starts and what is watched while it runs; `closing` ends the run.
Several wrappers of one launch on one node share a node directory: the one that takes its lock starts the daemon, the
others only attach.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage import inherited
from hpcstage import job as jobs
from hpcstage.errors import LocalDiskProblem, NotStarted
from hpcstage.job import localdir, share, together
from hpcstage.node import childenv, control, directory, hosted, page
from hpcstage.node.shimdir import ShimSetup
from hpcstage.problem import Problem
from hpcstage.protocol import leadspec, nodedir, shim
from hpcstage.protocol.daemonspec import DaemonSpec
from hpcstage.protocol.leadspec import DATASETS
from hpcstage.protocol.rundir import log_path
from hpcstage.record import index
from hpcstage.record.index import state_dir
from hpcstage.report.progress import ProgressLine
from hpcstage.wrapper import grouping, messages, runpart
from hpcstage.writing import replace_copy

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.job.together import Grouping
    from hpcstage.node import control
    from hpcstage.node.directory import NodeDirectory
    from hpcstage.plan.dataset.datasets import Datasets
    from hpcstage.protocol.leadspec import LeadSpec
    from hpcstage.record.parts.run import RunPart
    from hpcstage.wrapper.leadlink import LeadLink
    from hpcstage.wrapper.rundirectories import RunDirectories
    from hpcstage.wrapper.rundirectory import RunNode
    from hpcstage.wrapper.runpart import Clock

_DOING = frozenset({shim.State.STAGING, shim.State.SETTLED})
JOIN_S = 3.0
"""Behind a launcher, the wrapper waits for so many seconds from its start until the nodes have found each other."""
_FREE = "free space there, or name another directory with --local-dir; hpcstage takes some 10 MB besides the copies"
_NO_ROOM = {errno.ENOSPC: _FREE, errno.EDQUOT: _FREE, errno.EFBIG: "raise the limit on the size of files: ulimit -f"}


class RunProgress:
    """Owns the line of a run."""

    def __init__(self, node: NodeDirectory, part: RunPart, *, is_quiet: bool) -> None:
        self.line = ProgressLine(quiet=is_quiet)
        self.group: Grouping | None = None
        """The nodes of the run, where there are several."""
        self._node = node
        self._part = part

    def show(self) -> None:
        """Says how far the copying is, on the first node: that of all nodes where they are on this machine, else that
        of its own daemon."""
        if self.line.is_silent or (self.group is not None and self.group.index):
            return
        pages = [directory / nodedir.PAGE for directory in self._directories_here()]
        state, done = page.summed_progress(pages) or (shim.State.ENDED, shim.WorkProgress(0, 0))
        if state is shim.State.SCANNING:
            self.line.show("scanning", done)
        elif state in _DOING and done.all_files:
            self.line.show(f"copying{self._whose()}", done)

    def _directories_here(self) -> list[Path]:
        if self.group is None or not self.group.virtual:
            return [self._node.path]
        names = (leadspec.virtual_name(self._part.run_id, index) for index in range(len(self.group.hosts)))
        return [self._node.path.with_name(name) for name in names]

    def _whose(self) -> str:
        if self.group is None:
            return ""
        nodes = len(self.group.hosts)
        return f" on {nodes} nodes" if self.group.virtual else f" on {self._part.host}, the first of {nodes} nodes"


class Session:
    """A prepared run: the daemon is up or coming up, and the command may start."""

    def __init__(self, config: Config, node: NodeDirectory, run_dir: Path, part: RunPart, clock: Clock) -> None:
        self.config = config
        self.node = node
        self.run_dir = run_dir
        self.part = part
        self.clock = clock
        self.group: Grouping | None = None
        self.lead: LeadLink | None = None
        self.control: control.DaemonControl
        self.lost = False
        self.directories: RunDirectories | None = None
        self.progress = RunProgress(node, part, is_quiet=messages.is_quiet() or node.lock_fd is None)

    @classmethod
    def open(cls, command: Sequence[str], config: Config, datasets: Datasets, clock: Clock) -> Session:
        """Makes the directories and starts or joins the daemon. Signals are blocked, so nothing interrupts it
        half-way."""
        host = socket.gethostname()
        job = jobs.here()
        grouping.require_node(job)
        local = localdir.require(config.local_dir, os.environ, job)
        group = together.find(config, job, local, host)
        alone = host if group is None else ""
        run_id = runpart.shared_id(job.run_key, config, alone) or runpart.unique_id(clock.unix_s, job.job_id)
        with contextlib.ExitStack() as undo:
            chosen = _directories(config, local, job, run_id, group)
            if chosen is not None:
                undo.callback(chosen.abandon)
            part = runpart.run_part(command, config, clock, run_id, job, local)
            if group is None and job.is_rank:
                runpart.tell_of_one_node(part, job)
            datasets = runpart.without_local(datasets, local, part, strict=config.strict)
            part.roots = [os.fsdecode(dataset.root) for dataset in datasets.all]
            notices = list[str]()
            run_dir = runpart.make(config.run_dir, inherited.directory(), run_id, dict(os.environ))
            try:
                group = grouping.placed(group, run_dir, run_id)
            except NotStarted as error:
                if config.strict:
                    raise
                notices.append(error.line())
                part.problems.append(Problem("group-lost", error.what, error.remedy))
                group = None
                if chosen is not None:
                    chosen.give_up("the other nodes are left alone")
            if chosen is not None:
                chosen.fill(group)
            node = directory.claim(local, group.node_name(run_id) if group else run_id, host=host)
            if node.lock_fd is not None:  # printed once on a node, not by every rank
                where = f"{host}: " if len(job.nodes) > 1 else ""
                of_disk = [where + warning for warning in local.warnings]
                for warning in (*job.notes, *of_disk, *together.warnings(config, job, local), *notices):
                    messages.warn(warning)
                if messages.tells_decisions():
                    from hpcstage.wrapper import decisions

                    for line in decisions.decided(config, datasets, job, local, group, part):
                        messages.info(line)
            session = cls(config, node, run_dir, part, clock)
            session.directories = chosen
            if chosen is not None and node.lock_fd is None:
                chosen.give_up("another command of this launch has the staging daemon of this node")
            session._connect(datasets, local, job, group)
            undo.pop_all()
        return session

    @property
    def waits_for_copy(self) -> bool:
        """Whether the mode is upfront: the command starts when the copy is complete."""
        return self.mode == "upfront"

    @property
    def mode(self) -> str:
        """Returns the mode that was asked for, or direct where copying gains nothing."""
        return "direct" if self.part.direct_why else self.part.mode_asked

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns the command's environment."""
        return childenv.for_command(
            env if self.directories is None else self.directories.environment(env),
            shim_dir=self.node.path / nodedir.SHIM,
            node_dir=self.node.path,
            run_dir=self.run_dir,
            run_id=self.part.run_id,
            sock=self.node.sock,
        )

    def nodes_up(self, timeout_s: float) -> bool:
        """Returns whether the other nodes are up and all know the files, or the command waits for them no longer."""
        if self.group is None:
            return True
        if self.group.starts_daemons:
            return self.lead is None or self.lead.ready(timeout_s)
        return self.clock.elapsed_s() > JOIN_S or page.waits_until_staging(self.node.path / nodedir.PAGE, timeout_s)

    def scanned(self, timeout_s: float) -> bool:
        """Returns whether this node knows the files, or never will."""
        return self.control.dead() or page.waits_until_staging(self.node.path / nodedir.PAGE, timeout_s)

    def scan_problem(self) -> Problem | None:
        """Returns what the scan of this node found wrong with the datasets, and the remedy; to be called after
        `scanned`."""
        if self.mode == "direct" or not self.is_first or self.node.lock_fd is None:
            return None
        try:
            found = json.loads((self.node.path / nodedir.SCANNED).read_bytes())
        except (OSError, ValueError):
            return Problem(
                "scan-failed", "the scan of the datasets failed", f"look at the daemon's log {self.node.log}"
            )
        first = next(iter(found["problems"]), None)
        return Problem(**first) if first else None

    def staged(self, timeout_s: float) -> bool:
        """Returns whether all nodes hold what they will hold, or never will because they are gone; to be asked after
        `control.ask_staged`."""
        if self.control.process is not None and self.control.dead():
            return True
        if self.lead is not None and not self.lead.staged(0.0):
            return False
        return self.control.staged(timeout_s)

    def started(self, pid: int) -> None:
        """Notes that the command runs, tells the daemon, and saves the part of the record."""
        self.part.child_started_s = self.clock.elapsed_s()
        self.part.child_pid = pid
        self.control.attach(pid)
        with contextlib.suppress(OSError):
            runpart.save_part(self.run_dir, self.part)
            if self.is_first and self.node.lock_fd is not None:
                index.begin(self.part, self.run_dir)

    def watch(self) -> None:
        """Looks after the daemon and the lead, now and then while the command runs: reports a dead daemon once and
        makes the shims stop asking it."""
        self.progress.show()
        if self.lead is not None:
            self.part.problems += self.lead.problems()
        if self.lost or not self.control.dead():
            return
        self.lost = True
        if self.lead is not None:
            self.lead.tell("dead")
        page.set_state(self.node.path / nodedir.PAGE, shim.State.ENDED)
        text = f"the staging daemon on {self.part.host} ended early; what is not staged is read from the source"
        messages.warn(f"{text} (its log: {self.log_kept})")
        self.part.problems.append(Problem("daemon-died", text, f"its log: {self.log_kept}"))
        self.keep_log()

    def ended(self) -> None:
        """Notes that the command has ended."""
        self.part.child_ended_s = self.clock.elapsed_s()

    @property
    def is_first(self) -> bool:
        """Whether this wrapper runs on the first node; the last wrapper there writes the record."""
        return self.group is None or self.group.index == 0

    def _connect(self, datasets: Datasets, local: LocalDir, job: jobs.Job, group: Grouping | None) -> None:
        self.group = self.progress.group = group
        if group is not None:
            self.part.nodes = list(group.hosts)
        try:
            if self.node.lock_fd is None:
                self.control = control.join(self.node.sock)
                return
            spec = self._spec(datasets, local, job)
            datasets.save(self.node.path / DATASETS)  # a list may be readable only once, such as a pipe
            lead = None if group is None else self._lead_spec(spec, local, group)
            one = ShimSetup.of(self.config.intercept, spec)
            setup = one if lead is None else hosted.shims(lead, spec, self.node)
            control.prepare(self.node, datasets.all, setup)
            locks = () if self.directories is None else self.directories.locks
            self.control = control.start_daemon(self.node, spec, os.environ, locks)
        except Exception as error:
            if self.node.lock_fd is not None:
                shutil.rmtree(self.node.path, ignore_errors=True)
            self.node.close()
            if (found := explained(error, local)) is not error:
                raise found from None
            raise
        if lead is not None and group is not None:
            self._begin_group(group, lead)

    def _begin_group(self, group: Grouping, lead: LeadSpec) -> None:
        try:
            self.lead = grouping.begin(group, lead, self.node)
            if self.lead is not None and self.directories is not None:
                self._meet(self.directories, self.lead, lead)
        except Exception as error:  # noqa: BLE001  the daemon of this node is up, and stages for it
            text = f"the other nodes are left alone: {error}"
            messages.warn(text)
            self.part.problems.append(Problem("group-lost", text, "each node reads for itself"))

    def _meet(self, directories: RunDirectories, link: LeadLink, lead: LeadSpec) -> None:
        from hpcstage.wrapper.leadlink import OtherNodes

        suffixes = {host: lead.suffix(index) for index, host in enumerate(lead.hosts) if index}
        machine = socket.gethostname() if lead.virtual else None
        directories.meet(OtherNodes(suffixes, machine, link, self.part.run_id, Path(lead.group_dir)))

    def _spec(self, datasets: Datasets, local: LocalDir, job: jobs.Job) -> DaemonSpec:
        config, group = self.config, self.group
        shares = 1 if group is None else group.shares
        return DaemonSpec(
            run_id=self.part.run_id,
            node_dir=os.fspath(self.node.path),
            run_dir=os.fspath(self.run_dir),
            mode=self.mode,
            datasets=list(datasets.all),
            order=config.order_asked(),
            budget=share.budget_facts(config.budget_asked(), job, local, shares),
            copiers=share.copier_count(job, shares),
            max_rate_bytes_per_s=config.max_rate_bytes_per_s,
            leftovers=[os.fspath(path) for path in self.node.leftovers],
            drain_s=config.drain_s,
            **({} if self.directories is None else self.directories.in_spec(config, self._ends_unix_s(job))),
            command=self.part.command,
            state_dir=os.path.abspath(state_dir(os.environ)),
            **grouping.in_group(config, group, self.part.host),
        )

    def _lead_spec(self, spec: DaemonSpec, local: LocalDir, group: Grouping) -> LeadSpec:
        """Returns what the lead and the agents are told."""
        own = {"node_dir": os.fspath(self.node.path), "sock": os.fspath(self.node.sock)}
        daemon = replace(
            spec, run_dir=os.path.abspath(spec.run_dir), membership=spec.membership.knowing(group.index, **own)
        )
        told = {} if self.directories is None else self.directories.in_lead()
        return grouping.lead_spec(self.config, daemon, local, group, told)

    def _ends_unix_s(self, job: jobs.Job) -> float | None:
        """Returns when the job's time ends; None if nobody knows."""
        limit_s = self.config.time_limit_s
        return job.end_time_unix_s if limit_s is None else self.clock.unix_s + limit_s

    @property
    def log_kept(self) -> Path:
        """Returns where the daemon's log is found after the node directory has gone."""
        return log_path(self.run_dir, self.part.host)

    def keep_log(self) -> None:
        """Copies the daemon's log to where it is found later."""
        with contextlib.suppress(OSError):
            replace_copy(self.node.log, self.log_kept)


def explained(error: Exception, local: LocalDir) -> Exception:
    """Returns what to tell of an error while a node directory is filled: where there is no room, and what to do."""
    if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
        return error
    what = f"cannot write to the local directory {local.path}: {error.strerror}"
    return LocalDiskProblem(what, _NO_ROOM[error.errno])


def _node_of(config: Config, local: LocalDir, job: jobs.Job, run_id: str, group: Grouping | None) -> RunNode:
    """Returns this node as the directories that are drained have to know it."""
    from hpcstage.wrapper.rundirectory import RunNode

    if job.is_rank:
        return RunNode(run_id, "", "hpcstage stands behind a launcher; in front of it, each node has a local one")
    if group is not None:
        return RunNode(run_id, group.node_name(""))
    if len(job.nodes) > 1 and config.nodes != 1 and not local.is_network:
        return RunNode(run_id, "", "the other nodes of the job are left alone")
    return RunNode(run_id)


def _directories(
    config: Config, local: LocalDir, job: jobs.Job, run_id: str, group: Grouping | None
) -> RunDirectories | None:
    """Drains what killed runs left, then returns the directories of this run that are drained; None where none was
    asked for. Raises UsageError."""
    above = directory.outputs_base(local, socket.gethostname())
    is_asked = config.out is not None or config.checkpoint is not None
    if not is_asked and not above.exists():
        return None
    from hpcstage.wrapper.rundirectories import RunDirectories

    made = RunDirectories.open(config, local, job, _node_of(config, local, job, run_id, group))
    return made if is_asked else None
