"""Owns a directory of a run on the local disk: where the command writes, and what became of its files.

`{out}` is a directory on the local disk that the daemon drains to DIR, the directory of `--out`. Where that cannot be,
`{out}` is DIR itself, and one line says why. `outdir` owns DIR. The same holds for `{checkpoint}`; `checkpoints` has
what is different there.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hpcstage import inherited, owner
from hpcstage.errors import LocalDiskProblem, NotDrained, NotStarted
from hpcstage.node import kept
from hpcstage.node.directory import outputs_base
from hpcstage.problem import Problem
from hpcstage.record.parts.outputs import OutputsPart
from hpcstage.wrapper import dirlock, messages, outdir, outputpart
from hpcstage.wrapper.child import is_fatal_pending
from hpcstage.wrapper.leftovers import LONGEST_S, ForkedDrain
from hpcstage.wrapper.outdir import NamedDirectory

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job import Job
    from hpcstage.job.localdir import LocalDir
    from hpcstage.job.together import Grouping
    from hpcstage.node.control import DaemonControl
    from hpcstage.record.parts.run import RunPart
    from hpcstage.wrapper.leadlink import OtherNodes

WATCHED_S = 30.0
"""The command waits for so long until its output directory is watched."""
_SHOWN = 20
"""The lines of names that are printed at most."""
_LOOK_S = 0.002
_TELLS_AFTER_S = 3.0
"""A drain that takes longer at the end of the command is told of."""
_LEFT_S = 1.0
"""The longest wait for the end of programs that the command left behind."""
_FREE_S = 2.0
"""The longest wait until nobody else works on the files of a daemon that died."""


REQUEUED_S = 120.0
"""A start waits for so long for the end of an earlier start of its job, on another host: Grid Engine starts a job that
is rescheduled anew before it ends it."""
_LOCK_S = 0.1


class CannotPrepare(Exception):
    """The local directory cannot be made ready; the message says why."""


@dataclass(frozen=True)
class RunNode:
    """The node of this wrapper in a run."""

    run_id: str
    name: str
    """The name of the run's directories on this node's disk."""
    why_not: str = ""
    """Why what the command writes cannot be kept on the local disk; empty: it can."""
    host: str = ""
    """The node's name in a run on several nodes, which the lead brings up; else empty."""


