"""Owns the directory of one node for output files or checkpoints: fills it, tells whether it is watched and what became
of it, removes it.

The wrapper has those of the first node; those of another node are with its agent.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hpcstage import extras
from hpcstage.extras import Extra
from hpcstage.job.schedulers import domain_of
from hpcstage.node import kept
from hpcstage.node.kept import KeptKind, KeptLock, KeptPlace

Earlier = list[tuple[KeptPlace, KeptLock]]
"""The checkpoints that earlier runs left on this node for the same DIR, with their exclusive locks."""


class CannotFill(Exception):
    """The directory cannot be filled; the message says why. The program writes to DIR itself."""


@dataclass(frozen=True)
class NodeResult:
    """What became of the files of one node."""

    report: Mapping[str, Any]
    """The report of the upload, or of the checkpoint agent, as plain data."""
    strangers: Sequence[str] = ()
    """What lies beside a directory that has gone: it was moved there."""
    is_written_to: bool = False
    """Whether a program still has a file of it open for writing."""
    is_late: bool = False
    """Whether the daemon did not say what became of all of them, but somebody else."""

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left in it that is not in DIR."""
        return not (self.report["undrained"] or self.strangers or self.is_written_to)

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)


class KeptDirectory:
    """The directory of one node, which nobody has filled yet, and its place's shared lock."""

    def __init__(self, above: Path, kind: KeptKind, run_id: str, names: Sequence[str], node: str = "") -> None:
        """Makes it under the first of the names that is free. `node` is what a virtual node's names end in. Raises
        LocalDiskProblem."""
        self._node = node
        self._held: KeptLock | None
        self.place, self._held = kept.make(above, [f"{name}{node}{kind.suffix}" for name in names], f"{run_id}{node}")

    def fill(self, told: Mapping[str, Any], node: str, earlier: Sequence[str] = ()) -> None:
        """Fills it by what all nodes of the run are told. `node` is this one's name; empty: there is no other. The
        newest checkpoints are put there later, of those in `earlier`, too. Raises CannotFill."""
        try:
            if os.stat(told["target"]).st_ino != told["target_inode"]:
                raise CannotFill(f"{told['target']} is another directory there")
            if self.place.kind is kept.CHECKPOINTS:
                self._fill_checkpoints(told, node, earlier)
            else:
                self._fill_outputs(told, node)
        except OSError as error:
            raise CannotFill(f"{error.filename}: {error.strerror}") from None

    def _fill_outputs(self, told: Mapping[str, Any], node: str) -> None:
        from hpcstage.upload.facts import Place
        from hpcstage.upload.start import CannotShow, start

        try:
            start(Place(self.place.output), told["target"], told["run_id"], node).close()
        except CannotShow as error:
            raise CannotFill(str(error)) from None

    def _fill_checkpoints(self, told: Mapping[str, Any], node: str, earlier: Sequence[str]) -> None:
        from hpcstage.checkpoint.job.place import ALONE, CheckpointPlace, charter_of

        if (missing := extras.missing(Extra.CHECKPOINT, *extras.OF_CHECKPOINTS)) is not None:
            raise CannotFill(missing.line())
        local = CheckpointPlace(self.place.output)
        local.base.mkdir(0o700)
        local.tree.mkdir(0o700)
        charter_of(told, node or ALONE, earlier, domain_of(os.environ), os.fspath(local.tree)).save(local)

    def of_node(self, node: str) -> KeptPlace:
        """Returns the place of another node, by what its names end in."""
        end = self.place.kind.suffix
        name = self.place.path.name.removesuffix(end).removesuffix(self._node)
        return KeptPlace(self.place.path.with_name(f"{name}{node}{end}"))

    def watched_why(self) -> str | None:
        """Returns why the daemon does not watch it; empty if it does, None if that is not known yet."""
        with suppress(OSError):
            return self.place.watched.read_text(errors="replace")
        return None

    def report(self) -> dict[str, Any] | None:
        """Returns what the daemon left; None if it left nothing."""
        with suppress(OSError, ValueError):
            found = json.loads(self.place.drained.read_bytes())
            return found if isinstance(found, dict) else None
        return None

    def result(self, report: Mapping[str, Any]) -> NodeResult:
        """Returns what became of the files, by a report."""
        strangers = self.place.strangers() if report.get("is_gone") else []
        return NodeResult(report, strangers, self.place.is_written_to())

    def exchange_lock(self) -> KeptLock | None:
        """Lets go of the shared lock, and takes the exclusive one, which `let_go` lets go, too; None if somebody else
        works on the files."""
        self.let_go()
        self._held = self.place.take()
        return self._held

    def let_go(self) -> None:
        """Lets go of the lock."""
        if self._held is not None:
            self._held.let_go()
            self._held = None

    def remove(self) -> None:
        """Removes it with all that is in it, and lets go of the lock."""
        self.place.remove()
        self.let_go()


def target_of(place: KeptPlace) -> str | None:
    """Returns the directory on the shared file system to which a place's checkpoints belong; None for others."""
    if place.kind is not kept.CHECKPOINTS:
        return None
    from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace

    with suppress(OSError, ValueError):
        return CheckpointCharter.load(CheckpointPlace(place.output)).target
    return None


def take_earlier(above: Path, target: str) -> Earlier:
    """Takes the checkpoints that runs which are over left for a directory, before anybody drains them, and sets them
    aside."""
    found = []
    for place in kept.places(above):
        if target_of(place) != target:
            continue
        lock = place.take()
        if lock is not None and not place.is_used() and place.may_hold_files:
            found.append((place.set_aside(), lock))
        elif lock is not None:
            lock.let_go()
    return found
