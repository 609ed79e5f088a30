"""Defines the part of the record that says what became of the command's output files. Light to import."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from hpcstage.jsonform import Count, Seconds

Fate = Literal["undrained", "unclosed", "beside", "skipped", "stayed"]


@dataclass(frozen=True)
class OutputName:
    """A name below the output directory that is not there as the command left it."""

    name: str
    fate: Fate
    """undrained: it is still in `local_dir`; unclosed: a program had not closed it, it was copied as it was; beside:
    somebody else, or another node, wrote it, `why` is the name that the command's got; skipped: a FIFO, socket or
    device; stayed: the command removed or renamed it, and `directory` still has it."""
    why: str = ""
    host: str | None = None
    """The node that wrote it, in a run on several nodes."""


@dataclass(frozen=True, kw_only=True)
class NodeOutputs:
    """The output files of one node of a run on several."""

    host: str
    undrained_count: Count = 0


@dataclass(frozen=True, kw_only=True)
class OutputsPart:
    """The output files of the command, and how far they came."""

    MOST_NAMES: ClassVar[int] = 100

    directory: str
    """The directory of --out."""
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
    undrained_count: Count = 0
    names: tuple[OutputName, ...] = ()
    """Up to 100 for each fate."""
    is_gone: bool = False
    """Whether `local_dir` was removed, moved or unmounted while the command ran; `directory` lost nothing."""
    nodes: tuple[NodeOutputs, ...] | None = None
    """Where there are several nodes, what each did not drain; all other figures are of all of them."""

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
