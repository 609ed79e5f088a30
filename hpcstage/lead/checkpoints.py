"""Owns the directory for checkpoints of a node whose wrapper is elsewhere, and what earlier runs left on that node for
the same DIR: the run may go on from it, and it goes when a later state is in DIR."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.checkpoint.keeping.facts import CheckpointCharter, CheckpointPlace, charter_of
from hpcstage.job.schedulers import domain_of
from hpcstage.lead.outputs import HostedOutputs, require_same
from hpcstage.node import kept
from hpcstage.protocol.rundir import checkpoints_path

if TYPE_CHECKING:
    from hpcstage.protocol.leadspec import LeadSpec


class HostedCheckpoints(HostedOutputs):
    """The directory for checkpoints of one node."""

    word = "kept"
    spec_key = "checkpoints"
    suffix = kept.OF_CHECKPOINTS

    def __init__(self, lead: LeadSpec, index: int) -> None:
        super().__init__(lead, index)
        self._earlier: list[tuple[kept.KeptPlace, kept.KeptLock]] = []

    def take_earlier(self, above: Path) -> None:
        """Takes what runs that are over left here for the same DIR, before anybody drains it."""
        target = self.lead.checkpoint["target"]
        for place in kept.places(above):
            if not place.holds_checkpoints or not _belongs(place, target):
                continue
            lock = place.take()
            if lock is not None and not place.is_used() and place.may_hold_files:
                self._earlier.append((place, lock))
            elif lock is not None:
                lock.let_go()

    def fill(self, place: kept.KeptPlace) -> None:
        """See HostedOutputs."""
        said = self.lead.checkpoint
        require_same(self.lead.daemon.checkpoints, said["target"], said["target_inode"], place)
        local = CheckpointPlace(place.output)
        local.base.mkdir(0o700)
        local.tree.mkdir(0o700)
        taken = [os.fspath(one.output) for one, _ in self._earlier]
        if self.lead.virtual:
            taken = said["earlier"][self.index]
        charter_of(said, self.host, taken, domain_of(os.environ)).save(local)

    def result_path(self, group_dir: Path) -> Path:
        """See HostedOutputs."""
        return checkpoints_path(group_dir, self.host)

    def claim(self, place: kept.KeptPlace) -> None:
        """Removes what this run has gone on from, when a later state is in DIR."""
        del place
        for earlier, lock in self._earlier:
            if self._is_clean and CheckpointPlace(earlier.output).was_continued:
                earlier.remove()
            lock.let_go()
        self._earlier = []


def _belongs(place: kept.KeptPlace, target: str) -> bool:
    with suppress(OSError, ValueError):
        return CheckpointCharter.load(CheckpointPlace(place.output)).target == target
    return False
