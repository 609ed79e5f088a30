"""The checks of `hpcstage doctor`: each yields what it found, by the functions with which `hpcstage run` decides.

A check keeps nothing: the node directory in which a Python is tried is removed. A file system is asked in a child first
(`asking.hangs`); what it answered in time is asked again here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcstage import extras, inherited
from hpcstage import job as jobs
from hpcstage.daemon.copying import changes
from hpcstage.doctor.asking import ANSWER_S, hangs, heard
from hpcstage.errors import HpcstageError, NotStarted
from hpcstage.extras import Extra
from hpcstage.inotify import EventQueue
from hpcstage.job import launchers, localdir, together
from hpcstage.job.disks import Machine
from hpcstage.job.schedulers import fold_nodes
from hpcstage.lead import world
from hpcstage.node import childenv, control, directory, shimdir
from hpcstage.plan.dataset import datasets
from hpcstage.protocol import nodedir, rundir
from hpcstage.protocol.exchangespec import TRIED
from hpcstage.record import notes
from hpcstage.store import copyfile
from hpcstage.units import format_number, format_size
from hpcstage.wrapper import grouping, passthrough, run, runpart, session
from hpcstage.wrapper.child import exec_error
from hpcstage.wrapper.program import python_of, unserved

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.node.directory import NodeDirectory
    from hpcstage.plan.types import Dataset

PYTHON_S = 30.0
"""The longest wait for a Python, which may be read from a busy file system for the first time."""
_WAITS_TOO = "a run would wait for it, too: is its file system mounted, and does it answer?"
_TOLD = "hpcstage-python "
_PROBE = f"""
import sys
shim = sys.modules.get("_hpcstage_attach")
from importlib.util import find_spec
torch = "torch" if find_spec("torch") else "none"
print({_TOLD!r} + " ".join([shim.layer if shim else "none", ".".join(map(str, sys.version_info[:3])), torch]))
"""


@dataclass(frozen=True)
class Finding:
    """What was found, what to do about it, and by which check."""

    level: Literal["ok", "warning", "error"]
    """`warning`: it would work, but not as well as it could; `error`: what was asked for would not work."""
    text: str
    remedy: str = ""
    check: str = ""

    @property
    def line(self) -> str:
        """The finding for people, on one line."""
        text = f"{self.text} ({self.remedy})" if self.remedy else self.text
        return f"{self.check}: {text}".replace("\n", "\\n")


Findings = Iterator[Finding]
_ok, _warning, _bad = partial(Finding, "ok"), partial(Finding, "warning"), partial(Finding, "error")


@dataclass
class Surroundings:
    """The run that is asked for, and what the checks have found out so far."""

    command: Sequence[str]
    config: Config
    job: jobs.Job
    cwd: Path
    local: LocalDir | None = None
    datasets: list[Dataset] = field(default_factory=list)


def examine(command: Sequence[str], config: Config) -> Findings:
    """Yields the findings of all checks, each as soon as it is known."""
    job = jobs.here()
    found = Surroundings(command, config, job, inherited.directory())
    for name, check in CHECKS.items():
        try:
            for finding in check(found):
                yield replace(finding, check=finding.check or name)
        except HpcstageError as error:
            yield replace(_error(error), check=name)
        except OSError as error:
            yield _bad(f"{error.filename or 'a system call'}: {error.strerror}", check=name)


def switch(found: Surroundings) -> Findings:
    """Whether hpcstage is switched on, and what is odd about its settings."""
    if passthrough.serves(os.environ):
        yield _warning("another `hpcstage run` serves this command: one inside it does nothing")
    elif passthrough.passes_through(os.environ):
        yield _bad("hpcstage is switched off", "unset HPCSTAGE_DISABLE")
    yield from map(_warning, found.config.warnings)


def scheduler(found: Surroundings) -> Findings:
    """Which scheduler and nodes there are, and whether this host is one of them."""
    job = found.job
    grouping.require_node(job)
    if job.scheduler == "none":
        yield _ok(f"none on {job.hostname}: in a job, start this command in the job script")
    else:
        nodes = f"{format_number(len(job.nodes), 'node')}: {fold_nodes(job.nodes)}"
        yield _ok(f"{job.scheduler}, job {job.job_id}, {nodes}")
    yield from map(_warning, job.notes)


def local_disk(found: Surroundings) -> Findings:
    """Which node-local directory is chosen and why, and whether a node directory can be made there."""
    setting = found.config.local_dir
    if hangs(lambda: localdir.require(setting, os.environ, found.job)):
        paths = localdir.candidates(setting, os.environ, found.job)
        silent = next((path for path in paths if hangs(partial(os.listdir, path))), paths[-1])
        yield _silent(silent, "name another with --local-dir, or unset the variable that names it")
        return
    local = localdir.require(setting, os.environ, found.job)
    with _node_directory(found, local):
        found.local = local
    inodes = "" if local.free_inodes is None else f" and {local.free_inodes:,} inodes"
    kind = Machine().kind(os.fspath(local.path)) or "an unknown file system"
    yield _ok(f"{local.path} ({local.why}), on {kind}: {format_size(local.free_bytes)}{inodes} free")
    yield from map(_warning, local.warnings)


def extensions(_found: Surroundings) -> Findings:
    """Whether the C extensions were built."""
    is_built = shimdir.native_available() and copyfile.HAS_TURNS
    text = "not built: files opened by C code are read from the source"
    yield _ok("built") if is_built else _warning(text, notes.REINSTALL)


def python(found: Surroundings) -> Findings:
    """Whether the shim attaches to the Python of the command, and in which layer."""
    command = found.command
    likely = (command, ["python"], ["python3"])
    place = f"{command[0] if command else 'python'}, or a directory of PATH,"
    if hangs(lambda: [*map(python_of, likely)]):
        yield _silent(place)
        return
    words = next(filter(None, map(python_of, likely)), None)
    if command and shutil.which(command[0]) is None:
        number = errno.EACCES if os.path.lexists(command[0]) else errno.ENOENT
        raise exec_error(command, OSError(number, os.strerror(number)))
    if command and (said := unserved(command)) is not None:
        yield _warning(said)
    elif any(os.path.basename(word) in childenv.CONTAINERS for word in command[:2]):
        yield _warning(f"a Python in a container of {command[0]} was not tried")
    elif words is None:
        yield _warning("no python is on PATH", "activate its environment, or write `-- COMMAND` behind the options")
    elif found.local is None:
        yield _warning(f"{words[0]} was not tried, as there is no local directory")
    else:
        with _node_directory(found, found.local) as node:
            yield from _tried(words, node, found.config)


def nodes(found: Surroundings) -> Findings:
    """Whether MPI connects the nodes of the run, by a program that is started on all of them."""
    config, job = found.config, found.job
    group = together.find(config, job, found.local, socket.gethostname())
    if found.local is not None:
        yield from map(_warning, together.warnings(config, job, found.local))
    if job.is_rank:
        yield _ok("not tried behind a launcher: put this command in front of it")
        return
    if group is None and (job.scheduler != "none" or config.nodes == 1):
        yield _ok(f"{job.hostname} stages alone: MPI is not needed")
        return
    try:
        grouping.placed(group, found.cwd / (config.run_dir or rundir.RUNS), "doctor")
    except NotStarted as error:
        yield _warning(error.what, error.remedy)
        return
    two = [f"{job.hostname}.v0", f"{job.hostname}.v1"]
    tried = group or together.Grouping(two, 0, launchers.VIRTUAL, starts_daemons=True)
    library, why = _connected(tried)
    if library:
        yield _ok(f"{library} connects {fold_nodes(group.hosts) if group else 'two processes on this host'}")
    else:
        remedy = "" if Extra.MPI.remedy in why else f"use an mpiexec that belongs to mpi4py: {Extra.MPI.remedy}"
        yield _warning(f"{'' if group else 'in a job of several, '}{world.UNCONNECTED}: {why}", remedy)


def protection(found: Surroundings) -> Findings:
    """Whether the packages of --checkpoint are there, and which erasure code is used."""
    missing = extras.missing(Extra.CHECKPOINT, *extras.OF_CHECKPOINTS)
    if missing is None:
        from hpcstage.checkpoint.coding.kernels import NoKernel, best_kernel

        try:
            yield _ok(f"--checkpoint can be used, erasure code by {best_kernel().name}")
        except NoKernel as error:
            yield _ok(f"--checkpoint can be used, but nodes cannot protect each other: {error.what}", error.remedy)
    else:
        to_say = _bad if found.config.checkpoint else _ok
        yield to_say(f"--checkpoint would not work: {missing.what}", missing.remedy)


def sources(found: Surroundings) -> Findings:
    """Whether each dataset can be read, what it lies on, and whether that is the local disk already; then all that a
    run refuses of its options."""
    asked = found.config if found.command else replace(found.config, elastic=None)
    for argument in asked.data:
        for finding in _source(argument, found):
            yield replace(finding, check=f"dataset {argument}")
            if finding.level == "error" or _is_pipe(argument):
                asked = replace(asked, data=tuple(name for name in asked.data if name != argument))
    if not (asked.data or asked.out or asked.checkpoint or asked.elastic):
        return
    place = " or ".join(filter(None, (asked.out, asked.checkpoint))) or "a dataset"
    without_torchrun = replace(asked, elastic=None)
    try:
        if hangs(lambda: run.resolve(found.command, without_torchrun)):
            yield replace(_silent(place), check="options")
        else:
            run.resolve(found.command, asked)
    except HpcstageError as error:
        yield replace(_error(error), check="options")


def notices(found: Surroundings) -> Findings:
    """Whether changes of files are noticed (inotify)."""
    where = "any directory"
    try:
        with contextlib.closing(EventQueue()) as queue:
            for root in [dataset.root for dataset in found.datasets] or [b"/"]:
                where = os.fsdecode(root)
                queue.add(root, changes.MASK)
    except OSError as error:
        why = {errno.ENOSPC: changes.NO_WATCH_LEFT, errno.EMFILE: changes.NO_QUEUE_LEFT}.get(error.errno or 0)
        problem = changes.unnoticed(found.job.hostname, f"{where} ({why or error.strerror})")
        yield _warning(problem.text, problem.remedy)
    else:
        yield _ok(f"changes are noticed in up to {changes.limit():,} directories")


CHECKS: dict[str, Callable[[Surroundings], Findings]] = {
    "hpcstage": switch,
    "scheduler": scheduler,
    "local directory": local_disk,
    "extensions": extensions,
    "python": python,
    "nodes": nodes,
    "checkpoints": protection,
    "datasets": sources,
    "inotify": notices,
}
"""In the order in which they are made: later ones use what earlier ones found."""


@contextlib.contextmanager
def _node_directory(found: Surroundings, local: LocalDir) -> Iterator[NodeDirectory]:
    """Makes and fills a node directory as a run does, and removes it."""
    node = directory.claim(local, runpart.unique_id(time.time(), None), host=socket.gethostname())
    try:
        setup = shimdir.ShimSetup(found.config.intercept, direct=found.config.mode == "direct")
        try:
            control.prepare(node, [], setup)
        except OSError as error:
            raise session.explained(error, local) from None
        yield node
    finally:
        shutil.rmtree(node.path, ignore_errors=True)
        node.close()


def _tried(words: Sequence[str], node: NodeDirectory, config: Config) -> Findings:
    """Starts a Python with its options in the environment of a command."""
    shim_dir, own = node.path / nodedir.SHIM, node.path
    env = childenv.for_command(
        os.environ, shim_dir=shim_dir, node_dir=own, run_dir=own, run_id=own.name, sock=node.sock
    )
    said, why = heard([*words, "-c", _PROBE], env, _TOLD, PYTHON_S)
    if not said:
        yield _bad(f"{' '.join(words)} does not run as Python does: {why}", "name another Python")
        return
    layer, version, torch = said.split()
    shown = f"{' '.join(words)} ({version})"
    if layer == "native":
        yield _ok(f"{shown}: the native layer attaches")
    elif layer == "python":
        text = f"{shown}: the Python layer attaches, files opened by C code are read from the source"
        yield _warning(text, f"{notes.REINSTALL}, or drop --intercept python")
    elif layer == "direct" and config.intercept == "off":
        yield _bad(f"{shown}: nothing is redirected, as --intercept off says", "leave it out")
    elif layer == "direct":
        yield _bad(f"{shown}: redirection fails its self-test", notes.SHIM_OFF)
    elif tuple(map(int, version.split(".")[:2])) < (3, 8):
        yield _bad(f"{shown}: hpcstage serves Python 3.8 and later", "name a newer Python")
    else:
        text = f"{shown}: hpcstage does not attach, what it reads comes from the source"
        yield _bad(text, f"{notes.DROPPED}, or hpcstage install-hook --python {words[0]}")
    if torch == "torch":
        yield _ok(f"{words[0]} has PyTorch", check="torch")
    else:
        text = f"{words[0]} has no PyTorch, which only samplers, --elastic and hpcstage.torch need"
        yield _ok(text, Extra.TORCH.remedy, "torch")


def _connected(group: together.Grouping) -> tuple[str, str]:
    """Returns the MPI library that connects the hosts, else the reason why none does."""
    mpiexec = world.find_mpiexec()
    if (why := world.why_none(group.launcher, mpiexec)) is not None:
        return "", why
    program = (sys.executable, "-s", "-m", "hpcstage.exchange.trial", str(len(group.hosts)))
    env = launchers.scrubbed(childenv.for_daemon(os.environ, control.package_parent()))
    library, why = "", "there is no way to start it"
    kind = world.mpi_of(mpiexec)
    for way in launchers.mpi_world(group.launcher, program, group.hosts, kind, mpiexec, group.parts):
        library, why = heard(way, env, TRIED, world.LATE_S)
        if library:
            break
    return library, why


def _source(argument: str, found: Surroundings) -> Findings:
    if hangs(lambda: _is_pipe(argument) or _resolved(argument, found.cwd)):
        yield _silent(argument)
        return
    if _is_pipe(argument):
        yield _ok("a pipe, which only the run can read")
        return
    try:
        named = _resolved(argument, found.cwd)
    except HpcstageError as error:
        yield _error(error)
        return
    device = None if found.local is None else found.local.device
    yield from (_warning(problem.text, problem.remedy) for problem in datasets.already_local(named, device).values())
    for root in [os.fsdecode(dataset.root) for dataset in named]:
        below = Machine().kinds_below(root)
        more = f", and {format_number(len(below), 'file system')} below it ({', '.join(sorted({*below}))})"
        yield _ok(f"{root} can be read, on {Machine().kind(root) or 'an unknown file system'}{more if below else ''}")
    found.datasets += named


def _resolved(argument: str, cwd: Path) -> list[Dataset]:
    return datasets.resolve([argument], cwd).all


def _is_pipe(argument: str) -> bool:
    with contextlib.suppress(OSError):
        return argument.startswith("@") and stat.S_ISFIFO(os.stat(argument[1:]).st_mode)
    return False


def _error(error: HpcstageError) -> Finding:
    return _bad(error.line().removesuffix(f" ({error.remedy})"), error.remedy)


def _silent(name: str, remedy: str = _WAITS_TOO) -> Finding:
    return _bad(f"{name} does not answer (waited {ANSWER_S:g} s)", remedy)
