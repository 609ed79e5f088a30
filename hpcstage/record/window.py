"""When things happened, on the run's own time axis: seconds since the wrapper started. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcstage.record.part import NodePart, RunPart, Sample


@dataclass(frozen=True)
class Window:
    """The life of the command."""

    start_s: float
    end_s: float | None
    end_seen: bool
    """False: the end is that of the last thing anybody noted (a killed job)."""

    @property
    def wall_s(self) -> float | None:
        """How long the command ran, or was seen running."""
        return None if self.end_s is None else max(0.0, self.end_s - self.start_s)

    def overlap_s(self, start_s: float, length_s: float) -> float:
        """How much of an interval lies inside."""
        end_s = start_s + length_s
        if self.end_s is not None:
            end_s = min(end_s, self.end_s)
        return max(0.0, end_s - max(start_s, self.start_s))


def shift_of(run: RunPart, node: NodePart) -> float:
    """What to add to a node's times."""
    return node.started_unix_s - run.started_unix_s


def window_of(run: RunPart, nodes: Sequence[NodePart]) -> Window:
    """When the command ran."""
    start_s = run.child_started_s or 0.0
    if run.child_ended_s is not None:
        return Window(start_s, run.child_ended_s, end_seen=True)
    last = [_last_s(run, node) for node in nodes]
    return Window(start_s, max(last) if last else None, end_seen=False)


def _last_s(run: RunPart, node: NodePart) -> float:
    ends = [node.ended_s or 0.0, *(sample.start_s + sample.length_s for sample in node.samples[-1:])]
    return shift_of(run, node) + max(ends)


def timeline(run: RunPart, nodes: Sequence[NodePart]) -> list[tuple[float, Sample]]:
    """All samples with their start on the run's time axis, in order."""
    found = [(shift_of(run, node) + sample.start_s, sample) for node in nodes for sample in node.samples]
    return sorted(found, key=lambda pair: pair[0])
