"""Owns `hpcstage run`, from a configuration and a command to the command's exit code.

The module owns the sequence, and the promise that the command runs whatever happens to hpcstage: after any failure
before its start, it runs without hpcstage (or, with `--strict`, it does not run and the exit code is 125).
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage import extras, inherited
from hpcstage import job as jobs
from hpcstage.errors import HpcstageError, NoLocalDir, NotStarted, UsageError
from hpcstage.plan.dataset import datasets as plan_datasets
from hpcstage.problem import NO_PYTHON, Problem
from hpcstage.wrapper import closing, messages
from hpcstage.wrapper.child import Child, Signals, finish
from hpcstage.wrapper.passthrough import replace_with
from hpcstage.wrapper.program import unserved
from hpcstage.wrapper.runpart import Clock, report_not_staged

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.plan.dataset.datasets import Datasets
    from hpcstage.wrapper import elastictraining
    from hpcstage.wrapper.outdir import NamedDirectory
    from hpcstage.wrapper.rundirectories import RunDirectories
    from hpcstage.wrapper.session import Session

_WAIT_S = 0.05
_ASKS_TO_END = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGXCPU})
_PLACEHOLDER = re.compile(r"\{(out|checkpoint)\}")


def run(command: Sequence[str], config: Config, verbosity: int) -> int:
    """Runs the command with its datasets staged; returns its exit code."""
    messages.set_verbosity(verbosity)
    for warning in config.warnings:
        messages.warn(warning)
    started = Clock()
    if config.join is not None:
        from hpcstage.elastic.membership.values import TrainingEnd
        from hpcstage.wrapper import jointraining

        cwd = inherited.directory()
        if jobs.here().scheduler != "none":
            jointraining.await_begin(config.join, cwd, os.environ)
        found = jointraining.find(config.join, cwd, os.environ, socket.gethostname())
        if isinstance(found, TrainingEnd):
            messages.warn(f"training {config.join} is over: {found.line}")
            return found.exit_code
        command, config = found.words(), jointraining.settings(config, found)
        messages.warn(f"this job joins training {found.name}: {shlex.join(command)}")
        for key, directory in found.directories.items():
            messages.warn(f"{{{key}}} is {directory} itself on the nodes of this job, and nothing on a local disk")
    try:
        with _preparing():
            datasets = resolve(command, config)
    except NotStarted as error:
        nothing = plan_datasets.Datasets([], [], {})
        return _without_us(command, config, error, Signals(), nothing, started)
    signals = Signals()
    try:
        session = _open_session(command, config, datasets, started)
    except HpcstageError as error:
        return _without_us(command, config, error, signals, datasets, started)
    try:
        code = finish(_run(command, session, signals))
        return code or (session.directories.exit_code if session.directories else 0)
    finally:
        signals.release()


def resolve(command: Sequence[str], config: Config) -> Datasets:
    """Returns the datasets. Raises UsageError if these, or the directories and the training that are asked for, cannot
    be used."""
    cwd = inherited.directory()
    if config.elastic is None and config.name is not None:
        raise UsageError("--name is for --elastic", "add --elastic MIN:MAX, or leave it out")
    if config.elastic is None and config.policy != "minmax":
        raise UsageError("--policy is for --elastic", "add --elastic MIN:MAX, or leave it out")
    has_directory = config.out is not None or config.checkpoint is not None
    if not config.data and not has_directory and config.elastic is None:
        raise UsageError("no dataset given", "use --data DIRECTORY, or data: in hpcstage.yaml")
    datasets = plan_datasets.Datasets([], [], {})
    if config.data:
        datasets = plan_datasets.resolve(config.data, cwd, order=config.order_asked())
    if has_directory or config.protect is not None or any(_PLACEHOLDER.search(word) for word in command):
        from hpcstage.wrapper import rundirectories

        rundirectories.check(config, command, datasets.all)
    if config.elastic is not None:
        from hpcstage.wrapper import elastictraining

        elastictraining.check(command, config, jobs.here())
    return datasets


def _open_session(command: Sequence[str], config: Config, datasets: Datasets, started: Clock) -> Session:
    from hpcstage.wrapper.session import Session

    with _preparing():
        return Session.open(command, config, datasets, started)


@contextlib.contextmanager
def _preparing() -> Iterator[None]:
    """Makes an error with one line of a mistake of ours, which costs staging, never the run."""
    try:
        yield
    except HpcstageError:
        raise
    except Exception as error:  # noqa: BLE001
        missing = extras.of_import(error) if isinstance(error, ModuleNotFoundError) else None
        if missing is not None:
            raise NotStarted(missing.what, missing.remedy) from None
        raise NotStarted(f"cannot prepare the run on {socket.gethostname()}: {_fault(error)}") from None


def _fault(error: Exception) -> str:
    return str(error) if isinstance(error, OSError | HpcstageError) else f"{type(error).__name__}: {error}"


def _without_us(
    command: Sequence[str], config: Config, error: HpcstageError, signals: Signals, datasets: Datasets, started: Clock
) -> int:
    signals.release()
    if isinstance(error, UsageError):
        raise error
    report_not_staged(command, config, error, datasets, started)
    if config.strict:
        raise error
    if not (isinstance(error, NoLocalDir) and _is_later_on_node()):
        messages.warn(f"{error.line()}; the command runs without staging")
    found: Mapping[NamedDirectory, str] = {}
    if config.out is not None or config.checkpoint is not None:
        from hpcstage.wrapper import rundirectories

        found = rundirectories.at_target(config)
        for named, path in found.items():
            messages.warn(f"{named.placeholder} is {path}")
    if config.elastic is None:
        return replace_with(command, found)
    from hpcstage.wrapper import elastictraining

    for named, path in found.items():
        command = named.put_in(command, path)
        os.environ.update(named.environment(os.environ, path))
    command = elastictraining.unstaged_command(command, config, jobs.here(), started.unix_s)
    os.environ.update(elastictraining.own_environment(os.environ))
    return replace_with(command)


def _is_later_on_node() -> bool:
    """Returns whether another wrapper of this launch on this node reports what is true for the whole node."""
    return bool(jobs.here().local_rank)


def _run(command: Sequence[str], session: Session, signals: Signals) -> int:
    with session.progress.line:
        stopped_by = _prepared(session, signals)
    if stopped_by is not None:
        closing.close(session, stopped_by)
        return stopped_by
    try:
        words = command if session.directories is None else session.directories.command(command)
        env = session.environment(os.environ)
        if session.config.elastic is not None:
            words, env = _elastic(command, words, session, env)
        child = Child(words, env, signals)
    except HpcstageError as error:
        closing.close_unrun(session, error)
        raise
    with _warning("cannot note that the command runs"):
        session.started(child.pid)
        is_told = session.config.data and session.mode != "direct" and session.is_first
        if is_told and (said := unserved(command)) is not None:
            messages.warn(said, says_too=NO_PYTHON)
    status = child.wait(_watch_of(session))
    with _warning("cannot end this run cleanly"):
        session.ended()
        if session.config.elastic is not None:
            _tell_of_elastic(session)
        if session.directories is not None:
            _drain(session.directories, session, signals, status)
        closing.close(session, status)
    return status


def _elastic(
    command: Sequence[str], words: Sequence[str], session: Session, env: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """Returns what is started in the place of the command of an elastic training, and its environment. `words` is the
    command with the directories of this node."""
    from hpcstage.wrapper import elastictraining

    if session.config.name is not None:
        elastictraining.let_join(command, session.config, jobs.here(), _place(session))
    started = elastictraining.command_line(words, session.config, jobs.here(), _place(session), env)
    return started, elastictraining.own_environment(os.environ)


def _place(session: Session) -> elastictraining.TrainingPlace:
    """Returns where the training belongs."""
    from hpcstage.wrapper import elastictraining

    directory = session.run_dir if session.group is None else Path(session.group.directory)
    return elastictraining.TrainingPlace.of(session.config, session.part.run_id, session.run_dir, directory)


def _tell_of_elastic(session: Session) -> None:
    from hpcstage.wrapper import elastictraining

    with contextlib.suppress(HpcstageError, OSError):
        session.part.elastic = elastictraining.part_of(_place(session), session.part.started_unix_s)


@contextlib.contextmanager
def _warning(what: str) -> Iterator[None]:
    """Makes a warning of a mistake of ours while the command runs and after it: its exit code is passed on."""
    try:
        yield
    except Exception as error:  # noqa: BLE001
        messages.warn(f"{what}: {_fault(error)}")


def _watch_of(session: Session) -> Callable[[], None]:
    """Returns what looks after the run now and then. A mistake of ours ends the looking, not the run."""
    goes_on = True

    def watch() -> None:
        nonlocal goes_on
        if goes_on:
            goes_on = False
            with _warning("cannot look after the staging daemon"):
                session.watch()
                closing.get_ready(session)
                goes_on = True

    return watch


def _drain(directories: RunDirectories, session: Session, signals: Signals, status: int) -> None:
    """Waits until what was written is drained. After a fatal signal, also one that ended the command, that may take as
    long as the end of a run: who sent it waits for that."""
    deadline = time.monotonic() + session.config.drain_s if _was_told_to_end(status) else None
    directories.end(session.control, is_orderly=status == 0)
    while not directories.is_drained(session.control, _WAIT_S):
        info = signals.take(0)
        if info is not None and signals.ends(info) and deadline is None:
            deadline = time.monotonic() + session.config.drain_s
        if deadline is not None and time.monotonic() > deadline:
            break


def _was_told_to_end(status: int) -> bool:
    """Tells from a command's wait status whether a signal ended it, or the program that it waited for, as a shell says
    by its exit code."""
    code = os.waitstatus_to_exitcode(status)
    return (-code if code < 0 else code - 128) in _ASKS_TO_END


def _prepared(session: Session, signals: Signals) -> int | None:
    """Returns what `_prepare` returns. After a mistake of ours the command waits for nothing more, and runs."""
    try:
        with _preparing():
            return _prepare(session, signals)
    except NotStarted as error:
        if session.config.strict:
            closing.close_unrun(session, error)
            raise
        messages.warn(f"{error.line()}; the command runs now")
        text = f"the command did not wait for staging: {error.what}"
        session.part.problems.append(Problem("not-awaited", text, "what is not staged yet is read at the source"))
        return None


def _prepare(session: Session, signals: Signals) -> int | None:
    """Waits for all that the command waits for. Returns what `_wait_until` returns."""
    stopped_by = _wait_until(session.nodes_up, session, signals)
    if stopped_by is None and session.config.strict:
        stopped_by = _wait_until(session.scanned, session, signals)
        if stopped_by is None:
            _require_datasets(session)
    if stopped_by is None and session.waits_for_copy:
        session.control.attach(0)
        session.control.ask_staged()
        stopped_by = _wait_until(session.staged, session, signals)
    if stopped_by is None and (kept := session.directories) is not None:
        stopped_by = _wait_until(lambda wait_s: kept.is_watched(session.control, wait_s), session, signals)
    return stopped_by


def _require_datasets(session: Session) -> None:
    """With --strict, raises if the scan of the datasets, which has ended before the command starts, found a problem."""
    problem = session.scan_problem()
    if problem is not None:
        raise NotStarted(problem.text, problem.remedy)


def _wait_until(done: Callable[[float], bool], session: Session, signals: Signals) -> int | None:
    """Waits, calling `done` with a short timeout again and again, and shows the progress. Returns the wait status to
    end with if a signal says so, else None."""
    while not done(_WAIT_S):
        session.progress.show()
        info = signals.take(0)
        if info is not None and signals.ends(info):
            return int(info.si_signo)
    session.progress.show()
    return None
