"""Owns the directories of a run that are drained, those of `--out` and `--checkpoint`, as one for the run.

The daemons of all nodes drain both and answer once, when all is done.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcstage import inherited
from hpcstage.errors import UsageError
from hpcstage.node.directory import outputs_base
from hpcstage.problem import Problem
from hpcstage.wrapper import leftovers, outdir
from hpcstage.wrapper.rundirectory import RunDirectory, RunNode

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
    """The directories of one run that were asked for."""

    def __init__(self, members: Sequence[RunDirectory]) -> None:
        self._members = members
        self._others: OtherNodes | None = None
        self._is_answered = False

    @classmethod
    def open(cls, config: Config, local: LocalDir, job: Job, node: RunNode) -> RunDirectories:
        """Drains what killed runs left, and makes the directories. Raises UsageError and NotStarted, after which none
        is there."""
        above = outputs_base(local, socket.gethostname())
        asked = [named for named in outdir.BOTH if named.asked(config) is not None]
        made = cls([_class_of(named)(named, config, job, node) for named in asked])
        try:
            for member in made._members:
                member.take_earlier(above)
            leftovers.drain_at_start(above)
            for member in made._members:
                member.open(local)
        except BaseException:
            made.abandon()
            raise
        return made

    @property
    def exit_code(self) -> int:
        """The exit code that takes the place of 0; not 0 where files were not drained."""
        return max(member.exit_code for member in self._members)

    @property
    def locks(self) -> list[int]:
        """The descriptors of the locks of the directories on the shared file system."""
        return [member.lock for member in self._members if member.lock is not None]

    def command(self, command: Sequence[str]) -> list[str]:
        """Returns the command as it is started."""
        words = list(command)
        for member in self._members:
            words = member.named.put_in(words, member.out)
        return words

    def environment(self, env: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment in which the command finds the directories."""
        made = dict(env)
        for member in self._members:
            made = member.named.environment(made, member.out)
        return made

    def fill(self, group: Grouping | None) -> None:
        """Takes the nodes of the run, before a daemon starts. Raises NotStarted and CannotProtect."""
        for member in self._members:
            member.fill(group)

    def in_spec(self, config: Config, end_unix_s: float | None) -> dict[str, Any]:
        """Returns what the daemon is told of the directories."""
        told: dict[str, Any] = {}
        for member in self._members:
            told |= member.in_spec()
        return told and {
            **told,
            "drain_rate_bytes_per_s": config.drain_rate_bytes_per_s,
            "drain_hurry_unix_s": None if end_unix_s is None else end_unix_s - config.drain_before_s,
        }

    def in_lead(self) -> dict[str, dict[str, Any]]:
        """Returns what the lead is told, where other nodes have such directories, too."""
        told: dict[str, dict[str, Any]] = {}
        for member in self._members:
            told |= member.in_lead()
        return told

    def meet(self, others: OtherNodes) -> None:
        """Takes the other nodes of the run, which come up."""
        self._others = others

    def is_watched(self, control: DaemonControl, timeout_s: float) -> bool:
        """Tells whether the daemons watch all, or nobody has to."""
        return all(member.is_watched(control, self._others, timeout_s) for member in self._members)

    def give_up(self, why: str) -> None:
        """Makes each directory the one on the shared file system; to be called before the command starts only."""
        for member in self._members:
            member.give_up(why)

    def abandon(self) -> None:
        """Removes what was made; to be called before the command starts only."""
        for member in self._members:
            member.abandon()

    def end(self, control: DaemonControl, *, is_orderly: bool) -> None:
        """Has the daemons drain what is left: the command has ended, orderly with exit code 0."""
        self.before_end()
        if any([member.end(is_orderly=is_orderly) for member in self._members]):  # noqa: C419  each is told
            control.ask_drained(is_orderly=is_orderly)
        else:
            self._is_answered = True

    def before_end(self) -> None:
        """Says to the other nodes that the command has ended, before the run ends there."""
        if self._others is not None:
            self._others.lead.ask_drain()

    def is_drained(self, control: DaemonControl, timeout_s: float) -> bool:
        """Tells whether nothing more can be done for the files; to be asked after `end`. What the daemon of this node
        did not drain is drained when the other nodes are done."""
        self._is_answered = self._is_answered or control.dead() or control.staged(timeout_s)
        are_done = self._is_answered and (self._others is None or self._others.lead.drained(timeout_s))
        done = [member.is_drained(timeout_s, is_answered=are_done) for member in self._members]
        return all(done)

    def collect(self, run: RunPart) -> None:
        """Takes what became of the files, after the daemons' end, says what is not drained, and lets go of all."""
        problems: list[Problem] = []
        for member in self._members:
            problems += member.collect(self._others)
            member.tell(run)
        run.problems += problems


def _class_of(named: outdir.NamedDirectory) -> type[RunDirectory]:
    if named is outdir.OUT:
        return RunDirectory
    from hpcstage.wrapper.checkpoints import CheckpointDirectory

    return CheckpointDirectory


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
