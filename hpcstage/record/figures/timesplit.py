"""Composes the section `time_split`, which divides the command's wall time. Pure.

For any counters, compute + wait for the source + wait for local + preprocessing + other = wall, and no part is
negative. A part that was not measured is None, and `other_s` contains its time. With several nodes the parts are means
over all training processes, so that they still add up to the wall time; `slowest` names the node whose program waited
longest, as a job goes on when its slowest process does.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcstage.record.figures.digest import Digest
from hpcstage.record.figures.waits import ENOUGH_SHARE, NodeTimes, Split, fit, mean
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import Slowest, TimeSplit


def wall_of(run: RunPart, nodes: Sequence[Digest]) -> float | None:
    """Returns how long the command ran; where its end was not seen, up to the last time that any node noted."""
    end_s = run.child_ended_s
    if end_s is None:
        end_s = max((node.shift_s + node.last_s for node in nodes), default=None)
    return None if end_s is None else max(0.0, end_s - (run.child_started_s or 0.0))


def time_split(run: RunPart, wall_s: float | None, nodes: Sequence[Digest]) -> TimeSplit:
    """Returns the section."""
    is_seen = run.child_ended_s is not None
    said = [] if is_seen else ["the end of the command was not seen: up to the last sample"]
    split = fit(_of_all([node.times for node in nodes], said), wall_s or 0.0)
    return TimeSplit(
        wall_s=wall_s,
        **vars(split),
        other_s=None if wall_s is None else max(0.0, wall_s - split.measured_s),
        hidden_s=_hidden_s(nodes, split),
        before_s=run.child_started_s,
        slowest=_slowest(nodes),
        loader_epochs=max((node.times.epochs for node in nodes if node.times.epochs is not None), default=None),
        loader_workers=max((node.times.workers for node in nodes if node.times.workers is not None), default=None),
        unmeasured=tuple(dict.fromkeys(said)),
    )


def _of_all(nodes: Sequence[NodeTimes], said: list[str]) -> Split:
    """Returns the mean over all nodes' training processes, or where there are none, over the nodes that read; without
    those whose waits were not measured, if the others are enough to stand for all."""
    used = [node for node in nodes if node.workers is not None] or [node for node in nodes if node.splits]
    said += [sentence for node in used for sentence in node.said]
    splits = [split for node in used for split in node.splits]
    known = [split for split in splits if split.wait_source_s is not None]
    if not splits:
        attached = any(node.attached for node in nodes)
        said.append(
            "no node reported" if not nodes
            else "no attached process opened a file of the datasets" if attached
            else "no process of the command attached"
        )  # fmt: skip
    elif len(splits) > len(known) >= ENOUGH_SHARE * len(splits):
        left_out = len(splits) - len(known)
        said.append(f"waits of {left_out} of {len(splits)} processes were not measured: left out of the mean")
        splits = known
    return mean(splits)


def _slowest(nodes: Sequence[Digest]) -> Slowest | None:
    """Names the node whose program waited longest; None with one node, or where no waits were measured."""
    known = [Slowest(host=node.name, waited_s=s) for node in nodes if (s := node.split.waited_s) is not None]
    return max(known, key=lambda node: node.waited_s, default=None) if len(nodes) > 1 else None


def _hidden_s(nodes: Sequence[Digest], split: Split) -> float | None:
    """Returns the seconds with copies in flight while the command ran and did not wait for the source; the mean over
    the nodes. None: something was copied, and the waits were not measured."""
    copying = [node.copying_s for node in nodes if node.copying_s is not None]
    if not any(copying):
        return 0.0 if copying else None
    return None if split.wait_source_s is None else max(0.0, sum(copying) / len(copying) - split.wait_source_s)
