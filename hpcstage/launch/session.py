"""One run on this node: its directories, its daemon, its record.

Owns what is made before the command starts and what is done after it ended. Several wrappers of one launch on one
node share a node directory: who takes its lock starts the daemon, the others only attach.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import resource
import shutil
import socket
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hpcstage
from hpcstage import __version__, wire
from hpcstage import job as jobs
from hpcstage.daemon.spec import DaemonSpec
from hpcstage.errors import NotStarted
from hpcstage.job import localdir, nodedir
from hpcstage.launch import control, environment, messages, page, rundir, shimdir
from hpcstage.plan.datasets import already_local
from hpcstage.plan.earlier import said_of_program
from hpcstage.record.index import state_dir
from hpcstage.record.part import RunPart

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.job.nodedir import Claim, SockPath
    from hpcstage.launch.run import Clock
    from hpcstage.plan.datasets import Resolved

READY_AFTER_S = 4.0
REMOVAL_S = 60.0
"""The daemon deletes the store before it goes; a million files take a while."""


class Node:
    """The node directory, and what must be let go of at the end."""

    def __init__(self, claim: Claim, sock: SockPath) -> None:
        self.path = claim.path
        self.lock_fd = claim.lock_fd
        self.leftovers = claim.leftovers
        self.short = sock
        self.sock = sock.path

    def close(self) -> None:
        """Lets go of the lock (the daemon has its own hold on it) and of a short name of the socket."""
        if self.lock_fd is not None:
            os.close(self.lock_fd)
        nodedir.drop_short(self.short.short_dir)


class Session:
    """A prepared run: the daemon is up or coming up, the command may start."""

    def __init__(self, config: Config, node: Node, run_dir: Path, part: RunPart, clock: Clock) -> None:
        self.config = config
        self.node = node
        self.run_dir = run_dir
        self.part = part
        self.part.run_dir = os.fspath(run_dir)
        self.clock = clock
        self.control: control.Control
        self.lost = False
        self.ready = False

    @classmethod
    def open(cls, command: Sequence[str], config: Config, resolved: Resolved, clock: Clock) -> Session:
        """Makes the directories and starts or joins the daemon. Signals are blocked: nothing interrupts half-way."""
        host = socket.gethostname()
        job = jobs.detect(os.environ, hostname=host, parent_pid=os.getppid())
        local = localdir.choose(config.local_dir, os.environ, job)
        if local is None:
            raise NotStarted("local_dir is none", "give --local-dir")
        run_id = _shared_id(job.run_key, config) or rundir.unique_id(clock.unix_s, job.job_id)
        part = _part(command, config, clock, run_id, job, local)
        part.roots = [os.fsdecode(dataset.root) for dataset in resolved.datasets]
        notices = _check_datasets(resolved, local, part, strict=config.strict)
        run_dir = rundir.make(config.run_dir, Path.cwd(), run_id, dict(os.environ))
        claim = nodedir.claim(local, run_id, host=host)
        if claim.lock_fd is not None:  # said once on a node, not by every rank
            for warning in (*job.notes, *local.warnings, *notices):
                messages.warn(warning)
            messages.info(f"staging below {local.path} ({local.why})")
        session = cls(config, Node(claim, nodedir.sock_path(claim.path, os.environ)), run_dir, part, clock)
        session._connect(resolved, local, job)
        return session

    @property
    def waits_for_copy(self) -> bool:
        """Upfront: the command starts when the copy is complete."""
        return self.part.mode_asked == "upfront"

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """The command's environment."""
        return environment.for_command(
            env,
            shim_dir=self.node.path / "shim",
            node_dir=self.node.path,
            run_dir=self.run_dir,
            run_id=self.part.run_id,
            sock=self.node.sock,
        )

    def started(self, pid: int) -> None:
        """The command runs."""
        self.part.child_started_s = self.clock.elapsed_s()
        self.part.child_pid = pid
        self.control.attach(pid)
        with contextlib.suppress(OSError):
            rundir.save_part(self.run_dir, self.part)

    def watch(self) -> None:
        """Called now and then while the command runs: a dead daemon is said once, and shims stop asking it."""
        self._get_ready()
        if self.lost or not self.control.dead():
            return
        self.lost = True
        page.set_state(self.node.path / "page", wire.State.ENDED)
        text = f"the staging daemon ended early; reads go to the source where they are not staged (log: {self._log()})"
        messages.warn(text)
        self.part.problems.append({"id": "daemon-died", "text": text, "remedy": "look at the daemon's log"})

    def _get_ready(self) -> None:
        """Imports what the end needs while the command computes, and not while it starts: nobody waits for it then."""
        begun_s = self.part.child_started_s
        if not self.ready and begun_s is not None and self.clock.elapsed_s() > begun_s + READY_AFTER_S:
            importlib.import_module("hpcstage.launch.result")
            self.ready = True

    def close(self, status: int | None) -> None:
        """After the command: the daemon's part, the record, the short report, nothing left on the node."""
        self.part.child_ended_s = self.clock.elapsed_s() if self.part.child_started_s is not None else None
        self._take_status(status)
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.part.child_cpu_s = usage.ru_utime + usage.ru_stime
        self.watch()
        last = self.control.end(status or 0, self.config.drain_s)
        if last is not False:
            self._report(complete=last is True)
        gone = self.control.gone(REMOVAL_S if last is not None else 0.0)
        self.control.close()
        if self.control.process is not None and not gone:
            self._keep_log()
            shutil.rmtree(self.node.path, ignore_errors=True)
        self.node.close()

    def _connect(self, resolved: Resolved, local: LocalDir, job: jobs.Job) -> None:
        try:
            if self.node.lock_fd is None:
                self.control = control.join(self.node.sock)
                return
            self._prepare_node(resolved)
            self.control = self._start(self._spec(resolved, local, job), self.node.lock_fd)
        except OSError:
            if self.node.lock_fd is not None:
                shutil.rmtree(self.node.path, ignore_errors=True)
            self.node.close()
            raise

    def _prepare_node(self, resolved: Resolved) -> None:
        resolved.save(self.node.path / "resolved")  # a list may be readable only once
        for name in ("store", "incoming", "orders", "opens", "links"):
            (self.node.path / name).mkdir(mode=0o700, exist_ok=True)
        page.create(self.node.path / "page")
        maps = []
        for dataset in resolved.datasets:
            store = os.fsencode(self.node.path / "store" / dataset.name)
            maps += [(root, store) for root in dict.fromkeys((dataset.root, *dataset.aliases))]
        shimdir.install(
            self.node.path,
            maps,
            intercept=self.config.intercept,
            mode="direct" if self.part.mode_asked == "direct" else "stage",
            want_cap_s=self.config.want_cap_s,
            sock=self.node.sock,
        )

    def _start(self, spec: DaemonSpec, lock_fd: int) -> control.Control:
        listener = control.listen(self.node.sock)
        try:
            path = self.node.path / "spec.json"
            replace(spec, listen_fd=listener.fileno(), lock_fd=lock_fd).save(path)
            env = environment.for_daemon(os.environ, Path(hpcstage.__file__).parent.parent)
            process = control.start_daemon(path, self._log(), env, (listener.fileno(), lock_fd))
            return control.Control(self.node.sock, process)
        finally:
            listener.close()

    def _spec(self, resolved: Resolved, local: LocalDir, job: jobs.Job) -> DaemonSpec:
        config = self.config
        budget_bytes, budget_inodes = config.budget_asked().resolve(local.free_bytes, local.free_inodes)
        return DaemonSpec(
            run_id=self.part.run_id,
            host=self.part.host,
            node_dir=os.fspath(self.node.path),
            run_dir=os.fspath(self.run_dir),
            mode=self.part.mode_asked,
            datasets=list(resolved.datasets),
            arguments=list(config.data),
            cwd=self.part.cwd,
            order=config.order_asked(),
            budget_bytes=budget_bytes if budget_bytes is not None or not local.is_memory else local.free_bytes,
            budget_inodes=budget_inodes,
            copiers=config.copier_count(job.cpus or len(os.sched_getaffinity(0))),
            transfers=config.transfers,
            max_rate_bytes_per_s=config.max_rate_bytes_per_s,
            want_cap_s=config.want_cap_s,
            patience_s=config.patience_s,
            nice=config.nice,
            leftovers=[os.fspath(path) for path in self.node.leftovers],
            **_workload(config),
            drain_s=config.drain_s,
            command=self.part.command,
            state_dir=os.path.abspath(state_dir(os.environ)),
        )

    def _log(self) -> Path:
        return self.node.path / "daemon.log"

    def _keep_log(self) -> None:
        with contextlib.suppress(OSError):
            shutil.copyfile(self._log(), self.run_dir / "nodes" / f"{self.part.host}.log")

    def _take_status(self, status: int | None) -> None:
        if status is None:
            return
        code = os.waitstatus_to_exitcode(status)
        self.part.exit_code = code if code >= 0 else 128 - code
        self.part.signal = -code if code < 0 else None

    def _report(self, *, complete: bool) -> None:
        """Composes the record and says the short form; whatever fails here is said and changes nothing else."""
        from hpcstage.launch.result import write_record

        self.part.ended_s = self.clock.elapsed_s()
        if not complete and not self.lost:
            text = f"the staging daemon did not answer within {self.config.drain_s:.0f} s of the command's end"
            self.part.problems.append({"id": "daemon-silent", "text": text, "remedy": "look at nodes/*.log"})
        write_record(self.run_dir, self.part)


