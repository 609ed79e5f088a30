"""Owns the directories of a node whose wrapper is elsewhere that its daemon drains: output files, checkpoints, or both.

They have the same paths as the first node's, and their agent owns them. What becomes of the files is told in the
group's directory, where the wrapper reads it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace
from hpcstage.errors import LocalDiskProblem
from hpcstage.node import kept
from hpcstage.node.keptdirectory import CannotFill, Earlier, KeptDirectory, take_earlier
from hpcstage.protocol import leadspec
from hpcstage.protocol.rundir import result_path

if TYPE_CHECKING:
    from hpcstage.node.hosted import Hosted
    from hpcstage.protocol.leadspec import LeadSpec

_LEFT_S = 1.0
"""The longest wait for the end of programs that the command left behind."""
DRAINED = "drained"
"""With it a node says that all is drained."""


class HostedDirectory:
    """A directory of one node for one kind of files. It is there once it is made."""

    def __init__(self, lead: LeadSpec, index: int, kind: kept.KeptKind) -> None:
        self.own: KeptDirectory | None = None
        self.kind = kind
        """With its key a node says that the directory is watched, or why not."""
        self._lead = lead
        self._index = index
        self._told = lead.directories[kind.key]
        self._first = Path(getattr(lead.daemon, kind.key))
        """The first node's."""
        self._earlier: Earlier = []
        self._why_not = ""
        self._is_told = self._is_clean = False

    def take_earlier(self, above: Path) -> None:
        """Takes the checkpoints that runs which are over left here for the same DIR, before anybody drains them."""
        if self.kind is kept.CHECKPOINTS:
            self._earlier = take_earlier(above, self._told["target"])

    def make(self, above: Path) -> str:
        """Makes the directory and fills it. Returns the place's path, for the daemon; empty where there is none."""
        try:
            name = self._first.name.removesuffix(self.kind.suffix).removesuffix(self._lead.suffix(0))
            suffix = self._lead.suffix(self._index)
            self.own = KeptDirectory(above, self.kind, self._lead.daemon.run_id, [name], suffix)
            self._fill(self.own)
        except LocalDiskProblem as error:
            self._why_not = error.here
        except CannotFill as error:
            self.abandon()
            self._why_not = str(error)
        return "" if self.own is None else os.fspath(self.own.place.path)

    def _fill(self, own: KeptDirectory) -> None:
        """Raises CannotFill, also where the command would find another directory here than on the first node."""
        path = own.place.path
        if path.parent != self._first.parent:
            raise CannotFill(f"its local directory is {path.parent.parent}, not {self._first.parent.parent}")
        taken = [os.fspath(place.output) for place, _ in self._earlier]
        if self._lead.virtual and self.kind is kept.CHECKPOINTS:
            taken = self._told["earlier"][self._index]
        own.fill(self._told, self._lead.hosts[self._index], taken)

    def watched(self, hosted: Hosted) -> str | None:
        """Returns why the daemon does not watch; empty if it does, None if that is not known yet."""
        if self.own is None:
            return self._why_not or "it could not be made"
        why = self.own.watched_why()
        return "its staging daemon ended early" if why is None and hosted.dead() else why

    def tell_result(self) -> None:
        """Writes what the daemon left to the group's directory; nothing where it left nothing."""
        self._is_told = True
        if self.own is None or (report := self.own.report()) is None:
            return
        result = self.own.result(report)
        self._is_clean = result.is_clean
        path = result_path(Path(self._lead.group_dir), self._lead.hosts[self._index], self.kind.key)
        with suppress(OSError):
            leadspec.write_json(path, {"run_id": self._lead.daemon.run_id, **result.to_json()})

    def abandon(self) -> None:
        """Removes the directory, of which no command knows."""
        if self.own is not None:
            self.own.remove()
            self.own = None

    def end(self, *, is_asked: bool) -> None:
        """Removes the directory if all of it was drained; to be called when the daemon has ended."""
        if is_asked and not self._is_told:
            self.tell_result()
        own, self.own = self.own, None
        if own is None:
            return
        for earlier, lock in self._earlier:  # a later state may be in DIR
            if self._is_clean and _is_continued(CheckpointPlace(earlier.output)):
                earlier.remove()
            lock.let_go()
        self._earlier = []
        if (self._is_clean or not own.place.may_hold_files) and own.place.is_left(_LEFT_S):
            own.place.remove()
        own.let_go()


def _is_continued(place: CheckpointPlace) -> bool:
    from hpcstage.checkpoint.job.late import is_continued  # NumPy takes long

    with suppress(OSError, ValueError):
        return is_continued(place, CheckpointCharter.load(place))
    return False


class HostedDirectories:
    """The directories of one node."""

    def __init__(self, lead: LeadSpec, index: int, above: Path) -> None:
        """`above` is the directory of all runs' output directories on this node."""
        self._above = above
        self._members = [HostedDirectory(lead, index, kind) for kind in kept.KINDS if kind.key in lead.directories]
        self._said: set[str] = set()
        self._is_asked = self._is_drained = False

    def take_earlier(self) -> None:
        """Takes the checkpoints that earlier runs left on this node, before a late drain takes them."""
        for member in self._members:
            member.take_earlier(self._above)

    def make(self) -> dict[str, str]:
        """Makes the directories that are asked for. Returns the fields of the daemon's specification."""
        return {member.kind.key: member.make(self._above) for member in self._members}

    @property
    def is_pressing(self) -> bool:
        """Whether somebody waits for what `news` will say."""
        is_watched = all(member.kind.key in self._said for member in self._members)
        return not is_watched or (self._is_asked and not self._is_drained)

    def news(self, hosted: Hosted, *, is_asked: bool) -> dict[str, str]:
        """Returns what is to be said since the last call, with a reason where something is not as it should be.
        `is_asked`: the command has ended."""
        said = {}
        for member in self._members:
            if member.kind.key not in self._said and (why := member.watched(hosted)) is not None:
                self._said.add(member.kind.key)
                said[member.kind.key] = why
        is_made = any(member.own is not None for member in self._members)
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
