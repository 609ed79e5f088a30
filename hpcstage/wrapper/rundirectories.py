"""Owns the directories of a run that are drained, those of `--out` and `--checkpoint`, as one for the run.

The daemon drains both and answers once, when all is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcstage import inherited
from hpcstage.errors import UsageError
from hpcstage.problem import Problem
from hpcstage.wrapper import outdir
from hpcstage.wrapper.outputs import RunNode, RunOutputs

if TYPE_CHECKING:
    from hpcstage.config import Config
    from hpcstage.job import Job
    from hpcstage.job.localdir import LocalDir
    from hpcstage.job.together import Grouping
    from hpcstage.node.control import DaemonControl
    from hpcstage.plan.types import Dataset
    from hpcstage.record.parts.run import RunPart
    from hpcstage.wrapper.leadlink import OtherNodes


class RunDirectories:
    """The directories of one run; at least one was asked for."""

    def __init__(self, members: Sequence[RunOutputs]) -> None:
        self._members = members
        self._is_answered = False

    @classmethod
    def open(cls, config: Config, local: LocalDir, job: Job, node: RunNode) -> RunDirectories:
        """Makes the directories. Raises UsageError and NotStarted, after which none is there."""
        members: list[RunOutputs] = []
        try:
            if config.out is not None:
                members.append(_outputs(node).open(config, local, job, node))
            if config.checkpoint is not None:
                members.append(_checkpoints(config, node).open(config, local, job, node))
        except BaseException:
            for member in members:
                member.abandon()
            raise
        return cls(members)

    @property
    def exit_code(self) -> int:
        """The exit code that takes the place of 0; not 0 where files were not drained."""
        return max(member.exit_code for member in self._members)

    @property
    def locks(self) -> list[int]:
        """The descriptors of the locks of the directories on the shared file system."""
        return [lock for member in self._members if (lock := member.lock) is not None]

    def command(self, command: Sequence[str]) -> list[str]:
        """Returns the command as it is started."""
        words = list(command)
        for member in self._members:
            words = member.command(words)
        return words

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment in which the command finds the directories."""
        made = dict(env)
        for member in self._members:
            made = member.environment(made)
        return made

    def in_spec(self, config: Config, end_unix_s: float | None) -> dict[str, Any]:
        """Returns what the daemon is told of the directories."""
        told: dict[str, Any] = {}
        for member in self._members:
            told |= member.in_spec(config, end_unix_s)
        return told

    def in_lead(self) -> dict[str, Any]:
        """Returns what the lead is told, where other nodes have such directories, too."""
        told: dict[str, Any] = {}
        for member in self._members:
            told |= member.in_lead()
        return told

    def join(self, group: Grouping, config: Config) -> None:
        """Takes the nodes of the run, before a daemon starts. Raises CannotProtect."""
        for member in self._members:
            member.join(group, config)

    def meet(self, others: OtherNodes) -> None:
        """Takes the other nodes of the run, which come up."""
        for member in self._members:
            member.meet(others)

    def before_end(self) -> None:
        """Says to the other nodes what they have to know before the run ends there."""
        for member in self._members:
            member.before_end()

    def is_watched(self, control: DaemonControl, timeout_s: float) -> bool:
        """Tells whether the daemon watches all, or nobody has to."""
        return all(member.is_watched(control, timeout_s) for member in self._members)

    def give_up(self, why: str) -> None:
        """Makes each directory the one on the shared file system; to be called before the command starts only."""
        for member in self._members:
            member.give_up(why)

    def abandon(self) -> None:
        """Removes what was made; to be called before the command starts only."""
        for member in self._members:
            member.abandon()

    def end(self, control: DaemonControl, *, is_orderly: bool) -> None:
        """Has the daemon drain what is left: the command has ended, orderly with exit code 0."""
        if any([member.end(is_orderly=is_orderly) for member in self._members]):  # noqa: C419  each is told
            control.ask_drained(is_orderly=is_orderly)
        else:
            self._is_answered = True

    def is_drained(self, control: DaemonControl, timeout_s: float) -> bool:
        """Tells whether nothing more can be done for the files; to be asked after `end`."""
        self._is_answered = self._is_answered or control.dead() or control.staged(timeout_s)
        done = [member.is_drained(timeout_s, is_answered=self._is_answered) for member in self._members]
        return all(done)

    def collect(self, run: RunPart) -> None:
        """Takes what became of the files, after the daemon's end, says what is not drained, and lets go of all."""
        problems: list[Problem] = []
        for member in self._members:
            problems += member.collect()
            member.tell(run)
        run.problems += problems


def _outputs(node: RunNode) -> type[RunOutputs]:
    if not node.host:
        return RunOutputs
    from hpcstage.wrapper.sharedoutputs import SharedOutputs

    return SharedOutputs


def _checkpoints(config: Config, node: RunNode) -> type[RunOutputs]:
    if not node.host:
        from hpcstage.wrapper.checkpoints import RunCheckpoints, refuse_protection

        refuse_protection(config, node.why_not)
        return RunCheckpoints
    from hpcstage.wrapper.checkpoints import SharedCheckpoints

    return SharedCheckpoints


def check(config: Config, command: Sequence[str], datasets: Sequence[Dataset]) -> None:
    """Raises UsageError if a directory cannot be used as was asked for. Makes nothing."""
    cwd = inherited.directory()
    for named in outdir.BOTH:
        asked = named.asked(config)
        if asked is None:
            named.refuse_placeholder(command)
        else:
            named.check(asked, cwd, datasets)
    outdir.check_apart(config, cwd)
    if config.checkpoint is None and config.protect is not None:
        raise UsageError("--protect has no checkpoints", "use --checkpoint DIR as well")


def at_target(config: Config) -> dict[outdir.NamedDirectory, str]:
    """Returns the directories for a command that runs without hpcstage, which are made."""
    cwd = inherited.directory()
    return {named: named.made(asked, cwd) for named in outdir.BOTH if (asked := named.asked(config)) is not None}