class RunOutputs:
    """The output directory of one run. `part` is its part of the record."""

    named: ClassVar[NamedDirectory] = outdir.OUT
    spec_key: ClassVar[str] = "outputs"
    """The daemon is told of the place under this name."""
    name_suffix: ClassVar[str] = ""
    """The names of its places on the local disk end so."""
    watched_s: ClassVar[float] = WATCHED_S

    def __init__(
        self, target: str, lock: int | None, why: str, kept_at: tuple[kept.KeptPlace, kept.KeptLock] | None
    ) -> None:
        """`lock` is the descriptor of DIR's lock; `kept_at` the local directory with its shared lock, or None, and
        `why`, where `{out}` is DIR."""
        self.place: kept.KeptPlace | None = None
        self._held: kept.KeptLock | None = None
        if kept_at is not None:
            self.place, self._held = kept_at
        local_dir = None if self.place is None else os.fspath(self.place.tree)
        self.part = OutputsPart(directory=target, local_dir=local_dir, why=why)
        self._lock = lock
        self._since = 0.0
        self._is_orderly = False
        self._has_told = False
        self._late: ForkedDrain | None = None
        self._free_until = 0.0
        self.goes_with_job = False
        """Whether the local directory may be deleted with the job."""
        self.exit_code = 0
        """The exit code that takes the place of 0; not 0 where files were not drained."""

    @classmethod
    def open(cls, config: Config, local: LocalDir, job: Job, node: RunNode) -> RunOutputs:
        """Makes the directories and fills the local one. Raises UsageError if DIR is on the local disk, or if another
        run uses it."""
        named, cwd, host = cls.named, inherited.directory(), socket.gethostname()
        asked = named.asked(config)
        assert asked is not None
        if why_not := cls._why_not(node):
            target = named.made(asked, cwd)
            return cls(target, None, why_not, None) if job.rank else cls._at_target(target, None, why_not)
        named.check_disk(asked, cwd, local)
        target = named.made(asked, cwd)
        lock = _lock_of(named, target, asked, node.run_id, _said_of(job))
        try:
            place, held = kept.make(outputs_base(local, host), f"{node.name}{cls.name_suffix}")
        except LocalDiskProblem as error:
            return cls._at_target(target, lock, error.what)
        made = cls(target, lock, "", (place, held))
        try:
            made._prepare(place, node, config)
        except CannotPrepare as error:
            made.give_up(str(error))
        except BaseException:
            made.abandon()
            raise
        else:
            made.goes_with_job = local.goes_with_job
            if local.goes_with_job:
                text = f"{named.what} that are not copied then are lost"
                messages.warn(f"{local.path} may be deleted with the job: {text}")
        return made

    @classmethod
    def _why_not(cls, node: RunNode) -> str:
        return node.why_not or (f"{cls.named.what} are kept on one node only" if node.host else "")

    def _prepare(self, place: kept.KeptPlace, node: RunNode, config: Config) -> None:  # noqa: ARG002
        """Makes the local directory ready. Raises CannotPrepare."""
        from hpcstage.upload.facts import Place
        from hpcstage.upload.start import CannotShow, start

        try:
            start(Place(place.output), self.part.directory, node.run_id, node.host).close()
        except CannotShow as error:
            raise CannotPrepare(str(error)) from None

    @classmethod
    def _at_target(cls, target: str, lock: int | None, why: str) -> RunOutputs:
        messages.warn(f"{cls.named.placeholder} is {target}: {why}")
        return cls(target, lock, why, None)

    @property
    def lock(self) -> int | None:
        """The descriptor of DIR's lock. The daemon keeps it, too: it copies to DIR also if this process was killed."""
        return self._lock

    @property
    def out(self) -> str:
        """The directory that the command writes to."""
        return self.part.local_dir or self.part.directory

    def command(self, command: Sequence[str]) -> list[str]:
        """Returns the command as it is started."""
        return self.named.put_in(command, self.out)

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment in which the command finds the directory."""
        return self.named.environment(env, self.out)

    def in_spec(self, config: Config, end_unix_s: float | None) -> dict[str, Any]:
        """Returns what the daemon is told of the output directory."""
        if self.place is None:
            return {}
        return {
            self.spec_key: os.fspath(self.place.path),
            "drain_rate_bytes_per_s": config.drain_rate_bytes_per_s,
            "drain_hurry_unix_s": None if end_unix_s is None else end_unix_s - config.drain_before_s,
        }

    def in_lead(self) -> dict[str, Any]:
        """Returns what the lead is told, where other nodes have such a directory, too."""
        return {}

    def join(self, group: Grouping, config: Config) -> None:
        """Takes the nodes of the run, before a daemon starts."""

    def meet(self, others: OtherNodes) -> None:
        """Takes the other nodes of the run, which come up."""

    def before_end(self) -> None:
        """Says to the other nodes what they have to know before the run ends there."""

    # ---- before the command

    def is_watched(self, control: DaemonControl, timeout_s: float) -> bool:
        """Tells whether the daemon watches, or nobody has to. Where it does not in time, `{out}` becomes DIR."""
        self._since = self._since or time.monotonic()
        deadline = time.monotonic() + timeout_s
        while self.place is not None:
            with suppress(OSError):
                if why := self.place.watched.read_text(errors="replace"):
                    self.give_up(why)
                return True
            if control.dead() or time.monotonic() > self._since + self.watched_s:
                self.give_up("the staging daemon does not watch the local directory")
            elif time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_S)
        return True

    def give_up(self, why: str) -> None:
        """Makes the command's directory DIR; to be called before the command starts only."""
        if self.place is not None:
            self.place.remove()
            self.place = None
            self.part = replace(self.part, local_dir=None, why=why)
            messages.warn(f"{self.named.placeholder} is {self.part.directory}: {why}")

    def abandon(self) -> None:
        """Removes what was made; to be called before the command starts only."""
        if self.place is not None:
            self.place.remove()
        self._close()

    # ---- after the command

    def end(self, *, is_orderly: bool) -> bool:
        """Notes that the command has ended, and whether with exit code 0. Tells whether the daemon has something to
        drain."""
        self._since = time.monotonic()
        self._is_orderly = is_orderly
        return self.place is not None

    def is_drained(self, timeout_s: float, *, is_answered: bool) -> bool:
        """Tells whether nothing more can be done for the files; to be asked after `end`. `is_answered`: the daemon has
        said that it is done, or is dead."""
        if self.place is None:
            return True
        self._tell()
        if self._late is not None:
            return self._late.is_over(timeout_s)
        if not is_answered:
            return False
        if self._is_well_drained(self.place):
            return True
        return not self._drains_late(self.place)

    def collect(self) -> list[Problem]:
        """Takes what became of the files, after the daemon's end, says what is not in DIR, and lets go of it. Deletes
        the local directory only if nothing is left in it. Returns what the record says of that."""
        if self.place is not None:
            self._collect(self.place)
            self._tell_differences(self.place)
        self._close()
        first = next((one.host for one in self.part.named("undrained")), None)
        left = replace(self._left_at(first), goes_with_job=self.goes_with_job)
        return outputpart.problems(self.part, left, self.named.what, self.named.unfinished)

    def _left_at(self, host: str | None) -> outputpart.LeftAt:  # noqa: ARG002
        """Returns where what a node could not drain still is."""
        return outputpart.LeftAt(socket.gethostname(), self.part.local_dir)

    def _tell_differences(self, place: kept.KeptPlace) -> None:
        found = [] if place.holds_checkpoints else outputpart.differences(self.part, "the command")
        more = len(found) - len(shown := found[:_SHOWN])
        for line in shown:
            messages.warn(line)
        if more:
            messages.warn(
                f"{more} more names in {self.part.directory} are not as the command left them: see the record"
            )

    def _collect(self, place: kept.KeptPlace) -> None:
        self.part = replace(self._result(place), took_s=round(time.monotonic() - self._since, 3))
        if not self.part.undrained_count and place.is_written_to():
            self.part = outputpart.unknown(self.part, "a program of the command still writes to them")
        above, host = place.path.parent.parent, socket.gethostname()
        for line in outputpart.lines(self.part, host, above, goes_with_job=self.goes_with_job):
            messages.error(line)
        if self.part.undrained_count or (self.part.is_gone and not place.tree.is_dir()):
            self.exit_code = NotDrained.exit_code
        if self.part.undrained_count:
            return
        if place.is_left(_LEFT_S):
            self._unlock()  # before the last thing that leads to DIR from here is gone
            place.remove()
        else:
            command = outputpart.clean_command(place.path.parent.parent)
            messages.warn(f"programs of the command live on; `{command}` copies what they still write to {place.tree}")

    def tell(self, run: RunPart) -> None:
        """Puts what became of the files into the wrapper's part of the record."""
        run.outputs = self.part

    def _close(self) -> None:
        """Lets go of the locks."""
        if self._late is not None:
            self._late.end()
        self._unlock()
        if self._held is not None:
            self._held.let_go()
        self._held = None

    def _unlock(self) -> None:
        """Lets go of DIR, if that has not been done."""
        if self._lock is not None:
            owner.let_go(self._lock)
        self._lock = None

    def _tell(self) -> None:
        if not self._has_told and time.monotonic() > self._since + _TELLS_AFTER_S:
            self._has_told = True
            messages.warn(f"the command has ended; its {self.named.what} are being copied to {self.part.directory}")

    def _report(self, place: kept.KeptPlace) -> dict[str, Any] | None:
        """Returns what the daemon left; None if it left nothing."""
        try:
            found = json.loads(place.drained.read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def _is_well_drained(self, place: kept.KeptPlace) -> bool:
        """Tells whether the daemon has said what became of all that is there; it stops watching a directory that is
        removed, and a program may make it again."""
        report = self._report(place)
        return report is not None and not (report.get("is_gone") and place.tree.is_dir())

    def _drains_late(self, place: kept.KeptPlace) -> bool:
        """Begins to drain without the daemon, once nobody else works on the files. Tells whether that can be."""
        if self._held is not None:
            self._held.let_go()
            self._held = None
        lock = place.take()
        if lock is not None:
            owning = "" if self._lock is None else place.run_id
            self._late = ForkedDrain(place, lock, LONGEST_S, is_orderly=self._is_orderly, owning=owning)
            self._held = lock
            return True
        self._free_until = self._free_until or time.monotonic() + _FREE_S
        time.sleep(_LOOK_S)
        return time.monotonic() < self._free_until

    def _result(self, place: kept.KeptPlace) -> OutputsPart:
        if self._late is not None:
            self._late.end()
            part = replace(self._late.part(), local_dir=self.part.local_dir, directory=self.part.directory)
        else:
            report = self._report(place)
            if report is None:
                return outputpart.unknown(self.part, "the staging daemon did not say what became of them")
            if not self._is_well_drained(place):
                return outputpart.unknown(self.part, "another process is working on them")
            part = outputpart.part_of(report, self.part)
            part = outputpart.with_moved(part, place.strangers())
        return part


def _said_of(job: Job) -> str:
    """Returns what the lock of DIR says of the job; nothing without a scheduler."""
    if job.job_id is None:
        return ""
    return f", {job.scheduler} job {job.job_id}" + (f" task {job.array_task}" if job.array_task else "")


def _lock_of(named: NamedDirectory, target: str, asked: str, run_id: str, of_job: str) -> int:
    """Takes the lock of DIR. Where an earlier start of the same job has it, on another host, it is waited for. Raises
    TargetInUse, and NotStarted when a signal that is blocked will end this process."""
    host, deadline = socket.gethostname(), None
    while True:
        try:
            return named.lock(target, asked, f"run {run_id} on {host}{of_job}")
        except dirlock.TargetInUse as error:
            is_here = error.holder.endswith(f" on {host}{of_job}")
            is_earlier = bool(of_job) and error.holder.endswith(of_job) and not is_here
            if not is_earlier or (deadline is not None and time.monotonic() > deadline):
                raise
            if deadline is None:
                deadline = time.monotonic() + REQUEUED_S
                text = f"{named.option} {asked} is in use by an earlier start of this job, {error.holder}"
                messages.warn(f"{text}: waiting for its end, for {REQUEUED_S:g} s at most")
        if is_fatal_pending():
            raise NotStarted("a signal came while an earlier start of the job was waited for", "start it again")
        time.sleep(_LOCK_S)
