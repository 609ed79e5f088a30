"""Owns the output directory of a run: where the command writes, who else may not use it, and what became of its files.

`{out}` is a directory on the local disk that the daemon drains to DIR, the directory of `--out`. Where that cannot be,
`{out}` is DIR itself, and one line says why; input that is wrong ends the run before the command starts.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage.errors import HpcstageError, LocalDiskProblem, UsageError
from hpcstage.node import kept
from hpcstage.node.environment import in_containers
from hpcstage.plan.types import DatasetKind
from hpcstage.problem import Problem
from hpcstage.record.parts.outputs import OutputName, OutputsPart
from hpcstage.units import format_number
from hpcstage.wrapper import messages

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir
    from hpcstage.plan.types import Dataset

PLACEHOLDER = re.compile(r"(?<!\$)\{out\}")
"""`${out}` is left alone: it is a variable of a shell."""
LOCK = ".hpcstage-lock"
"""The lock in DIR; names that begin so are never shown in `{out}` and never carried over."""
LATE_S = 10.0
"""The time for a drain by the wrapper itself, after its daemon has died."""
_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL})


def put_in(command: Sequence[str], out: str) -> list[str]:
    """Returns the command with the output directory in the place of `{out}`."""
    return [PLACEHOLDER.sub(lambda _: out, word) for word in command]


def environment(env: Mapping[str, str], out: str) -> dict[str, str]:
    """Returns the environment in which the command finds its output directory."""
    ours = {kept.OUT: out}
    return {**env, **ours, **in_containers(env, ours)}


def require_out(command: Sequence[str], out: str | None) -> None:
    """Raises UsageError where the command names `{out}` and there is no `--out`."""
    if out is None and any(PLACEHOLDER.search(word) for word in command):
        raise UsageError("{out} in the command has no directory", "use --out DIR, or out: in hpcstage.yaml")


def directory(out: str, cwd: Path) -> str:
    """Returns the absolute path of DIR, which is made if it is missing. Raises UsageError if it cannot be."""
    path = os.path.abspath(cwd / out)
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        what = f"--out {out} cannot be made: {error.strerror}"
        raise UsageError(what, "name a directory that you may write to, on the shared file system") from None
    return os.path.realpath(path)


def check(out: str, cwd: Path, datasets: Sequence[Dataset]) -> None:
    """Raises UsageError if DIR lies below a dataset or belongs to somebody else. Makes nothing."""
    path = os.path.realpath(cwd / out)
    for dataset in datasets:
        root = os.fsdecode(dataset.root)
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
        what = f"--out {out} cannot be used: you may not write to {above}"
        raise UsageError(what, "name a directory that you may write to, on the shared file system")


def passed_through(command_options: Mapping[str, Any], env: Mapping[str, str], cwd: Path) -> str | None:
    """Returns DIR for a command that runs without hpcstage; None where no DIR is known. A configuration that is wrong
    is no reason to fail then."""
    from hpcstage.config import load

    asked = command_options.get("out") or env.get(kept.OUT)
    with suppress(HpcstageError):
        asked = load(command_options, env, cwd).out
    return None if asked in (None, "", "none") else directory(str(asked), cwd)


def _nearest(path: str) -> str:
    """Returns the path itself, or the nearest directory above it that exists."""
    while not os.path.lexists(path):
        path = os.path.dirname(path)
    return path


class RunOutputs:
    """The output directory of one run. `part` is its part of the record."""

    def __init__(self, target: str, place: kept.KeptPlace | None, why: str, fds: Sequence[int] = ()) -> None:
        self.place = place
        self.part = OutputsPart(directory=target, why=why)
        self._fds = list(fds)
        """The locks; where there is a place, the last one is that of the place."""
        self._ended_at: float | None = None
        if place is not None:
            self.part = replace(self.part, local_dir=os.fspath(place.output / "tree"))

    @classmethod
    def open(cls, config: Config, cwd: Path, local: LocalDir, run_id: str, host: str) -> RunOutputs:
        """Makes the directories and fills the local one. Raises UsageError if DIR is on the local disk, or if another
        run uses it."""
        from hpcstage.outputs.prepare import CannotMirror, OutputPlace, prepare

        assert config.out is not None
        if os.stat(_nearest(os.path.realpath(cwd / config.out))).st_dev == local.device:
            what = f"--out {config.out} is on the same disk as the local directory {local.path}"
            raise UsageError(what, "name a directory on the shared file system, or another disk with --local-dir")
        target = directory(config.out, cwd)
        lock = _lock(target, config.out, host, run_id)
        try:
            place, held = kept.make(kept.parent(local, host), run_id)
        except LocalDiskProblem as error:
            return cls._at_target(target, error.what, lock)
        try:
            prepare(OutputPlace(place.output), Path(target), run_id)
        except CannotMirror as error:
            os.close(held)
            place.remove()
            return cls._at_target(target, str(error), lock)
        return cls(target, place, "", [*lock, held])

    @classmethod
    def at_target(cls, config: Config, cwd: Path, why: str) -> RunOutputs:
        """Returns a run whose `{out}` is DIR, and says why."""
        assert config.out is not None
        return cls._at_target(directory(config.out, cwd), why, ())

    @classmethod
    def _at_target(cls, target: str, why: str, fds: Sequence[int]) -> RunOutputs:
        messages.warn(f"{{out}} is {target}: {why}")
        return cls(target, None, why, fds)

    @property
    def out(self) -> str:
        """The directory that the command writes to."""
        return self.part.local_dir or self.part.directory

    def is_watched(self, timeout_s: float) -> bool:
        """Tells whether the daemon watches, or nobody has to. Where the daemon cannot, `{out}` becomes DIR."""
        if self.place is None:
            return True
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(OSError):
                if why := self.place.watched.read_text(errors="replace"):
                    self.give_up(why)
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)

    def give_up(self, why: str) -> None:
        """Makes `{out}` DIR; to be called before the command starts only."""
        if self.place is not None:
            self.place.remove()
            self.place = None
            self.part = replace(self.part, local_dir=None, why=why)
            messages.warn(f"{{out}} is {self.part.directory}: {why}")

    def ended(self) -> None:
        """Notes that the command has ended, and that the last part of the drain begins."""
        self._ended_at = time.monotonic()

    def collect(self) -> None:
        """Takes the daemon's result, after the daemon's end; where there is none, drains what is there. Deletes the
        local directory only if nothing is left in it."""
        if self.place is None:
            return
        result = self._result()
        part = self._drained_late(self.place) if result is None else part_of(result, self.part)
        part = None if part is None else _with_moved(part, self.place, ("journal", "scratch"))
        took_s = None if self._ended_at is None else round(time.monotonic() - self._ended_at, 3)
        self.part = replace(part or self.part, took_s=took_s)
        for line in lines(self.part, os.uname().nodename):
            messages.error(line)
        if not self.part.undrained_count:
            self.place.remove()

    def abandon(self) -> None:
        """Removes what was made; to be called before the command starts only."""
        if self.place is not None:
            self.place.remove()
        self.close()

    def close(self) -> None:
        """Lets go of the locks."""
        if self._fds:
            with suppress(OSError):
                os.unlink(os.path.join(self.part.directory, LOCK))
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _drained_late(self, place: kept.KeptPlace) -> OutputsPart | None:
        """Drains in this process after the daemon has died, unless somebody else still works on the files."""
        os.close(self._fds.pop())
        fd = place.take()
        if fd is None:
            still = OutputName("", "the staging daemon, or a program of the command, still works on it")
            return replace(self.part, undrained_count=1, undrained=(still,))
        self._fds.append(fd)
        return drained_late(place, LATE_S)

    def _result(self) -> dict[str, Any] | None:
        assert self.place is not None
        try:
            found = json.loads(self.place.drained.read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def drained_late(place: kept.KeptPlace, timeout_s: float) -> OutputsPart | None:
    """Drains in this process what lies in the directory of a run whose daemon is dead, and compares file by file.
    Returns None where no command can have written to it."""
    from hpcstage.outputs.journal import recall
    from hpcstage.outputs.late import drain_late
    from hpcstage.outputs.prepare import OutputPlace

    if not place.was_watched:
        return None
    output = OutputPlace(place.output)
    part = OutputsPart(directory="?", local_dir=output.root)
    report = None
    try:
        recalled = recall(output.journal)
        if recalled is not None:
            part = replace(part, directory=recalled.charter.target)
            report = drain_late(output, timeout_s)
        why = "its journal does not say where to"
    except (OSError, ValueError, LookupError, TypeError) as error:
        why = f"its journal cannot be read: {error}"
    if report is None:
        return replace(part, undrained_count=1, undrained=(OutputName("", why),))
    return _with_moved(part_of(asdict(report), part), place, ("journal", "scratch", "tree"))


def _with_moved(part: OutputsPart, place: kept.KeptPlace, known: Sequence[str]) -> OutputsPart:
    """Returns the part with what else lies beside the journal, where the local directory was moved: it may hold files
    that were not copied."""
    if not part.is_gone or part.undrained_count or not place.output.is_dir():
        return part
    moved = [OutputName(name, "it was moved here unseen") for name in os.listdir(place.output) if name not in known]
    return replace(part, undrained_count=len(moved), undrained=tuple(moved[: OutputsPart.MOST_NAMES]))


def remove_lock(target: str, run_id: str, host: str) -> None:
    """Removes the lock that a killed run left in DIR, unless another run has it by now."""
    with suppress(UsageError):
        if os.path.lexists(os.path.join(target, LOCK)):
            for fd in _lock(target, target, host, run_id):
                with suppress(OSError):
                    os.unlink(os.path.join(target, LOCK))
                os.close(fd)


def in_spec(outputs: RunOutputs | None, config: Config, end_unix_s: float | None) -> dict[str, Any]:
    """Returns what the daemon is told of the output directory."""
    if outputs is None or outputs.place is None:
        return {}
    return {
        "outputs": os.fspath(outputs.place.path),
        "drain_rate_bytes_per_s": config.drain_rate_bytes_per_s,
        "drain_hurry_unix_s": None if end_unix_s is None else end_unix_s - config.drain_before_s,
    }


def part_of(report: Mapping[str, Any], part: OutputsPart) -> OutputsPart:
    """Returns the part with the result of a drain, which is a `DrainReport` as plain data."""
    findings: Mapping[str, Mapping[str, str]] = report.get("findings", {})
    undrained = [OutputName(one["name"], one["why"]) for one in report.get("undrained", ())]
    beside = [OutputName(name, where) for name, where in findings.get("beside", {}).items()]
    skipped = [OutputName(name, what) for name, what in findings.get("skipped", {}).items()]
    stayed = [OutputName(name, why) for name, why in findings.get("kept", {}).items()]
    return replace(
        part,
        files=report.get("files", 0),
        size_bytes=report.get("bytes_carried", 0),
        undrained_count=len(undrained),
        undrained=tuple(undrained[: OutputsPart.MOST_NAMES]),
        unclosed=tuple(report.get("unclosed", ())[: OutputsPart.MOST_NAMES]),
        beside=tuple(beside[: OutputsPart.MOST_NAMES]),
        skipped=tuple(skipped[: OutputsPart.MOST_NAMES]),
        stayed=tuple(stayed[: OutputsPart.MOST_NAMES]),
        is_gone=report.get("is_gone", False),
    )


def lines(part: OutputsPart, host: str) -> list[str]:
    """Returns the lines that say what is not in DIR, by name, with the node and the place where it still is."""
    if not part.undrained_count:
        return []
    shown = [f"not in {part.directory}: {one.name or 'anything'} ({one.why})" for one in part.undrained[:20]]
    more = part.undrained_count - len(shown)
    if more > 0:
        shown.append(f"not in {part.directory}: {more:,} more")
    return [*shown, f"these files are on {host} in {part.local_dir}: hpcstage clean --drain on that node copies them"]


def problems(part: OutputsPart, host: str) -> list[Problem]:
    """Returns what the record says of output files that are not in DIR under their name as the command left them."""
    found = []
    if part.undrained_count:
        first = part.undrained[0]
        many = format_number(part.undrained_count, "output file")
        text = f"{many} not copied to {part.directory}, such as {first.name or 'all of them'}: {first.why}"
        found.append(Problem("not-drained", text, f"hpcstage clean --drain on {host}; they are in {part.local_dir}"))
    if part.beside:
        text = (
            f"somebody else changed {part.beside[0].name} in {part.directory}; the run's lies at {part.beside[0].why}"
        )
        found.append(Problem("outputs-beside", text, "compare the two; the record lists all such files"))
    if part.unclosed:
        text = f"output files were not closed, such as {part.unclosed[0]}: they were copied as they were"
        found.append(Problem("outputs-unclosed", text, "a program was killed, or still ran; look at these files"))
    if part.skipped:
        text = f"not copied: {part.skipped[0].name} ({part.skipped[0].why})"
        found.append(Problem("outputs-skipped", text, "FIFOs, sockets and devices stay on the node"))
    return found


def _lock(target: str, asked: str, host: str, run_id: str) -> list[int]:
    """Takes the lock of DIR, where its file system has locks. Raises UsageError if another run has it."""
    path = os.path.join(target, LOCK)
    for _ in range(100):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            what = f"--out {asked} cannot be written to: {error.strerror}"
            raise UsageError(what, "name a directory that you may write to, on the shared file system") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return [fd]
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another run"
            os.close(fd)
            raise UsageError(f"--out {asked} is in use by {holder}", "give each run a directory of its own") from None
        with suppress(OSError):
            if os.stat(path).st_ino == os.fstat(fd).st_ino:
                os.truncate(fd, 0)
                os.pwrite(fd, f"run {run_id} on {host}\n".encode(), 0)
                return [fd]
        os.close(fd)  # its holder removed it at its end
    raise UsageError(f"--out {asked} is used by many runs at once", "give each run a directory of its own")
