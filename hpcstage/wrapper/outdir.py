"""Owns DIR, the directory of `--out` or `--checkpoint`: what may be named there, its lock, and how a command finds
where it writes.

Input that is wrong ends the run with one line before the command starts. The module makes DIR, and nothing else in it
but the lock.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.errors import HpcstageError, UsageError
from hpcstage.forked import fork, reap
from hpcstage.node import kept
from hpcstage.node.environment import in_containers
from hpcstage.plan.types import DatasetKind
from hpcstage.wrapper import holders

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.plan.types import Dataset

LOCK = ".hpcstage-lock"
"""The lock in DIR; names that begin so are never shown to a command and never carried over."""
UNLOCK_S = 2.0
_MOST_LOCKS = 100
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
_REMOVED = frozenset({errno.ENOENT, errno.ESTALE})
_WRITABLE = "name a directory that you may write to, on the shared file system"
_ROOM = "free space there, or name a directory on another file system"
_MOUNT = "mount its file system again, or name a directory on another one"
_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    **dict.fromkeys((errno.ENOTCONN, errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EHOSTDOWN), _MOUNT),
}
_OWN = "give each run a directory of its own"


class TargetInUse(UsageError):
    """Another run has the lock of DIR; `holder` says which."""

    def __init__(self, said: str, holder: str) -> None:
        super().__init__(f"{said} is in use by {holder}", _OWN)
        self.holder = holder


@dataclass(frozen=True)
class NamedDirectory:
    """An option that names a directory on the shared file system, for which the command gets a local one."""

    key: str
    variable: str
    what: str
    """The name, for people, of the files that the command writes there."""
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
            raise _unusable(f"{self.option} {asked} cannot be made", error) from None
        return path

    def lock(self, target: str, asked: str, holder: str) -> int:
        """Takes the lock of DIR; see `lock`."""
        return lock(target, f"{self.option} {asked}", holder)

    @property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"(?<!\$)\{{{self.key}\}}")


OUT = NamedDirectory("out", kept.OUT, "output files", "were not closed")
CHECKPOINT = NamedDirectory("checkpoint", kept.CHECKPOINT, "checkpoints", "were not complete at the end")
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
        from hpcstage.config.expand import expand

        with suppress(ValueError):
            asked = expand(asked, env)
    return asked


def lock(target: str, said: str, holder: str) -> int:
    """Takes the lock of DIR and notes who has it; returns its descriptor. Raises TargetInUse if another run has it, by
    the file system's locks or by what stands in the file, and UsageError if DIR cannot be written to."""
    path = os.path.join(target, LOCK)
    for _ in range(_MOST_LOCKS):
        try:
            fd, is_new = _open_lock(path)
        except OSError as error:
            raise _unusable(f"{said} cannot be written to", error) from None
        try:
            if _takes(path, fd, said, holder, is_new=is_new):
                return fd
        except OSError as error:
            os.close(fd)
            raise _unusable(f"{said} cannot be written to", error) from None
        except UsageError:
            os.close(fd)
            raise
        os.close(fd)  # its holder removed it at its end, or another run was faster
    raise UsageError(f"{said} is used by many runs at once", _OWN)


def _open_lock(path: str) -> tuple[int, bool]:
    """Returns the descriptor of a lock file, and whether this process has made it: of all nodes only one does."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(FileExistsError):
        return os.open(path, flags | os.O_EXCL, 0o600), True
    return os.open(path, flags, 0o600), False


def _takes(path: str, fd: int, said: str, holder: str, *, is_new: bool) -> bool:
    """Takes a lock file that is nobody's; returns whether it still has the name. Raises as `lock` does, and OSError."""
    if os.fstat(fd).st_nlink > 1:
        raise UsageError(f"{path} is a hard link: another file would be overwritten", "remove it")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        other = ""
    except OSError as error:
        other = "" if error.errno in _NO_LOCKS else holders.named_in(fd) or "another run"
    if not (other or is_new):
        other = holders.living(path)
    if other:
        raise TargetInUse(said, other)
    try:
        return os.stat(path).st_ino == os.fstat(fd).st_ino and holders.hold(path, fd, holder)
    except OSError as error:
        if error.errno in _REMOVED:
            return False
        with suppress(OSError):
            os.unlink(path)
        raise


def _unusable(what: str, error: OSError) -> UsageError:
    return UsageError(f"{what}: {error.strerror}", _REMEDIES.get(error.errno or 0, _WRITABLE))


def remove_lock(target: str, fd: int) -> None:
    """Removes the lock of DIR and lets go of it."""
    holders.let_go(fd)
    with suppress(OSError):
        os.unlink(os.path.join(target, LOCK))
    os.close(fd)


def unlock(target: str, fd: int) -> None:
    """Removes the lock of DIR and lets go of it, in a process of its own and in UNLOCK_S at most: a shared file system
    that hangs must not hold up the end of a run."""
    holders.let_go(fd)
    pid = -1
    with suppress(OSError):
        pid = fork(lambda: remove_lock(target, fd), {fd}, says_why=False)
    os.close(fd)  # the other process lets go of the lock
    if pid > 0:
        reap(pid, UNLOCK_S)


def _nearest(path: str, said: str) -> str:
    """Returns the path itself, or the nearest directory above it that exists. Raises UsageError where a file system
    does not answer: what is above its mount point says nothing of it."""
    while True:
        try:
            os.lstat(path)
        except OSError as error:
            if _REMEDIES.get(error.errno or 0) == _MOUNT:
                raise _unusable(f"{said} cannot be used", error) from None
            path = os.path.dirname(path)
        else:
            return path
