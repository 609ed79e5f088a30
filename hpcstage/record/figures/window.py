"""Places times on the run's own axis: seconds since the wrapper started. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from hpcstage.record.parts.part import NodePart, RunPart, Sample

if TYPE_CHECKING:
    from hpcstage.record.figures.digest import Digest


@dataclass(frozen=True)
class Window:
    """When the command ran, in seconds on the run's axis."""

    start_s: float
    end_s: float | None
    end_seen: bool
    """False: the end is the last time that any node noted, as in a killed job."""

    @property
    def wall_s(self) -> float | None:
        """Returns the seconds for which the command ran, or was seen running."""
        return None if self.end_s is None else max(0.0, self.end_s - self.start_s)


def command_of(run: RunPart) -> Window:
    """Returns when the command ran, as far as the wrapper saw it."""
    return Window(run.child_started_s or 0.0, run.child_ended_s, run.child_ended_s is not None)


def window_of(run: RunPart, nodes: Sequence[Digest]) -> Window:
    """Returns when the command ran; where its end was not seen, up to the last time that any node noted."""
    window = command_of(run)
    if window.end_seen:
        return window
    return Window(window.start_s, max((node.shift_s + node.last_s for node in nodes), default=None), end_seen=False)


def last_of(node: NodePart) -> float:
    """Returns the last time that a node noted, on its own axis."""
    return max(node.ended_s or 0.0, *(sample.start_s + sample.length_s for sample in node.samples[-1:]), 0.0)


def copying_s(node: NodePart, window: Window, shift_s: float) -> float | None:
    """Returns the seconds with copies in flight while the command ran; None without samples.

    A sample says how many copies were in flight on average, not when: the node's own sum of times with any in flight,
    and the moment of the last file, correct what short bursts would add.
    """
    if not node.samples:
        return None
    staged_s = inf if node.staged_s is None else node.staged_s
    first_s, last_s = window.start_s - shift_s, inf if window.end_s is None else window.end_s - shift_s
    inside_s = total_s = 0.0
    for sample in node.samples:
        start_s = sample.start_s
        end_s = min(start_s + sample.length_s, staged_s)
        if sample.busy > 0 and end_s > start_s:
            share = min(1.0, sample.busy)
            total_s += (end_s - start_s) * share
            inside_s += max(0.0, min(end_s, last_s) - max(start_s, first_s)) * share
    busy_s = node.totals.get("copy_busy_s")
    return inside_s if busy_s is None or total_s <= busy_s else inside_s * max(0.0, busy_s) / total_s


def timeline(node: NodePart, shift_s: float) -> list[tuple[float, Sample]]:
    """Returns a node's samples with their start on the run's time axis, in order."""
    return sorted(((shift_s + sample.start_s, sample) for sample in node.samples), key=lambda pair: pair[0])
