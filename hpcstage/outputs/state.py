"""Holds what a drain has seen, knows and has under way: the values that events and results change."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hpcstage.outputs.facts import News, TargetEntry
from hpcstage.outputs.known import KnownTarget
from hpcstage.outputs.marks import Mark, Marks
from hpcstage.outputs.namequeue import AFTER_ALL, NameQueue


@dataclass
class DrainFindings:
    """The names that the end of a run tells of."""

    beside: dict[str, str] = field(default_factory=dict)
    """By name: the name in the target that the local entry got, since the target's was not the one last seen."""
    skipped: dict[str, str] = field(default_factory=dict)
    """By name: the kind of an entry that is not carried over."""
    kept: dict[str, str] = field(default_factory=dict)
    """By name: why the target still has an entry that was removed or renamed."""
    failed: dict[str, str] = field(default_factory=dict)
    """By name: why the entry is not in the target."""


class DrainState:
    """Owns what waits and what is under way, and the parts of the run: while the command runs, and its last part."""

    def __init__(self, entries: dict[str, TargetEntry], *, is_late: bool) -> None:
        self.known = KnownTarget(entries)
        self.marks = Marks()
        self.queue = NameQueue()
        self.flying: dict[str, Mark] = {}
        """The names that are being carried."""
        self.unclosed: set[str] = set()
        """Files that were written to and not closed since."""
        self.misplaced: Counter[str] = Counter()
        """By name: how often the local link there stood for what the target has elsewhere."""
        self.freeing: set[str] = set()
        """The names of files in whose place a link is being put."""
        self.unfreeable: dict[str, float] = {}
        """By name: the time until which a file stays, since a program had it open."""
        self.news: dict[str, News] = {}
        """By name: what another node said last, and was not done yet."""
        self.showing: set[str] = set()
        """The names that are being shown or hidden."""
        self.shown = 0
        """The number of names of other nodes that were shown."""
        self.findings = DrainFindings()
        self.is_late = is_late
        self.is_over = is_late
        """Whether the command has ended: what is removed from here on is removed by others."""
        self.is_ending = is_late
        """Whether all was looked at once more after the command's end."""

    def is_carried(self) -> bool:
        """Tells whether nothing waits and nothing is under way."""
        return not (self.marks.by_name or self.queue or self.flying or self.freeing)

    def is_anything_else_left(self) -> bool:
        """Tells whether something is under way, or waits and did not have to be put back."""
        return bool(self.queue or self.flying) or any(not mark.tries for mark in self.marks.by_name.values())

    def is_blocked(self, name: str) -> bool:
        """Tells whether a name waits: for its own last action, for a rename, or for its directory to be made."""
        parent = name.rpartition("/")[0]
        if parent and parent not in self.known.entries and (parent in self.flying or parent in self.marks.by_name):
            return True
        return name in self.flying or name in self.freeing or self.queue.is_held(name)

    def oldest(self) -> int:
        """Returns the number of the oldest mark that is under way or will soon be."""
        flying = [mark.seq for mark in self.flying.values() if not mark.is_open]
        waiting = self.marks.oldest_waiting()
        return min([*flying, AFTER_ALL if waiting is None else waiting])

    def forget(self) -> None:
        """Forgets all that waits: the watched directory has gone."""
        self.queue.clear()
        self.marks.by_name.clear()
