"""Owns DIR, the directory of `--out`: what may be named there, its lock, and how a command finds where it writes.

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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.errors import HpcstageError, UsageError
from hpcstage.node import kept
from hpcstage.node.environment import in_containers
from hpcstage.plan.types import DatasetKind

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.plan.types import Dataset

PLACEHOLDER = re.compile(r"(?<!\$)\{out\}")
"""`${out}` is left alone: it is a variable of a shell."""
LOCK = ".hpcstage-lock"
"""The lock in DIR; names that begin so are never shown in `{out}` and never carried over."""
_MOST_LOCKS = 100
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})
_WRITABLE = "name a directory that you may write to, on the shared file system"
_OWN = "give each run a directory of its own"


def put_in(command: Sequence[str], out: str) -> list[str]:
    """Returns the command with the output directory in the place of `{out}`."""
    return [PLACEHOLDER.sub(lambda _: out, word) for word in command]


def environment(env: Mapping[str, str], out: str) -> dict[str, str]:
    """Returns the environment in which the command finds its output directory."""
    ours = {kept.OUT: out}
    return {**env, **ours, **in_containers(env, ours)}


def refuse_placeholder(command: Sequence[str]) -> None:
    """Raises UsageError where a command without `--out` names `{out}`."""
    if any(PLACEHOLDER.search(word) for word in command):
        raise UsageError("{out} in the command has no directory", "use --out DIR, or out: in hpcstage.yaml")


def check(out: str, cwd: Path, datasets: Sequence[Dataset]) -> None:
    """Raises UsageError if DIR lies below a dataset, belongs to somebody else or cannot be written to. Makes
    nothing."""
    path = os.path.realpath(cwd / out)
    for dataset in datasets:
        root = os.path.realpath(os.fsdecode(dataset.root))
        if dataset.kind is DatasetKind.DIRECTORY and os.path.commonpath([root, path]) == root:
            what = f"--out {out} lies in the dataset {root}: what is written there would change it"
            raise UsageError(what, "name a directory outside of all datasets")
    above = _nearest(path)
    found = os.stat(above)
    if above == path and found.st_uid != os.geteuid():
        what = f"--out {out} belongs to user {found.st_uid}"
        raise UsageError(what, "name a directory of your own, or one that does not exist yet")
    if not os.path.isdir(above):
        raise UsageError(f"--out {out} cannot be made: {above} is not a directory", "name a directory")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"--out {out} cannot be used: you may not write to {above}", _WRITABLE)


def check_disk(config: Config, cwd: Path, local: LocalDir) -> None:
    """Raises UsageError if DIR is on the local disk, where it would gain nothing."""
    assert config.out is not None
    if os.stat(_nearest(os.path.realpath(cwd / config.out))).st_dev == local.device:
        what = f"--out {config.out} is on the same disk as the local directory {local.path}"
        raise UsageError(what, "name a directory on the shared file system, or another disk with --local-dir")


def directory(out: str, cwd: Path) -> str:
    """Returns the path of DIR, which is made if it is missing. Raises UsageError if it cannot be."""
    path = os.path.realpath(cwd / out)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {out} cannot be made: {error.strerror}", _WRITABLE) from None
    return path


def without_us(given: Mapping[str, Any], env: Mapping[str, str], cwd: Path) -> str | None:
    """Returns DIR for a command that runs without hpcstage; None where no DIR is known. Files are read only if neither
    an option nor the environment names DIR, and one that is wrong is no reason to fail then."""
    asked = given.get("out")
    if not asked and env.get(kept.OUT):
        from hpcstage.config.expand import expand

        asked = env[kept.OUT]
        with suppress(ValueError):
            asked = expand(asked, env)
    elif not asked:
        from hpcstage.config import load

        with suppress(HpcstageError):
            asked = load({"config": given.get("config")}, env, cwd).out
    return None if asked in (None, "", "none") else directory(str(asked), cwd)


def lock(target: str, asked: str, holder: str) -> int:
    """Takes the lock of DIR, where its file system has locks, and notes who has it; returns its descriptor. Raises
    UsageError if another run has it, or if DIR cannot be written to."""
    path = os.path.join(target, LOCK)
    for _ in range(_MOST_LOCKS):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"--out {asked} cannot be written to: {error.strerror}", _WRITABLE) from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return fd
            other = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another run"
            os.close(fd)
            raise UsageError(f"--out {asked} is in use by {other}", _OWN) from None
        with suppress(OSError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                os.truncate(fd, 0)
                os.pwrite(fd, f"{holder}\n".encode(), 0)
                return fd
        os.close(fd)  # its holder removed it at its end
    raise UsageError(f"--out {asked} is used by many runs at once", _OWN)


def unlock(target: str, fd: int) -> None:
    """Removes the lock of DIR and lets go of it."""
    with suppress(OSError):
        os.unlink(os.path.join(target, LOCK))
    os.close(fd)


def remove_dead_lock(target: str) -> None:
    """Removes the lock that a killed run left in DIR, unless another run has it by now."""
    with suppress(UsageError):
        if os.path.lexists(os.path.join(target, LOCK)):
            unlock(target, lock(target, target, ""))


def _nearest(path: str) -> str:
    """Returns the path itself, or the nearest directory above it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path
