"""Owns the output directory of a node whose wrapper is elsewhere: from its making to its removal.

It has the same path as the first node's, is filled from the same directory on the shared file system, and is drained by
the node's daemon. An agent has the one of its node, the lead those of virtual nodes. What becomes of the files is told
in the run directory, where the wrapper reads it; nothing is deleted that is not drained.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.errors import HpcstageError
from hpcstage.job import localdir
from hpcstage.node import kept
from hpcstage.node.directory import outputs_base
from hpcstage.outputs.claims import claims_of
from hpcstage.outputs.prepare import CannotMirror, OutputPlace, prepare
from hpcstage.protocol import leadspec
from hpcstage.protocol.rundir import claims_path, outputs_path

if TYPE_CHECKING:
    from hpcstage.job import Job
    from hpcstage.node.hosted import Hosted
    from hpcstage.protocol.leadspec import LeadSpec

WATCHED, DRAINED = "watched", "drained"
"""The words of a node about its output directory: it is watched (or why not), and it is drained."""
_LEFT_S = 1.0
"""The longest wait for the end of programs that the command left behind."""


class HostedOutputs:
    """The output directory of one node. It has a place once it is made."""

    def __init__(self, lead: LeadSpec, index: int) -> None:
        self.place: kept.KeptPlace | None = None
        self._lead = lead
        self._index = index
        self._host = lead.hosts[index]
        self._held: kept.KeptLock | None = None
        """The place's shared lock."""
        self._why_not = ""
        self._has_said = not lead.out
        self._is_asked = self._is_drained = self._is_clean = False

    def make(self, env: Mapping[str, str], job: Job) -> str:
        """Makes the directory, if one is asked for, and fills it. Returns the place's path, for the daemon; empty where
        there is none."""
        if not self._lead.out:
            return ""
        try:
            local = localdir.choose(self._lead.local_dir, env, job)
            assert local is not None, "the node has its directory there"
            above = outputs_base(local, job.hostname)
            self.place, self._held = kept.make(above, self._lead.node_name(self._index))
            self._fill(self.place)
        except HpcstageError as error:
            self._why_not = error.what
        except CannotMirror as error:
            self.abandon()
            self._why_not = str(error)
        return "" if self.place is None else os.fspath(self.place.path)

    def _fill(self, place: kept.KeptPlace) -> None:
        lead = self._lead
        _require_same(lead, place)
        prepare(OutputPlace(place.output), Path(lead.out), lead.daemon.run_id, node=self._host)

    @property
    def is_pressing(self) -> bool:
        """Whether somebody waits for what `news` will say."""
        return not self._has_said or (self._is_asked and not self._is_drained)

    def news(self, hosted: Hosted, *, is_asked: bool) -> dict[str, str]:
        """Returns what is to be said since the last call, with a reason where something is not as it should be.
        `is_asked`: the command has ended."""
        said = {}
        if not self._has_said and (why := self._why_not or self._watched(hosted)) is not None:
            self._has_said = True
            said[WATCHED] = why
        if is_asked and not self._is_asked:
            self._is_asked = True
            if self.place is not None:
                hosted.ask_drained()
        if self._is_asked and not self._is_drained and (self.place is None or hosted.staged()):
            self._is_drained = True
            self._tell_result()
            said[DRAINED] = ""
        return said

    def _watched(self, hosted: Hosted) -> str | None:
        """Returns why the daemon does not watch; empty if it does, None if that is not known yet."""
        assert self.place is not None
        with suppress(OSError):
            return self.place.watched.read_text(errors="replace")
        return "its staging daemon ended early" if hosted.dead() else None

    def _tell_result(self) -> None:
        """Writes what the daemon left to the run directory; nothing where it left nothing."""
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
            leadspec.write_json(outputs_path(Path(self._lead.daemon.run_dir), self._host), data)

    def abandon(self) -> None:
        """Removes the directory, of which no command knows."""
        if self.place is not None:
            self.place.remove()
            self._let_go()
            self.place = None

    def end(self) -> None:
        """Claims what several nodes wrote, and removes the directory if all of it was drained; to be called when the
        daemon has ended."""
        if self._is_asked and not self._is_drained:
            self._tell_result()
        place, self.place = self.place, None
        if place is None:
            return
        with suppress(OSError, ValueError):
            names = json.loads((Path(self._lead.group_dir) / leadspec.CONFLICTS).read_text(errors="surrogateescape"))
            claims = [claim.to_json() for claim in claims_of(OutputPlace(place.output), names)]
            leadspec.write_json(
                claims_path(Path(self._lead.daemon.run_dir), self._host),
                {"run_id": self._lead.daemon.run_id, "claims": claims},
            )
        if self._is_clean and place.is_left(_LEFT_S):
            place.remove()
        self._let_go()

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.let_go()


def _require_same(lead: LeadSpec, place: kept.KeptPlace) -> None:
    """Raises CannotMirror where the command would find other directories here than on the first node."""
    expected = Path(lead.daemon.outputs)
    if place.path != expected.with_name(place.path.name):
        raise CannotMirror(f"its local directory is {place.path.parent.parent}, not {expected.parent.parent}")
    try:
        inode = os.stat(lead.out).st_ino
    except OSError as error:
        raise CannotMirror(f"{lead.out}: {error.strerror}") from None
    if inode != lead.out_inode:
        raise CannotMirror(f"{lead.out} is another directory there")
