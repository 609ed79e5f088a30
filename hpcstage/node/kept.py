"""Makes and finds the directories on the local disk that hold a command's output files, or its checkpoints.

Such a directory is `<local>/hpcstage-out-<uid>/<name>`, for checkpoints `<name>.checkpoint`; no start deletes it. The
name is that of DIR, so that each run with the same DIR has the same path: programs write paths into their checkpoints.
What a run left that is over gets the run's name when the next one needs the place, or when it is drained.

The module owns names, permissions and locks. Everybody who works with one holds a shared lock on its `lock`; who can
take the exclusive one knows that wrapper and daemon of its run are dead. A program that outlived them has the directory
in its environment or arguments, works in it, or has a file open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpcstage.errors import LocalDiskProblem
from hpcstage.protocol import nodedir

OUT = "HPCSTAGE_OUT"
"""The variable with which a program finds its output directory."""
CHECKPOINT = "HPCSTAGE_CHECKPOINT"
"""The variable with which a program finds the directory for its checkpoints."""
RUN_ID = "HPCSTAGE_RUN_ID"
"""The variable that holds the run to which a process belongs."""
_LOCK = "lock"
_RUN = "run"
"""A link that leads to the name of the run: it is whole as soon as it is there, and needs no room."""
_LONGEST_NAME = 32
"""The characters of DIR's last name that are kept."""
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})
_NEW = "."
"""The names of directories whose lock is not held yet, or that are about to be deleted, begin so."""
_WAIT_S = 0.05
_BESIDE = frozenset(
    {"tree", "manifest", "manifest.new", "marker", "links"}
    | {"store", "charter", "shares", "pending", "completed", "origins", "seen", "arriving"}
)


@dataclass(frozen=True)
class KeptKind:
    """What a directory holds."""

    key: str
    """The name by which the programs of a run tell each other of it: the daemon's specification has such a field."""
    what: str
    """Its name for people."""
    suffix: str
    """The names of such directories end so."""


OUTPUTS = KeptKind("outputs", "output files", "")
CHECKPOINTS = KeptKind("checkpoints", "checkpoints", ".checkpoint")
KINDS = (OUTPUTS, CHECKPOINTS)


@dataclass(frozen=True)
class KeptLock:
    """A lock of a directory, which holds until it is let go, or until its process ends."""

    fds: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, how: int) -> KeptLock:
        """Takes the lock of a place, and with either kind a shared one on the directory: systemd-tmpfiles, which
        removes single old files, passes over a directory that somebody has locked, and over all that is below. Raises
        OSError."""
        fds = [os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)]
        try:
            fcntl.flock(fds[0], how | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(fds[0]), os.stat(path / _LOCK, follow_symlinks=False)):
                raise FileNotFoundError(errno.ENOENT, "another run has the place by now", os.fspath(path))
        except OSError:
            os.close(fds[0])
            raise
        with suppress(OSError):
            fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
            fcntl.flock(fds[1], fcntl.LOCK_SH | fcntl.LOCK_NB)
        return cls(tuple(fds))

    @staticmethod
    def is_held(path: Path) -> bool:
        """Tells whether a wrapper or a daemon of the run lives on this node, or somebody drains its files."""
        try:
            fd = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def again(self) -> KeptLock:
        """Returns the same lock, which holds until both are let go."""
        return KeptLock(tuple(os.dup(fd) for fd in self.fds))

    def let_go(self) -> None:
        """Lets go of the lock."""
        for fd in self.fds:
            os.close(fd)


