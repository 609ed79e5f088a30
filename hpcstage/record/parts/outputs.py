"""Defines the part of the record that says what became of output files or checkpoints. Light to import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from hpcstage.jsonform import Count, Seconds

Fate = Literal["undrained", "unclosed", "beside", "skipped", "stayed", "gone"]


@dataclass(frozen=True)
class OutputName:
    """A name below the output directory that is not there as the command left it."""

    name: str
    fate: Fate
    """undrained: it is still in `local_dir`; unclosed: a program had not closed it, it was copied as it was; beside:
    somebody else, or another node, wrote it, `why` is the name that the command's got; skipped: a FIFO, socket or
    device; stayed: the command removed or renamed it, and `directory` still has it; gone: without a name, `local_dir`
    was removed, moved or unmounted while the command ran, and `directory` lost nothing."""
    why: str = ""
    host: str | None = None
    """The node that wrote it, in a run on several nodes."""


@dataclass(frozen=True, kw_only=True)
class OutputsPart:
    """The output files or the checkpoints of the command, and how far they came."""

    MOST_NAMES: ClassVar[int] = 100

    directory: str
    """The directory of --out or --checkpoint."""
    local_dir: str | None = None
    """The local directory that the command wrote to; null: it wrote to `directory` itself."""
    why: str = ""
    """Why the command wrote to `directory` itself."""
    files: Count = 0
    """The files that the run left in `directory`; 0 for checkpoints."""
    size_bytes: Count = 0
    """The bytes that were copied there."""
    took_s: Seconds | None = None
    """The seconds from the end of the command to that of the drain."""
    undrained: dict[str, Count] = field(default_factory=dict)
    """The number of names that are still in `local_dir`, by the node, whose name is empty in a run on one."""
    names: tuple[OutputName, ...] = ()
    """Up to 100 for each fate."""

    @property
    def undrained_count(self) -> int:
        """Returns the number of names that are not in `directory`."""
        return sum(self.undrained.values())

    @property
    def is_gone(self) -> bool:
        """Returns whether a local directory was removed, moved or unmounted while the command ran."""
        return bool(self.named("gone"))

    def named(self, fate: Fate) -> tuple[OutputName, ...]:
        """Returns the names with this fate."""
        return tuple(one for one in self.names if one.fate == fate)

    @classmethod
    def few(cls, names: Iterable[OutputName]) -> tuple[OutputName, ...]:
        """Returns the first names of each fate."""
        numbers, found = Counter[str](), []
        for one in names:
            numbers[one.fate] += 1
            if numbers[one.fate] <= cls.MOST_NAMES:
                found.append(one)
        return tuple(found)
