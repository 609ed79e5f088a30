"""Owns the directories of a node whose wrapper is elsewhere that its daemon drains: output files, checkpoints, or both.

They have the same paths as the first node's. An agent has those of its node, the lead those of virtual nodes. What
becomes of the files is told in the group's directory, where the wrapper reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace, charter_of
from hpcstage.errors import HpcstageError, LocalDiskProblem
from hpcstage.job import localdir
from hpcstage.job.schedulers import domain_of
from hpcstage.node import kept
from hpcstage.node.directory import outputs_base
from hpcstage.protocol import leadspec
from hpcstage.protocol.rundir import checkpoints_path, outputs_path
from hpcstage.upload.facts import Place
from hpcstage.upload.start import CannotShow, start

if TYPE_CHECKING:
    from hpcstage.job import Job
    from hpcstage.node.hosted import Hosted
    from hpcstage.protocol.leadspec import LeadSpec

_LEFT_S = 1.0
"""The longest wait for the end of programs that the command left behind."""
DRAINED = "drained"
"""With it a node says that all is drained."""


class HostedDirectory:
    """A directory of one node for output files, or for checkpoints. It has a place once it is made."""

    def __init__(self, lead: LeadSpec, index: int, *, holds_checkpoints: bool) -> None:
        self.place: kept.KeptPlace | None = None
        self.word = "kept" if holds_checkpoints else "watched"
        """With it a node says that the directory is watched, or why not."""
        self.spec_key = "checkpoints" if holds_checkpoints else "outputs"
        self._holds_checkpoints = holds_checkpoints
        self._lead = lead
        self._index = index
        self._host = lead.hosts[index]
        self._held: kept.KeptLock | None = None
        """The place's shared lock."""
        self._earlier: list[tuple[kept.KeptPlace, kept.KeptLock]] = []
        """Checkpoints that earlier runs left here for the same DIR, which this run goes on from."""
        self._why_not = ""
        self._is_told = self._is_clean = False

    def take_earlier(self, above: Path) -> None:
        """Takes the checkpoints that runs which are over left here for the same DIR, before anybody drains them."""
        for place in kept.places(above) if self._holds_checkpoints else ():
            if not place.holds_checkpoints or not _belongs(place, self._lead.checkpoint["target"]):
                continue
            lock = place.take()
            if lock is not None and not place.is_used() and place.may_hold_files:
                self._earlier.append((place, lock))
            elif lock is not None:
                lock.let_go()

    def make(self, above: Path) -> str:
        """Makes the directory and fills it. Returns the place's path, for the daemon; empty where there is none."""
        suffix = kept.OF_CHECKPOINTS if self._holds_checkpoints else ""
        try:
            self.place, self._held = kept.make(above, f"{self._lead.node_name(self._index)}{suffix}")
            (self._prepare_checkpoints if self._holds_checkpoints else self._prepare_outputs)(self.place)
        except LocalDiskProblem as error:
            self._why_not = error.here
        except HpcstageError as error:
            self._why_not = error.what
        except (CannotShow, OSError) as error:
            self.abandon()
            self._why_not = str(error)
        return "" if self.place is None else os.fspath(self.place.path)

    def _prepare_outputs(self, place: kept.KeptPlace) -> None:
        lead = self._lead
        require_same(lead.daemon.outputs, lead.out, lead.out_inode, place)
        start(Place(place.output), lead.out, lead.daemon.run_id, self._host).close()

    def _prepare_checkpoints(self, place: kept.KeptPlace) -> None:
        said = self._lead.checkpoint
        require_same(self._lead.daemon.checkpoints, said["target"], said["target_inode"], place)
        local = CheckpointPlace(place.output)
        local.base.mkdir(0o700)
        local.tree.mkdir(0o700)
        taken = [os.fspath(one.output) for one, _ in self._earlier]
        if self._lead.virtual:
            taken = said["earlier"][self._index]
        charter_of(said, self._host, taken, domain_of(os.environ)).save(local)

    def watched(self, hosted: Hosted) -> str | None:
        """Returns why the daemon does not watch; empty if it does, None if that is not known yet."""
        if self.place is None:
            return self._why_not or "it could not be made"
        with suppress(OSError):
            return self.place.watched.read_text(errors="replace")
        return "its staging daemon ended early" if hosted.dead() else None

    def tell_result(self) -> None:
        """Writes what the daemon left to the group's directory; nothing where it left nothing."""
        self._is_told = True
        place = self.place
        if place is None:
            return
        with suppress(OSError, ValueError):
            report = json.loads(place.drained.read_bytes())
            strangers = place.strangers() if report["is_gone"] else []
            is_written_to = place.is_written_to()
            self._is_clean = not (report["undrained"] or strangers or is_written_to)
            data = {
                "run_id": self._lead.daemon.run_id,
                "report": report,
                "strangers": strangers,
                "is_written_to": is_written_to,
            }
            path_of = checkpoints_path if self._holds_checkpoints else outputs_path
            leadspec.write_json(path_of(Path(self._lead.group_dir), self._host), data)

    def abandon(self) -> None:
        """Removes the directory, of which no command knows."""
        if self.place is not None:
            self.place.remove()
            self._let_go()
            self.place = None

    def end(self, *, is_asked: bool) -> None:
        """Removes the directory if all of it was drained; to be called when the daemon has ended."""
        if is_asked and not self._is_told:
            self.tell_result()
        place, self.place = self.place, None
        if place is None:
            return
        if self._holds_checkpoints:
            self._end_earlier()
        if (self._is_clean or not place.may_hold_files) and place.is_left(_LEFT_S):
            place.remove()
        self._let_go()

    def _end_earlier(self) -> None:
        """Removes what this run has gone on from, when a later state is in DIR."""
        for earlier, lock in self._earlier:
            if self._is_clean and CheckpointPlace(earlier.output).was_continued:
                earlier.remove()
            lock.let_go()
        self._earlier = []

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.let_go()
            self._held = None


def require_same(expected_path: str, target: str, target_inode: int, place: kept.KeptPlace) -> None:
    """Raises CannotShow where the command would find other directories here than on the first node."""
    expected = Path(expected_path)
    if place.path != expected.with_name(place.path.name):
        raise CannotShow(f"its local directory is {place.path.parent.parent}, not {expected.parent.parent}")
    try:
        inode = os.stat(target).st_ino
    except OSError as error:
        raise CannotShow(f"{target}: {error.strerror}") from None
    if inode != target_inode:
        raise CannotShow(f"{target} is another directory there")


def _belongs(place: kept.KeptPlace, target: str) -> bool:
    with suppress(OSError, ValueError):
        return CheckpointCharter.load(CheckpointPlace(place.output)).target == target
    return False


class HostedDirectories:
    """The directories of one node."""

    def __init__(self, lead: LeadSpec, index: int) -> None:
        self._lead = lead
        self._members: list[HostedDirectory] = []
        if lead.out:
            self._members.append(HostedDirectory(lead, index, holds_checkpoints=False))
        if lead.checkpoint:
            self._members.append(HostedDirectory(lead, index, holds_checkpoints=True))
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
