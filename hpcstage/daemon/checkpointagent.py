"""Keeps the command's checkpoints while it runs, as one of the daemon's drains.

Owns the file WATCHED of their place: the command starts when the newest state lies there. The room `checkpoint` does
the rest, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hpcstage.checkpoint.job.place import CheckpointPlace, DrainTerms
from hpcstage.checkpoint.process import CheckpointAgentProcess
from hpcstage.daemon.resources import Resources
from hpcstage.node.kept import KeptPlace
from hpcstage.stderr import log
from hpcstage.store.largecopy import Pacer
from hpcstage.writing import replace_text


class CheckpointDrain:
    """The checkpoint agent of a run."""

    def __init__(self, base: Resources, place: KeptPlace) -> None:
        """Raises OSError."""
        rate = base.spec.own_drain_rate_bytes_per_s
        terms = DrainTerms(None if rate is None else Pacer(rate), base.spec.drain_hurry_unix_s)
        self._place = place
        self._agent = CheckpointAgentProcess(CheckpointPlace(place.output), terms, Path(base.spec.node_dir))
        self._is_told = False

    @property
    def is_drained(self) -> bool:
        """See KeptDrain."""
        return self._agent.is_drained

    def descriptors(self) -> Mapping[int, Callable[[], object]]:
        """See KeptDrain."""
        return self._agent.descriptors()

    def work(self, now: float) -> None:
        """See KeptDrain. Tells the wrapper when the directory can be used, or why it cannot be."""
        agent = self._agent
        agent.work(now)
        if not self._is_told and (agent.is_ready or agent.is_drained):
            self._is_told = True
            why = "" if agent.is_ready else agent.why_not or "the process that keeps the checkpoints has died"
            if why:
                log(why)
            replace_text(self._place.watched, why)

    def wake_after(self, now: float) -> float | None:
        """See KeptDrain."""
        return self._agent.wake_after(now)

    def end(self, now: float, *, is_orderly: bool) -> None:
        """See KeptDrain."""
        self._agent.end(now, is_orderly=is_orderly)

    def result(self) -> dict[str, Any] | None:
        """See KeptDrain."""
        report = self._agent.report()
        return None if report is None else report.to_json()

    def close(self) -> None:
        """See KeptDrain."""
        self._agent.close()
