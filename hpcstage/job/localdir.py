"""Chooses the node-local directory and checks that it can be used; the choice is printed once, with its reason.

The module owns the candidates, their order and the checks. It creates nothing there (`node.directory` does), but tries
a rename.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hpcstage import inherited
from hpcstage.config.model import DISK_VARIABLES
from hpcstage.config.parse import expand
from hpcstage.errors import NoLocalDir, NotStarted
from hpcstage.job.disks import Machine, Space, is_memory, is_network
from hpcstage.job.environment import Job
from hpcstage.plan.budget import BudgetFacts

RAM = "/dev/shm"  # noqa: S108 - named by the user with `ram`
TMP = "/tmp"  # noqa: S108 - only without a scheduler
_SHARED = frozenset({TMP, "/var/tmp", RAM})  # noqa: S108 - to be refused
_ASK = "ask the scheduler for local disk, or give --local-dir DIR, --local-dir ram or --local-dir none"
_NOT_BY_SSH = (
    "schedulers make the job's directory for processes that they start, not for those that come by ssh: put hpcstage "
    "in front of the launcher, or give --local-dir DIR, a directory that every node has"
)


@dataclass(frozen=True)
class LocalDir:
    """A directory that passed the checks."""

    path: Path
    why: str
    warnings: tuple[str, ...]
    is_memory: bool
    free_bytes: int
    free_inodes: int | None
    """Free inodes; None if the file system does not count them."""
    device: int
    is_network: bool = False
    """Whether other nodes see the same directory."""
    is_own: bool = False
    """Whether the free space there is free for this job alone."""
    memory_left: int | None = None
    """The bytes of memory that the job may still take, where the directory is memory and they are known."""
    goes_with_job: bool = False
    """Whether it may be deleted with the job."""

    def measured(self, facts: BudgetFacts) -> BudgetFacts:
        """Returns `facts` with what is free in this directory."""
        return replace(
            facts,
            free_bytes=self.free_bytes,
            free_inodes=self.free_inodes,
            is_memory=self.is_memory,
            memory_left=self.memory_left,
        )


@dataclass(frozen=True)
class _Candidate:
    path: str
    why: str
    explicit: bool
    scheduled: bool
    of_job: bool = False
    """Whether it is, or lies in, a directory that the scheduler names, and so perhaps deletes with the job."""


def require(setting: str | None, env: Mapping[str, str], job: Job) -> LocalDir:
    """Returns what `choose` returns. Raises NotStarted if the user wants no directory."""
    chosen = choose(setting, env, job)
    if chosen is None:
        raise NotStarted("local_dir is none", "give --local-dir")
    return chosen


def choose(setting: str | None, env: Mapping[str, str], job: Job, *, fs: Machine | None = None) -> LocalDir | None:
    """Returns the directory to use on this node; None if the user wants none.

    `setting` is the value of local_dir; None or `auto` means what the scheduler made. Raises NoLocalDir, whose message
    names every candidate that failed.
    """
    probe = fs or Machine()
    scheduled = job.scheduler != "none"
    if setting == "none":
        return None
    if inherited.hides_own_files():
        what = f"the umask {inherited.umask():04o} takes this user's own rights to new files and directories away"
        raise NoLocalDir(f"no node-local directory: {what}", "umask 022")
    if setting not in (None, "auto"):
        return _explicit(setting, env, scheduled, probe)
    skipped: list[str] = []
    for candidate in _automatic(env, scheduled):
        try:
            return _checked(candidate, probe, tuple(skipped))
        except _Unfit as error:
            skipped.append(f"{candidate.why} {error}")
    reason = "; ".join(skipped) or f"none of {', '.join(DISK_VARIABLES)} is set"
    missing = any(not os.path.lexists(candidate.path) for candidate in _automatic(env, scheduled))
    raise NoLocalDir(f"no node-local directory: {reason}", _NOT_BY_SSH if job.is_rank and missing else _ASK)


def candidates(setting: str | None, env: Mapping[str, str], job: Job) -> list[str]:
    """Returns the directories at which `choose` looks until one can be used. Raises ValueError for a variable that is
    not set."""
    if setting in (None, "auto"):
        return [candidate.path for candidate in _automatic(env, job.scheduler != "none")]
    return [] if setting == "none" else [_path_of(setting, env)]


class _Unfit(Exception):
    """The candidate cannot be used; the text says why."""


def _path_of(setting: str, env: Mapping[str, str]) -> str:
    return RAM if setting == "ram" else os.path.abspath(expand(setting, env))


def _explicit(setting: str, env: Mapping[str, str], scheduled: bool, probe: Machine) -> LocalDir:
    try:
        path = _path_of(setting, env)
        shown = setting if setting in ("ram", path) else f"{setting} ({path})"
        of_job = scheduled and _is_of_job(path, env)
        return _checked(_Candidate(path, f"local_dir is {shown}", True, scheduled, of_job), probe, ())
    except (_Unfit, ValueError) as error:
        raise NoLocalDir(f"local directory {setting} {error}", _ASK) from None


def _automatic(env: Mapping[str, str], scheduled: bool) -> list[_Candidate]:
    if not scheduled:
        own = [_Candidate(env["TMPDIR"], f"$TMPDIR={env['TMPDIR']}", False, False)] if env.get("TMPDIR") else []
        return [*own, _Candidate(TMP, f"no scheduler, {TMP}", False, False)]
    named = ((name, env[name]) for name in DISK_VARIABLES if env.get(name))
    return [_Candidate(path, f"${name}={path}", False, True, of_job=True) for name, path in named]


def _is_of_job(path: str, env: Mapping[str, str]) -> bool:
    named = {os.path.normpath(env[name]) for name in DISK_VARIABLES if env.get(name)}
    return any(os.fspath(above) in named - _SHARED for above in (Path(path), *Path(path).parents))


def _checked(candidate: _Candidate, probe: Machine, before: tuple[str, ...]) -> LocalDir:
    path = candidate.path
    if not candidate.explicit and candidate.scheduled and os.path.normpath(path) in _SHARED:
        raise _Unfit(
            f"was not made for this job and may be memory or shared; if it is the node's own disk, --local-dir {path}"
        )
    warnings = [f"{one}: using {path} instead; --local-dir names another" for one in before]
    warnings += _owner_warnings(candidate)
    kind = probe.kind(path)
    if is_network(kind):
        if not candidate.explicit:
            raise _Unfit(f"is on {kind}, a network file system")
        warnings.append(f"{path} is on {kind}, a network file system: staging there gains little")
    space = _space(probe, path)
    _try_rename(path)
    if is_memory(kind):
        warnings.append(f"{path} is memory ({kind}): files that are put there count as the job's memory")
    elif not candidate.explicit and candidate.scheduled and _is_below_shared(path):
        warnings.append(f"{candidate.why} is below a directory that all jobs share; --local-dir names another")
    is_own = probe.is_own(path, made_for_job=not candidate.explicit and candidate.scheduled)
    return LocalDir(
        Path(path),
        candidate.why,
        tuple(warnings),
        is_memory(kind),
        space.free_bytes,
        space.free_inodes,
        space.device,
        is_network(kind),
        is_own=is_own,
        memory_left=probe.memory_left() if is_memory(kind) else None,
        goes_with_job=candidate.of_job or (candidate.scheduled and is_own),
    )


def _is_below_shared(path: str) -> bool:
    return any(os.path.normpath(path).startswith(f"{shared}/") for shared in _SHARED)


def _owner_warnings(candidate: _Candidate) -> list[str]:
    """Returns warnings about who may write there, or raises _Unfit. Others must not be able to exchange what hpcstage
    makes there: in a sticky directory, or in the user's own, they cannot."""
    path = candidate.path
    if not path.startswith("/"):
        raise _Unfit("is not an absolute path")
    try:
        found = os.stat(path)
    except OSError as error:
        raise _Unfit(_fault(error, "cannot be read")) from None
    if not stat.S_ISDIR(found.st_mode):
        raise _Unfit("is not a directory")
    if not os.access(path, os.W_OK | os.X_OK):
        raise _Unfit("is not writable")
    if found.st_mode & stat.S_ISVTX:
        return []
    trusted = found.st_uid in (0, os.geteuid())
    if found.st_mode & stat.S_IWOTH or not trusted:
        who = "everybody may write to it and it is not sticky" if trusted else f"it belongs to user {found.st_uid}"
        if not candidate.explicit:
            raise _Unfit(f"is not safe: {who}, so that others could exchange staged files")
        return [f"{path}: {who}: others could exchange staged files"]
    if found.st_mode & stat.S_IWGRP and found.st_uid != os.geteuid():
        return [f"{path}: its group may write to it and it is not sticky: the group could exchange staged files"]
    return []


def _fault(error: OSError, otherwise: str) -> str:
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    return f"cannot be used: {error.strerror}" if error.strerror else otherwise


def _space(probe: Machine, path: str) -> Space:
    try:
        space = probe.space(path)
    except OSError as error:
        raise _Unfit(_fault(error, "cannot be asked for free space")) from None
    if space.read_only:
        raise _Unfit("is read-only")
    if space.free_bytes <= 0 or space.free_inodes == 0:
        raise _Unfit("is full" if space.free_bytes <= 0 else "has no inodes left")
    return space


def _try_rename(path: str) -> None:
    """Checks that a file can be written and renamed here: the store publishes copies by a rename."""
    own = Path(path) / f".hpcstage-{os.urandom(8).hex()}"
    try:
        own.mkdir(mode=0o700)
        (own / "a").write_bytes(b"x")
        (own / "a").replace(own / "b")
    except OSError as error:
        raise _Unfit(f"takes no file that is made and renamed there: {error.strerror}") from None
    finally:
        for name in ("a", "b"):
            with suppress(OSError):
                (own / name).unlink()
        with suppress(OSError):
            own.rmdir()
