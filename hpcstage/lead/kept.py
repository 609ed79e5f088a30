"""Owns the directories of a node whose wrapper is elsewhere that its daemon drains: output files, checkpoints, or both.

Says when they are watched, and when all is drained; the daemon answers once for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from hpcstage.errors import HpcstageError
from hpcstage.job import localdir
from hpcstage.lead.outputs import HostedOutputs
from hpcstage.node.directory import outputs_base

if TYPE_CHECKING:
    from hpcstage.job import Job
    from hpcstage.node.hosted import Hosted
    from hpcstage.protocol.leadspec import LeadSpec

DRAINED = "drained"
"""With it a node says that all is drained."""


class HostedDirectories:
    """The directories of one node."""

    def __init__(self, lead: LeadSpec, index: int) -> None:
        self._lead = lead
        self._members: list[HostedOutputs] = []
        if lead.out:
            self._members.append(HostedOutputs(lead, index))
        if lead.checkpoint:
            from hpcstage.lead.checkpoints import HostedCheckpoints

            self._members.append(HostedCheckpoints(lead, index))
        self._said: set[str] = set()
        self._is_asked = self._is_drained = False

    def take_earlier(self, env: Mapping[str, str], job: Job) -> None:
        """Takes the checkpoints that earlier runs left on this node, before a late drain takes them."""
        with suppress(HpcstageError):
            local = localdir.choose(self._lead.local_dir, env, job)
            for member in self._members:
                if local is not None:
                    member.take_earlier(outputs_base(local, job.hostname))

    def make(self, env: Mapping[str, str], job: Job) -> dict[str, str]:
        """Makes the directories that are asked for. Returns the fields of the daemon's specification. Raises
        HpcstageError."""
        if not self._members:
            return {}
        local = localdir.choose(self._lead.local_dir, env, job)
        assert local is not None, "the node has its directory there"
        return {member.spec_key: member.make(outputs_base(local, job.hostname)) for member in self._members}

    @property
    def is_pressing(self) -> bool:
        """Whether somebody waits for what `news` will say."""
        is_watched = all(member.word in self._said for member in self._members)
        return not is_watched or (self._is_asked and not self._is_drained)

    def news(self, hosted: Hosted, *, is_asked: bool) -> dict[str, str]:
        """Returns what is to be said since the last call, with a reason where something is not as it should be.
        `is_asked`: the command has ended."""
        said = {}
        for member in self._members:
            if member.word not in self._said and (why := member.watched(hosted)) is not None:
                self._said.add(member.word)
                said[member.word] = why
        is_made = any(member.place is not None for member in self._members)
        if is_asked and not self._is_asked:
            self._is_asked = True
            if is_made:
                hosted.ask_drained()
        if self._is_asked and not self._is_drained and (not is_made or hosted.staged()):
            self._is_drained = True
            for member in self._members:
                member.tell_result()
            said[DRAINED] = ""
        return said

    def abandon(self) -> None:
        """Removes the directories, of which no command knows."""
        for member in self._members:
            member.abandon()

    def end(self) -> None:
        """Removes what was drained; to be called when the daemon has ended."""
        for member in self._members:
            member.end(is_asked=self._is_asked)