@dataclass(frozen=True)
class KeptPlace:
    """The directory of one run's output files, or of its checkpoints."""

    path: Path

    @property
    def kind(self) -> KeptKind:
        """What it holds."""
        return CHECKPOINTS if self.path.name.endswith(CHECKPOINTS.suffix) else OUTPUTS

    @property
    def run_id(self) -> str:
        """The id of the run; for a virtual node with the node's number."""
        with suppress(OSError):
            return os.readlink(self.path / _RUN)
        return self.path.name.removesuffix(self.kind.suffix)

    @property
    def output(self) -> Path:
        """The base of the watched directory; see `upload.start` and `checkpoint.job`."""
        return self.path / "out"

    @property
    def tree(self) -> Path:
        """The watched directory."""
        return self.output / "tree"

    @property
    def watched(self) -> Path:
        """A file that the daemon makes when it watches; where it cannot, the file holds the reason."""
        return self.path / "watched"

    @property
    def was_watched(self) -> bool:
        """Whether the daemon watched; no command starts before that."""
        try:
            return self.watched.stat().st_size == 0
        except OSError:
            return False

    @property
    def may_hold_files(self) -> bool:
        """Whether it may hold files that are nowhere else. A run that was killed before its command could start has
        left none, but a cleaner of old files may have removed the file that tells of the watch. A place that was being
        deleted holds none any more."""
        if os.path.lexists(_going(self)) and not os.path.lexists(self.tree):
            return False
        return self.was_watched or _holds_files(self)

    @property
    def drained(self) -> Path:
        """A file with the result of the drain."""
        return self.path / "drained"

    @property
    def tried(self) -> Path:
        """A file that is as old as the last drain that failed after the run."""
        return self.path / "tried"

    def hold(self) -> KeptLock:
        """Takes the shared lock. Raises OSError."""
        return KeptLock.of(self.path, fcntl.LOCK_SH)

    def take(self) -> KeptLock | None:
        """Takes the exclusive lock; returns None if the run's wrapper or daemon lives, or somebody else drains it."""
        try:
            return KeptLock.of(self.path, fcntl.LOCK_EX)
        except OSError:
            return None

    def is_used(self) -> bool:
        """Tells whether a program still has the directory as its output directory, works in it, or writes to a file in
        it."""
        tree, run_id = self.tree, self.run_id
        return _any_process(
            lambda p: _has(p, self.path, run_id), lambda p: _is_in(p, tree), lambda p: _writes_to(p, tree)
        )

    def is_left(self, timeout_s: float) -> bool:
        """Waits until no program has the directory in its environment or open any more; some are just about to end.
        Tells whether that is so."""
        deadline = time.monotonic() + timeout_s
        while is_used := self.is_used():
            if time.monotonic() > deadline:
                break
            time.sleep(_WAIT_S)
        return not is_used

    def is_written_to(self) -> bool:
        """Tells whether a program has a file in the directory open for writing."""
        return _any_process(lambda process: _writes_to(process, self.tree))

    def strangers(self) -> list[str]:
        """Returns the names beside the watched directory that hpcstage did not make: it was moved there."""
        try:
            return sorted(set(os.listdir(self.output)) - _BESIDE)
        except OSError:
            return []

    def set_aside(self) -> KeptPlace:
        """Gives it the name of its run, which is over; the caller has the exclusive lock. Returns where it is."""
        aside = KeptPlace(self.path.with_name(f"{self.run_id}{self.kind.suffix}"))
        try:
            self.path.rename(aside.path)
        except OSError:
            return self
        return aside

    def remove(self) -> None:
        """Deletes the directory, and the one above it if it is empty. Who still watches it sees it go as a whole first,
        and takes nothing for a removal by the command."""
        with suppress(OSError):
            self.tree.rename(_going(self))
        if not os.path.lexists(self.tree):  # until then, nothing says that the files are not needed
            with suppress(OSError):
                self.watched.unlink()
        for directory, names, _ in os.walk(self.path):
            for path in (f"{directory}/{name}" for name in names):
                with suppress(OSError):  # somebody else deletes it, too
                    if not os.path.islink(path):
                        os.chmod(path, 0o700)
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()


def named_after(target: str) -> str:
    """Returns the name of the directories for DIR, which has no dots."""
    from hashlib import blake2b

    readable = re.sub(r"[^A-Za-z0-9_-]", "_", os.path.basename(target))[:_LONGEST_NAME]
    return f"{readable}-{blake2b(os.fsencode(target), digest_size=8).hexdigest()}"


def make(above: Path, names: Sequence[str], run_id: str) -> tuple[KeptPlace, KeptLock]:
    """Makes the directory of a run, under the first of the names that no living run or program has; returns it and its
    shared lock. Raises LocalDiskProblem."""
    place = KeptPlace(above / names[0])
    try:
        with suppress(FileExistsError):
            above.mkdir(mode=0o700)
        _require_own(above)
        new = KeptPlace(above / f"{_NEW}{run_id}-{os.urandom(4).hex()}")
        new.path.mkdir(mode=0o700)
        (new.path / _RUN).symlink_to(run_id)
        held = new.hold()
        try:
            place = _rename_to_first(new, [above / name for name in names])
        except OSError:
            held.let_go()
            new.remove()
            raise
        return place, held
    except OSError as error:
        raise LocalDiskProblem(f"cannot make {place.path}: {error.strerror or error}", "give --local-dir") from None


