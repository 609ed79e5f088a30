"""Drains what runs left on the local disk of this node, output files and checkpoints: before the next run starts, and
by `hpcstage clean`.

Owns the order, the process that does it, the lines that are printed, and that nothing is deleted unless all of it was
drained.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcstage import inherited, owner
from hpcstage import job as jobs
from hpcstage.errors import HpcstageError, NoLocalDir, NotDrained, NotStarted, UsageError
from hpcstage.forked import Helpers
from hpcstage.job import localdir
from hpcstage.node import directory, kept
from hpcstage.node.keptdirectory import NodeResult
from hpcstage.record.parts.outputs import OutputsPart
from hpcstage.units import format_number, format_size
from hpcstage.wrapper import messages, outdir, outputpart
from hpcstage.wrapper.child import is_fatal_pending

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job.localdir import LocalDir

AT_START_S = 60.0
"""The longest time that the start of a run drains what other runs left."""
AGAIN_S = 600.0
"""A start leaves files alone that could not be drained such a short time ago."""
LONGEST_S = 86_400.0
"""The longest time for a drain that whoever waits for it can end at any time."""
_CLEAN = "`hpcstage clean --drain` copies them, `hpcstage clean --forget RUN-ID` deletes them"
_DRAIN = "drain"
_DRAIN_OF = "the drain of run"
_GRACE_S = 2.0
_WAIT_S = 0.05


class LateDrain:
    """Drains the directory of a run whose daemon is dead in a helper, since a shared file system that hangs holds up
    whoever asks it. The helper ends with this process, and holds the lock until then."""

    def __init__(
        self,
        place: kept.KeptPlace,
        lock: kept.KeptLock,
        timeout_s: float,
        *,
        is_orderly: bool = False,
        owning: str = "",
    ) -> None:
        """`lock` is the exclusive lock of `place`; `is_orderly`: the command ended by itself, with exit code 0;
        `owning`: the run of the caller, if it has the lock of DIR, too."""
        self.report = outputpart.not_drained("the copying did not come to its end")
        """What became of the files, with `target`, where that is known; to be asked when the drain is over."""
        self._ends_at = time.monotonic() + timeout_s + _GRACE_S
        self._helpers = Helpers(inherited.umask())

        def work() -> bytes:
            return json.dumps(_report_of(place, is_orderly=is_orderly, owning=owning), default=list).encode()

        self._helpers.start(_DRAIN, work, self._take, lock.fds)

    def _take(self, said: bytes | None) -> None:
        if said is not None:
            self.report = json.loads(said)

    def is_over(self, timeout_s: float) -> bool:
        """Tells whether the helper has ended; one that takes too long is killed."""
        if time.monotonic() > self._ends_at:
            self.end()
        return self._helpers.wait(_DRAIN, timeout_s)

    def end(self) -> None:
        """Kills the helper if it runs."""
        self._helpers.close()


@contextmanager
def _locked(target: str, run_id: str, *, owning: str) -> Iterator[str]:
    """Holds the lock of DIR, unless the caller or the run around it has it, and yields the run that has it. Raises
    TargetInUse."""
    fd = None if owning else _lock_of(target, run_id)
    try:
        yield owning or (os.environ.get(kept.RUN_ID, run_id) if fd is None else run_id)
    finally:
        if fd is not None:
            owner.let_go(fd)


def _lock_of(target: str, run_id: str) -> int | None:
    """Takes the lock of DIR, after the drains of other nodes. Returns None where the run to which this process belongs
    has it, and where DIR cannot be written to, which is said of each file. Raises TargetInUse."""
    while True:
        try:
            return outdir.lock(target, target, f"{_DRAIN_OF} {run_id} on {socket.gethostname()}")
        except outdir.TargetInUse as error:
            if error.holder.startswith(f"run {os.environ.get(kept.RUN_ID)} on "):
                return None
            if not error.holder.startswith(_DRAIN_OF):
                raise
            time.sleep(_WAIT_S)
        except UsageError:
            return None


@dataclass(frozen=True)
class LeftFiles:
    """What a run left in a place."""

    target: str
    run_id: str
    check_target: Callable[[], object]
    """Raises OSError if the target is gone, or is another directory by now."""
    drain: Callable[[str], dict[str, Any]]
    """Brings it to the target, whose lock a run has, and returns what became of it."""


def _left_outputs(place: kept.KeptPlace) -> LeftFiles:
    """Returns output files, which are compared one by one. Raises OSError, or what tells of a damaged manifest."""
    from hpcstage.upload.drain import upload_late
    from hpcstage.upload.facts import Place
    from hpcstage.upload.manifest import UploadManifest
    from hpcstage.upload.target import Target

    local = Place(place.output)
    manifest = UploadManifest(local.manifest)
    manifest.close()
    run = manifest.run
    return LeftFiles(run.target, run.run_id, lambda: Target(run).check_same(), partial(upload_late, local))


def _left_checkpoints(place: kept.KeptPlace, *, is_orderly: bool) -> LeftFiles:
    """Returns the newest generation, and what is in none. Raises OSError and ValueError."""
    from hpcstage.checkpoint.job.late import drain_late
    from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace
    from hpcstage.upload.target import Target

    local = CheckpointPlace(place.output)
    charter = CheckpointCharter.load(local)
    return LeftFiles(
        charter.target,
        charter.run_id,
        lambda: Target(charter.run).check_same(),
        lambda owning: drain_late(local, replace(charter, owner=owning), is_orderly=is_orderly).to_json(),
    )


def _report_of(place: kept.KeptPlace, *, is_orderly: bool, owning: str) -> dict[str, Any]:
    """Drains a place, and returns the report. Where the directory on the shared file system has gone, is another one by
    now, or is in use by another run, nothing is tried."""
    target = "?"
    try:
        is_of_checkpoints = place.kind is kept.CHECKPOINTS
        left = _left_checkpoints(place, is_orderly=is_orderly) if is_of_checkpoints else _left_outputs(place)
        target = left.target
        left.check_target()
        with _locked(target, left.run_id, owning=owning) as owner_id:
            report = left.drain(owner_id)
    except outdir.TargetInUse as error:
        report = outputpart.not_drained(error.what)
    except OSError as error:
        report = outputpart.not_drained(f"{error.filename or place.output}: {error.strerror or error}")
    except (ValueError, LookupError, TypeError, HpcstageError) as error:
        report = outputpart.not_drained(f"what is written of them cannot be read: {error}")
    return {**report, "target": target}


def waiting(above: Path, used: list[kept.KeptPlace] | None = None) -> list[kept.KeptPlace]:
    """Returns the output directories of runs that are over. `used` gets those that are left alone, since a program of
    the command lives."""
    return [place for place, _ in _over(above, used)]


def drain_at_start(above: Path) -> None:
    """Drains the directories of runs that are over, as far as there is time, and none that could not be drained a short
    time ago. Raises NotStarted when a signal that is blocked will end this process."""
    deadline = time.monotonic() + AT_START_S
    for place, lock in _over(above):
        left_s = deadline - time.monotonic()
        if left_s > 0 and not _was_tried(place):
            drain(place, lock, left_s)
        else:
            messages.warn(f"run {place.run_id} left {place.kind.what} in {place.output}; {_CLEAN}")


def drain_all(above: Path, used: list[kept.KeptPlace] | None = None) -> list[OutputsPart]:
    """Drains the output directories of runs that are over, however long it takes. Returns what became of them. `used`
    is as in `waiting`."""
    return [drain(place, lock, LONGEST_S) for place, lock in _over(above, used)]


def forget(above: Path, run_id: str) -> bool:
    """Deletes the output files and checkpoints of a run that is over, drained or not. Returns whether there is such a
    run."""
    is_found = False
    for place in kept.places(above):
        if place.run_id == run_id:
            with _taken(place) as lock:
                if lock is not None:
                    place.remove()
                    is_found = True
    return is_found


def _over(above: Path, used: list[kept.KeptPlace] | None = None) -> Iterator[tuple[kept.KeptPlace, kept.KeptLock]]:
    """Yields the directories of runs that are over, with the exclusive lock; deletes those that hold nothing."""
    for place in kept.places(above):
        with _taken(place, used) as lock:
            if lock is not None and not place.may_hold_files:
                place.remove()
            elif lock is not None:
                yield place, lock


def _was_tried(place: kept.KeptPlace) -> bool:
    try:
        return 0.0 <= time.time() - place.tried.stat().st_mtime < AGAIN_S
    except OSError:
        return False


@contextmanager
def _taken(place: kept.KeptPlace, used: list[kept.KeptPlace] | None = None) -> Iterator[kept.KeptLock | None]:
    """Takes the exclusive lock; None if the run's wrapper, daemon or a program of its command lives, or somebody else
    drains its files. `used` gets the place if only a program lives."""
    lock = place.take()
    try:
        is_used = lock is not None and place.is_used()
        if is_used and used is not None:
            used.append(place)
        if is_used:
            messages.warn(f"run {place.run_id} is left alone: a program of it lives, whose files are in {place.tree}")
        yield None if is_used else lock
    finally:
        if lock is not None:
            lock.let_go()


def drain(place: kept.KeptPlace, lock: kept.KeptLock, timeout_s: float, *, owning: str = "") -> OutputsPart:
    """Drains the directory of a run that is over, whose exclusive lock the caller holds; deletes it if all is drained.
    `owning` is the run of the caller, if it has the lock of DIR, too. Raises NotStarted when a signal that is blocked
    will end this process."""
    place = place.set_aside()
    run_id = place.run_id
    messages.warn(f"copying the {place.kind.what} that run {run_id} left in {place.output}")
    drain = LateDrain(place, lock, timeout_s, owning=owning)
    try:
        while not drain.is_over(_WAIT_S):
            if is_fatal_pending():
                raise NotStarted(
                    f"a signal came while {place.kind.what} of an earlier run were copied", "start it again"
                )
    finally:
        drain.end()
    report = drain.report
    part = OutputsPart(directory=report.get("target", "?"), local_dir=os.fspath(place.tree))
    part = outputpart.of_node(NodeResult(report, place.strangers()), part)
    for line in outputpart.lines(part, outputpart.LeftAt(socket.gethostname(), part.local_dir)):
        messages.error(line)
    for line in outputpart.differences(part, f"run {run_id}"):
        messages.warn(line)
    for one in part.named("unclosed"):
        messages.warn(f"{one.name} in {part.directory} was not complete, or not saved, when run {run_id} ended")
    for one in part.named("skipped") if place.kind is kept.CHECKPOINTS else ():
        messages.warn(f"{one.name} of run {run_id} was not copied: {one.why}")
    if part.undrained_count:
        messages.error(f"if they are not needed, `hpcstage clean --forget {run_id}` there deletes them")
        with suppress(OSError):
            place.tried.touch()
    else:
        place.remove()
        messages.warn(f"copied what run {run_id} left to {part.directory}: {format_size(part.size_bytes)}")
    return part


def clean(config: Config, verbosity: int, *, drains: bool, forgotten: Sequence[str] = ()) -> int:
    """Removes what killed runs left, and the output files of those in `forgotten`; with `drains` those of others are
    drained. Returns the exit code. Raises UsageError if a run to forget is not there, or is not over."""
    messages.set_verbosity(verbosity)
    host = socket.gethostname()
    local = local_dir(config)
    above = directory.outputs_base(local, host)
    for run_id in forgotten:
        if not forget(above, run_id):
            there = ", ".join(place.run_id for place in waiting(above)) or "none"
            raise UsageError(
                f"no run {run_id} that is over has output files or checkpoints here", f"name one of: {there}"
            )
        messages.warn(f"deleted the output files and checkpoints of run {run_id} on {host}")
    name = directory.base_name(os.geteuid(), host if local.is_network else "")
    removed = directory.leftovers(local.path / name)
    for path in removed:
        directory.remove(path)
    messages.warn(f"removed {format_number(len(removed), 'directory', 'directories')} of killed runs on {host}")
    return _drained(above) if drains else _told(above)


def local_dir(config: Config) -> LocalDir:
    """Returns the local directory. One that is named may be full, or unfit for staging by now."""
    try:
        local = localdir.choose(config.local_dir, os.environ, jobs.here())
    except NoLocalDir:
        path = Path(config.local_dir or "")
        if not path.is_absolute() or not path.is_dir():
            raise
        return localdir.LocalDir(path, "it was named", (), False, 0, None, path.stat().st_dev)
    if local is None:
        raise NoLocalDir("local_dir is none", "give --local-dir")
    return local


def _drained(above: Path) -> int:
    used: list[kept.KeptPlace] = []
    parts = drain_all(above, used)
    size_bytes = sum(part.size_bytes for part in parts)
    messages.warn(f"drained {format_number(len(parts), 'run')}: {format_size(size_bytes)}")
    return NotDrained.exit_code if used or any(part.undrained_count for part in parts) else 0


def _told(above: Path) -> int:
    used: list[kept.KeptPlace] = []
    over = waiting(above, used)
    for place in over:
        messages.warn(
            f"run {place.run_id} left {place.kind.what} in {place.output}: `hpcstage clean --drain` copies them"
        )
    return NotDrained.exit_code if used or over else 0