def _workload(config: Config) -> dict[str, Any]:
    """What the user says of the program; the daemon's scan looks for the rest while the program starts."""
    if config.mode != "auto":
        return {}
    values, sources = said_of_program(config)
    return {**values, "workload_sources": sources}


def _shared_id(run_key: str | None, config: Config) -> str | None:
    """The id that all wrappers of one launch on a node find alone; two commands of one task must not share it."""
    if run_key is None:
        return None
    asked = "\0".join([config.mode, config.order, *config.data])
    return f"{run_key}-{zlib.crc32(os.fsencode(asked)):08x}"


def _part(command: Sequence[str], config: Config, clock: Clock, run_id: str, job: jobs.Job, local: LocalDir) -> RunPart:
    return RunPart(
        run_id=run_id,
        command=list(command),
        cwd=os.fspath(Path.cwd()),
        host=socket.gethostname(),
        started_unix_s=clock.unix_s,
        mode_asked=config.mode,
        scheduler=job.scheduler,
        job_id=job.job_id,
        nodes=list(job.nodes),
        local_dir=os.fspath(local.path),
        local_dir_why=local.why,
        config=config.rows(),
        version=__version__,
        python=platform.python_version(),
        kernel=platform.release(),
    )


def _check_datasets(resolved: Resolved, local: LocalDir, part: RunPart, *, strict: bool) -> list[str]:
    """A dataset on the local disk already has nothing to gain: it is read where it is. Returns what to say."""
    said = []
    for notice in [*resolved.warnings, *already_local(resolved.datasets, local.device)]:
        if notice.id == "already_local":
            if strict:
                raise NotStarted(notice.text, notice.remedy)
            part.mode_asked = "direct"
        said.append(f"{notice.text} ({notice.remedy})")
        part.problems.append({"id": notice.id.replace("_", "-"), "text": notice.text, "remedy": notice.remedy})
    return said
