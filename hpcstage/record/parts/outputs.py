"""Defines the part of the record that says what became of the command's output files. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpcstage.record.jsonform import Count, Seconds


@dataclass(frozen=True)
class OutputName:
    """An output file, by its path below the output directory, and what there is to say of it."""

    name: str
    why: str
    host: str | None = None
    """The node that wrote it, in a run on several nodes."""


@dataclass(frozen=True, kw_only=True)
class NodeOutputs:
    """The output files of one node of a run on several."""

    host: str
    files: Count = 0
    size_bytes: Count = 0
    undrained_count: Count = 0


@dataclass(frozen=True, kw_only=True)
class OutputsPart:
    """The output files of the command, and how far they came. Lists have up to 100 names."""

    MOST_NAMES: ClassVar[int] = 100

    directory: str
    """The directory of --out."""
    local_dir: str | None = None
    """The local directory that the command wrote to; null: it wrote to `directory` itself."""
    why: str = ""
    """Why the command wrote to `directory` itself."""
    files: Count = 0
    """Copies of files and of what was appended to them."""
    size_bytes: Count = 0
    took_s: Seconds | None = None
    """The seconds from the end of the command to that of the drain."""
    undrained_count: Count = 0
    undrained: tuple[OutputName, ...] = ()
    """Names that are not in `directory` as the command left them; they are still in `local_dir`."""
    unclosed: tuple[str, ...] = ()
    """Files that a program had not closed: they were copied as they were."""
    beside: tuple[OutputName, ...] = ()
    """Files that somebody else, or another node, wrote to `directory`; `why` is the name that the command's got."""
    skipped: tuple[OutputName, ...] = ()
    """Entries of a kind that is not copied: FIFOs, sockets, devices."""
    stayed: tuple[OutputName, ...] = ()
    """Names that the command removed or renamed and that `directory` still has."""
    is_gone: bool = False
    """Whether `local_dir` was removed, moved or unmounted while the command ran; `directory` lost nothing."""
    nodes: tuple[NodeOutputs, ...] | None = None
    """The files of each node, where there are several; all other figures are of all of them."""