def _rename_to_first(new: KeptPlace, paths: Sequence[Path]) -> KeptPlace:
    """Gives a place the first of the names that is free, or that a run has which is over. Raises OSError."""
    for path in paths:
        found = KeptPlace(path)
        if (lock := found.take()) is not None:
            if not found.is_used():
                found.set_aside()
            lock.let_go()
        try:
            new.path.rename(path)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            taken = OSError(error.errno, f"run {found.run_id}, or a program of it, has it")
        else:
            return found
    raise taken


def place_of(tree: Path) -> KeptPlace | None:
    """Returns the place whose watched directory a path is, by its name alone; None for other paths."""
    place = KeptPlace(tree.parent.parent)
    is_ours = tree == place.tree and place.path.parent.name.startswith(nodedir.OUTPUTS_BASE)
    return place if is_ours else None


def places(above: Path) -> Iterator[KeptPlace]:
    """Yields the directories of all runs of this user, by the run: what is older is drained first."""
    try:
        _require_own(above)
        names = [name for name in os.listdir(above) if not name.startswith(_NEW)]
    except OSError:
        return
    for place in sorted((KeptPlace(above / name) for name in names), key=lambda one: (one.run_id, one.path)):
        if place.path.is_dir() and not place.path.is_symlink():
            yield place


def _require_own(above: Path) -> None:
    found = os.lstat(above)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(1, "it is not a directory of this user", os.fspath(above))
    if found.st_mode & 0o077:
        os.chmod(above, 0o700)


def _any_process(*tests: Callable[[Path], bool]) -> bool:
    """Tells whether one of the tests holds for a process."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        for is_so in tests:
            with suppress(OSError):  # another user's, or one that has just ended
                if is_so(Path("/proc", name)):
                    return True
    return False


def _going(place: KeptPlace) -> Path:
    """Returns the name of the watched directory while all of the place is being deleted."""
    return place.output / f"{_NEW}{place.tree.name}"


def _holds_files(place: KeptPlace) -> bool:
    """Tells whether there is a file that is not a link below the watched directory, or a saved checkpoint; what cannot
    be listed may hold one. The files that a start puts into a directory for checkpoints do not count."""
    if place.kind is CHECKPOINTS:
        return _holds(place.output / "store", lambda entry: entry.is_dir(follow_symlinks=False))
    return _holds(place.tree, lambda entry: not (entry.is_symlink() or entry.is_dir(follow_symlinks=False)))


def _holds(directory: Path, counts: Callable[[os.DirEntry[str]], bool]) -> bool:
    """Tells whether an entry below a directory counts, or one of its directories cannot be listed."""
    below = [os.fspath(directory)]
    while below:
        try:
            with os.scandir(below.pop()) as entries:
                for entry in entries:
                    if counts(entry):
                        return True
                    if entry.is_dir(follow_symlinks=False):
                        below.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return False


def _has(process: Path, path: Path, run_id: str) -> bool:
    """Tells whether a process has the directory in its environment, and not from another run with the same DIR: a job
    that a command submits inherits the variables of its run."""
    wanted, ours = tuple(os.fsencode(f"{name}={path}/") for name in (OUT, CHECKPOINT)), os.fsencode(f"{RUN_ID}=")
    entries = (process / "environ").read_bytes().split(b"\0")
    runs = [os.fsdecode(entry.removeprefix(ours)) for entry in entries if entry.startswith(ours)]
    is_of_run = not runs or run_id == runs[0] or run_id.startswith(f"{runs[0]}.v")
    return is_of_run and any(entry.startswith(wanted) for entry in entries)


def _is_in(process: Path, tree: Path) -> bool:
    """Tells whether another process works in the directory, or names it in its arguments."""
    if process.name == str(os.getpid()):
        return False
    here = os.readlink(process / "cwd")
    return f"{here}/".startswith(f"{tree}/") or os.fsencode(tree) in (process / "cmdline").read_bytes()


def _writes_to(process: Path, tree: Path) -> bool:
    """Tells whether a process has a file below the directory open for writing, or mapped."""
    for number in os.listdir(process / "fd"):
        with suppress(OSError):
            if os.readlink(process / "fd" / number).startswith(f"{tree}/"):
                said = (process / "fdinfo" / number).read_text().partition("flags:")[2].split()
                if said and int(said[0], 8) & os.O_ACCMODE != os.O_RDONLY:
                    return True
    below, lines = os.fsencode(f" {tree}/"), (process / "maps").read_bytes().splitlines()
    return any(below in line and line.split()[1][1::2] == b"ws" for line in lines)
