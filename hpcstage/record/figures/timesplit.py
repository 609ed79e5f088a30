"""Composes the section `time_split`, which divides the command's wall time. Pure.

For any counters, compute + wait for the source + wait for local + preprocessing + other = wall, and no part is
negative. A part that was not measured is None, and `other_s` contains its time. `hidden_s` overlaps the other parts.

With several nodes the parts are means over all training processes, so that they still add up to the wall time, which is
that of the whole command. A job goes on when its slowest process does, so `slowest` names the node whose program waited
longest. Nothing is summed over nodes: a second in which all wait is one second of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcstage.record.figures.digest import Digest, Window
from hpcstage.record.figures.waits import ENOUGH_SHARE, ProcessTimes, Split, fit, mean, say, splits_of
from hpcstage.record.parts.run import RunPart
from hpcstage.record.schema import Slowest, TimeSplit

NO_READS = "this layer does not measure reads: compute and waits cannot be told apart"


def time_split(run: RunPart, window: Window, nodes: Sequence[Digest]) -> TimeSplit:
    """Returns the section."""
    wall_s = window.wall_s
    if wall_s is None:
        return _section(None, Split(), ["when the command ended is not known"])
    unmeasured = [] if window.end_seen or not nodes else ["the end of the command was not seen: up to the last sample"]
    split = fit(_measure(nodes, wall_s, unmeasured), wall_s)
    return replace(
        _section(wall_s, split, unmeasured),
        hidden_s=_hidden_s(nodes, wall_s, split),
        before_s=run.child_started_s,
        slowest=_slowest(nodes),
    )


def _section(wall_s: float | None, split: Split, unmeasured: Sequence[str]) -> TimeSplit:
    return TimeSplit(
        wall_s=wall_s,
        **vars(split),
        other_s=None if wall_s is None else max(0.0, wall_s - split.measured_s),
        hidden_s=None,
        before_s=None,
        unmeasured=tuple(unmeasured),
    )


def _slowest(nodes: Sequence[Digest]) -> Slowest | None:
    """Names the node whose program waited longest; None with one node, or where no waits were measured."""
    known = [Slowest(host=node.name, waited_s=s) for node in nodes if (s := node.split.waited_s) is not None]
    return max(known, key=lambda node: node.waited_s, default=None) if len(nodes) > 1 else None


def _measure(nodes: Sequence[Digest], wall_s: float, unmeasured: list[str]) -> Split:
    found = [node.times for node in nodes]
    with_loader = [measured for measured in found if measured.shares is not None]
    used = with_loader or [measured for measured in found if measured.readers]
    unmeasured += dict.fromkeys(sentence for measured in used for sentence in measured.said)
    if not used:
        unmeasured.append(_why_nothing(found))
        return Split()
    known = [measured for measured in used if measured.reads_known]
    if len(known) < max(1.0, ENOUGH_SHARE * len(used)):
        say(unmeasured, NO_READS)
        return Split()
    splits = [split for measured in known for split in splits_of(measured, wall_s)]
    return mean(_whole(splits, 0 if with_loader else len(used) - len(splits), unmeasured))


def _whole(splits: Sequence[Split], lost: int, unmeasured: list[str]) -> Sequence[Split]:
    """Returns the splits with measured waits, if they are enough to stand for all; else all splits."""
    whole = [split for split in splits if split.wait_source_s is not None]
    left_out = len(splits) - len(whole) + max(0, lost)
    if not left_out or len(whole) < ENOUGH_SHARE * (len(whole) + left_out):
        return splits
    say(unmeasured, f"waits of {left_out} of {len(whole) + left_out} processes were not measured: left out of the mean")
    return whole


def _why_nothing(found: Sequence[ProcessTimes]) -> str:
    if not found:
        return "no node reported"
    if not any(measured.attached for measured in found):
        return "no process of the command attached"
    return "no attached process opened a file of the datasets"


def _hidden_s(nodes: Sequence[Digest], wall_s: float, split: Split) -> float | None:
    """Returns the seconds with copies in flight while the command ran and did not wait for the source; the mean over
    the nodes. None: something was copied, and the waits were not measured."""
    copying = [node.copying_s for node in nodes if node.copying_s is not None]
    if not any(copying):
        return 0.0 if copying else None
    if split.wait_source_s is None:
        return None
    return max(0.0, min(sum(copying) / len(copying), wall_s) - split.wait_source_s)
