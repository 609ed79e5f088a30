"""Keeps the command's checkpoints while it runs, as one of the daemon's drains.

Owns the file WATCHED of their place: the command starts when the newest state lies there. The room `checkpoint` does
the rest, in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcstage.checkpoint.job.place import CheckpointPlace, DrainTerms
from hpcstage.checkpoint.process import CheckpointAgentProcess
from hpcstage.daemon.resources import Resources
from hpcstage.node.kept import KeptPlace
from hpcstage.stderr import log
from hpcstage.store.largecopy import Pacer
from hpcstage.writing import replace_text


class CheckpointDrain(CheckpointAgentProcess):
    """The checkpoint agent of a run, as a KeptDrain."""

    def __init__(self, base: Resources, place: KeptPlace) -> None:
        """Raises OSError."""
        rate = base.spec.own_drain_rate_bytes_per_s
        terms = DrainTerms(None if rate is None else Pacer(rate), base.spec.drain_hurry_unix_s)
        super().__init__(CheckpointPlace(place.output), terms, Path(base.spec.node_dir))
        self._watched = place.watched
        self._is_told = False

    def work(self, now: float) -> None:
        """Takes in what the process said; tells the wrapper when the directory can be used, or why it cannot be."""
        super().work(now)
        if not self._is_told and (self.is_ready or self.is_drained):
            self._is_told = True
            why = "" if self.is_ready else self.why_not or "the process that keeps the checkpoints has died"
            if why:
                log(why)
            replace_text(self._watched, why)

    def result(self) -> dict[str, Any] | None:
        """Returns the report, as plain data."""
        report = self.report()
        return None if report is None else report.to_json()
