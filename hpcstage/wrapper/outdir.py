"""Owns DIR, the directory of `--out` or `--checkpoint`: what may be named there, its lock, and how a command finds
where it writes.

Input that is wrong ends the run with one line before the command starts. The module makes DIR, and nothing else in it
but the lock: the run that has that owns DIR (see `hpcstage.owner`).
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage import owner
from hpcstage.errors import HpcstageError, NotStarted, UsageError
from hpcstage.node import kept
from hpcstage.node.childenv import in_containers
from hpcstage.plan.types import DatasetKind
from hpcstage.wrapper import messages
from hpcstage.wrapper.child import is_fatal_pending

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job import Job
    from hpcstage.job.localdir import LocalDir
    from hpcstage.plan.types import Dataset

_WRITABLE = "name a directory that you may write to, on the shared file system"
_ROOM = "free space there, or name a directory on another file system"
_MOUNT = "mount its file system again, or name a directory on another one"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN), _MOUNT),
}
REQUEUED_S = 120.0
"""A start waits for so long for the end of an earlier start of its job, on another host: Grid Engine starts a job that
is rescheduled anew before it ends it."""
_WAIT_S = 0.1
_OWN = "give each run a directory of its own"


@dataclass(frozen=True)
class NamedDirectory:
    """An option that names a directory on the shared file system, for which the command gets a local one."""

    key: str
    variable: str
    kind: kept.KeptKind
    """What the command writes there."""
    watched_s: float
    """The command waits for so long until its directory is watched; a signal ends the wait."""
    silent: str
    """What is said where not all nodes did in time what is to be done before the command starts."""
    unfinished: str
    """What is said of those that the command had not finished when it ended."""

    @property
    def option(self) -> str:
        """The option."""
        return f"--{self.key}"

    @property
    def placeholder(self) -> str:
        """Returns the word for it in the command's arguments. `${out}` is left alone: it is a variable of a shell."""
        return f"{{{self.key}}}"

    def put_in(self, command: Sequence[str], path: str) -> list[str]:
        """Returns the command with a directory in the place of the placeholder."""
        return [self._pattern.sub(lambda _: path, word) for word in command]

    def environment(self, env: Mapping[str, str], path: str) -> dict[str, str]:
        """Returns the environment in which the command finds its directory."""
        ours = {self.variable: path}
        return {**env, **ours, **in_containers(env, ours)}

    def asked(self, config: Config) -> str | None:
        """Returns DIR as it was written; None where it was not asked for."""
        found = getattr(config, self.key)
        return None if found is None else str(found)

    def refuse_placeholder(self, command: Sequence[str]) -> None:
        """Raises UsageError where a command without the option names the directory."""
        if any(self._pattern.search(word) for word in command):
            fix = f"use {self.option} DIR, or {self.key}: in hpcstage.yaml"
            raise UsageError(f"{self.placeholder} in the command has no directory", fix)

    def check(self, asked: str, cwd: Path, datasets: Sequence[Dataset]) -> None:
        """Raises UsageError if DIR lies below a dataset, belongs to somebody else or cannot be written to. Makes
        nothing."""
        path, said = os.path.realpath(cwd / asked), f"{self.option} {asked}"
        if any(named.placeholder in asked for named in BOTH):
            what = f"{said} names what stands for the local directory in the command"
            raise UsageError(what, f"name a directory on the shared file system: {self.option} DIR")
        for dataset in datasets:
            root = os.path.realpath(os.fsdecode(dataset.root))
            if dataset.kind is DatasetKind.DIRECTORY and os.path.commonpath([root, path]) == root:
                what = f"{said} lies in the dataset {root}: what is written there would change it"
                raise UsageError(what, "name a directory outside of all datasets")
        above = _nearest(path, said)
        found = os.stat(above)
        if above == path and found.st_uid != os.geteuid():
            what = f"{said} belongs to user {found.st_uid}"
            raise UsageError(what, "name a directory of your own, or one that does not exist yet")
        if not os.path.isdir(above):
            raise UsageError(f"{said} cannot be made: {above} is not a directory", "name a directory")
        if not os.access(above, os.W_OK | os.X_OK):
            raise UsageError(f"{said} cannot be used: you may not write to {above}", _WRITABLE)

    def check_disk(self, asked: str, cwd: Path, local: LocalDir) -> None:
        """Raises UsageError if DIR is on the local disk, where it would gain nothing."""
        said = f"{self.option} {asked}"
        if os.stat(_nearest(os.path.realpath(cwd / asked), said)).st_dev == local.device:
            what = f"{said} is on the same disk as the local directory {local.path}"
            raise UsageError(what, "name a directory on the shared file system, or another disk with --local-dir")

    def made(self, asked: str, cwd: Path) -> str:
        """Returns the path of DIR, which is made if it is missing. Raises UsageError if it cannot be."""
        path = os.path.realpath(cwd / asked)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise unusable(f"{self.option} {asked} cannot be made", error) from None
        return path

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"(?<!\$)\{{{self.key}\}}")


