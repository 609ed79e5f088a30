"""Defines the part of the record that says who trained in an elastic training, and why. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpcstage.jsonform import Count, Seconds


@dataclass(frozen=True, kw_only=True)
class MembershipRow:
    """A membership of the training."""

    at_s: float
    """When it was agreed on, from the start of the run."""
    kind: str
    """Why it was made: start, loss, join, or failure (of processes)."""
    hosts: tuple[str, ...]
    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()
    silent_s: Seconds = 0.0
    """The silence after which a host was taken for lost."""
    waited_s: Seconds = 0.0
    """The time from when the change was seen to when it was agreed on: more changes, and a policy that said wait."""
    state_s: Seconds | None = None
    """The time from then until all ranks had the state from which they go on; null where the program says none."""
    first_step_s: Seconds | None = None
    """The time from the agreement to the first committed step; null where the program says none."""


@dataclass(frozen=True, kw_only=True)
class ElasticPart:
    """The memberships of an elastic training, the last ones if there were many."""

    MOST_ROWS: ClassVar[int] = 200

    generations: Count = 0
    memberships: tuple[MembershipRow, ...] = ()
    end: str = ""
    """Why the training ended on all hosts; empty where they did not agree on an end."""
