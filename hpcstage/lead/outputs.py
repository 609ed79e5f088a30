"""Owns the output directory of a node whose wrapper is elsewhere: from its making to its removal.

It has the same path as the first node's, is filled from the same directory on the shared file system, and is drained by
the node's daemon. An agent has the one of its node, the lead those of virtual nodes. What becomes of the files is told
in the group's directory, where the wrapper reads it; nothing is deleted that is not drained.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.errors import HpcstageError
from hpcstage.node import kept
from hpcstage.outputs.claims import claims_of
from hpcstage.outputs.prepare import CannotMirror, OutputPlace, prepare
from hpcstage.protocol import leadspec
from hpcstage.protocol.rundir import claims_path, outputs_path

if TYPE_CHECKING:
    from hpcstage.node.hosted import Hosted
    from hpcstage.protocol.leadspec import LeadSpec

_LEFT_S = 1.0
"""The longest wait for the end of programs that the command left behind."""


class HostedOutputs:
    """The output directory of one node. It has a place once it is made."""

    word = "watched"
    """With it a node says that the directory is watched, or why not."""
    spec_key = "outputs"
    suffix = ""

    def __init__(self, lead: LeadSpec, index: int) -> None:
        self.place: kept.KeptPlace | None = None
        self.lead = lead
        self.index = index
        self.host = lead.hosts[index]
        self._held: kept.KeptLock | None = None
        """The place's shared lock."""
        self._why_not = ""
        self._is_told = self._is_clean = False

    def take_earlier(self, above: Path) -> None:
        """Takes what earlier runs left here and this run goes on from."""

    def make(self, above: Path) -> str:
        """Makes the directory and fills it. Returns the place's path, for the daemon; empty where there is none."""
        try:
            self.place, self._held = kept.make(above, f"{self.lead.node_name(self.index)}{self.suffix}")
            self.fill(self.place)
        except HpcstageError as error:
            self._why_not = error.what
        except (CannotMirror, OSError) as error:
            self.abandon()
            self._why_not = str(error)
        return "" if self.place is None else os.fspath(self.place.path)

    def fill(self, place: kept.KeptPlace) -> None:
        """Makes the directory ready. Raises CannotMirror, OSError and HpcstageError."""
        lead = self.lead
        require_same(lead.daemon.outputs, lead.out, lead.out_inode, place)
        prepare(OutputPlace(place.output), Path(lead.out), lead.daemon.run_id, node=self.host)

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
                "run_id": self.lead.daemon.run_id,
                "report": report,
                "strangers": strangers,
                "is_written_to": is_written_to,
            }
            leadspec.write_json(self.result_path(Path(self.lead.group_dir)), data)

    def result_path(self, group_dir: Path) -> Path:
        """Returns where the result is told."""
        return outputs_path(group_dir, self.host)

    def abandon(self) -> None:
        """Removes the directory, of which no command knows."""
        if self.place is not None:
            self.place.remove()
            self.let_go()
            self.place = None

    def end(self, *, is_asked: bool) -> None:
        """Says what several nodes have to settle, and removes the directory if all of it was drained; to be called when
        the daemon has ended."""
        if is_asked and not self._is_told:
            self.tell_result()
        place, self.place = self.place, None
        if place is None:
            return
        self.claim(place)
        if (self._is_clean or not place.may_hold_files) and place.is_left(_LEFT_S):
            place.remove()
        self.let_go()

    def claim(self, place: kept.KeptPlace) -> None:
        """Claims what several nodes wrote."""
        with suppress(OSError, ValueError):
            names = json.loads((Path(self.lead.group_dir) / leadspec.CONFLICTS).read_text(errors="surrogateescape"))
            claims = [claim.to_json() for claim in claims_of(OutputPlace(place.output), names)]
            leadspec.write_json(
                claims_path(Path(self.lead.group_dir), self.host),
                {"run_id": self.lead.daemon.run_id, "claims": claims},
            )

    def let_go(self) -> None:
        """Lets go of the place's lock."""
        if self._held is not None:
            self._held.let_go()
            self._held = None


def require_same(expected_path: str, target: str, target_inode: int, place: kept.KeptPlace) -> None:
    """Raises CannotMirror where the command would find other directories here than on the first node."""
    expected = Path(expected_path)
    if place.path != expected.with_name(place.path.name):
        raise CannotMirror(f"its local directory is {place.path.parent.parent}, not {expected.parent.parent}")
    try:
        inode = os.stat(target).st_ino
    except OSError as error:
        raise CannotMirror(f"{target}: {error.strerror}") from None
    if inode != target_inode:
        raise CannotMirror(f"{target} is another directory there")