OUT = NamedDirectory("out", kept.OUT, kept.OUTPUTS, 30.0, "watch their local directory", "were not closed")
CHECKPOINT = NamedDirectory(
    "checkpoint", kept.CHECKPOINT, kept.CHECKPOINTS, 3600.0, "have the newest state", "were not complete at the end"
)
BOTH = (OUT, CHECKPOINT)


def check_apart(config: Config, cwd: Path) -> None:
    """Raises UsageError if one of the two directories lies in the other: each has a lock and a drain of its own."""
    found = [os.path.realpath(cwd / asked) for named in BOTH if (asked := named.asked(config)) is not None]
    if len(found) == len(BOTH) and os.path.commonpath(found) in found:
        raise UsageError(f"--out {found[0]} and --checkpoint {found[1]} lie in each other", "name two directories")


def without_us(given: Mapping[str, Any], env: Mapping[str, str], cwd: Path) -> dict[NamedDirectory, str]:
    """Returns the directories for a command that runs without hpcstage, as far as they are known. Files are read only
    if an option or the environment does not name both, and one that is wrong is no reason to fail then."""
    env = {name: value for name, value in env.items() if not _is_inherited(name, value)}
    found = {named: asked for named in BOTH if (asked := given.get(named.key) or _of_env(named, env))}
    if len(found) < len(BOTH):
        from hpcstage.config import load

        with suppress(HpcstageError):
            config = load({"config": given.get("config")}, env, cwd)
            found = {**{named: asked for named in BOTH if (asked := named.asked(config))}, **found}
    return {named: named.made(str(asked), cwd) for named, asked in found.items() if asked not in (None, "", "none")}


def _is_inherited(name: str, value: str) -> bool:
    """Tells whether a variable names the local directory of a run that does not live on this node: a job that a command
    submitted has the variables of that command."""
    place = kept.place_of(Path(value)) if name in {named.variable for named in BOTH} else None
    return place is not None and not kept.KeptLock.is_held(place.path)


def _of_env(named: NamedDirectory, env: Mapping[str, str]) -> str | None:
    asked = env.get(named.variable)
    if asked:
        from hpcstage.config.parse import expand

        with suppress(ValueError):
            asked = expand(asked, env)
    return asked


def _nearest(path: str, said: str) -> str:
    """Returns the path itself, or the nearest directory above it that exists. Raises UsageError where a file system
    does not answer: what is above its mount point says nothing of it."""
    while True:
        try:
            os.lstat(path)
        except OSError as error:
            if _REMEDIES.get(error.errno or 0) == _MOUNT:
                raise unusable(f"{said} cannot be used", error) from None
            path = os.path.dirname(path)
        else:
            return path


# ---- the lock


class TargetInUse(UsageError):
    """Another run has the lock of DIR; `holder` says which."""

    def __init__(self, said: str, holder: str) -> None:
        super().__init__(f"{said} is in use by {holder}", _OWN)
        self.holder = holder


def lock(target: str, said: str, holder: str) -> int:
    """Takes the lock of DIR; returns a descriptor for `owner.let_go`. Raises TargetInUse if another run has it, and
    UsageError if DIR cannot be written to."""

    def tell(other: str) -> None:
        messages.warn(
            f"{target}/{owner.OWNER} names {other}: watching for {owner.OLD_S:g} s at most whether that is still there"
        )

    try:
        return owner.take(target, holder, tell=tell, is_stopped=is_fatal_pending)
    except owner.Owned as error:
        raise TargetInUse(said, error.holder) from None
    except OSError as error:
        raise unusable(f"{said} cannot be written to", error) from None


def lock_for_run(target: str, said: str, run_id: str, job: Job) -> int:
    """Takes the lock of DIR for a run. Where an earlier start of its job has it, on another host, it is waited for.
    Raises as `lock` does, and NotStarted when a signal that is blocked will end this process."""
    host, deadline = socket.gethostname(), None
    task = f" task {job.array_task}" if job.array_task else ""
    of_job = "" if job.job_id is None else f", {job.scheduler} job {job.job_id}{task}"
    while True:
        try:
            return lock(target, said, f"run {run_id} on {host}{of_job}")
        except TargetInUse as error:
            is_here = error.holder.endswith(f" on {host}{of_job}")
            is_earlier = bool(of_job) and error.holder.endswith(of_job) and not is_here
            if not is_earlier or (deadline is not None and time.monotonic() > deadline):
                raise
            if deadline is None:
                deadline = time.monotonic() + REQUEUED_S
                text = f"{said} is in use by an earlier start of this job, {error.holder}"
                messages.warn(f"{text}: waiting for its end, for {REQUEUED_S:g} s at most")
        if is_fatal_pending():
            raise NotStarted("a signal came while an earlier start of the job was waited for", "start it again")
        time.sleep(_WAIT_S)


def unusable(what: str, error: OSError) -> UsageError:
    return UsageError(f"{what}: {error.strerror}", _REMEDIES.get(error.errno or 0, _WRITABLE))
