"""Defines the wrapper's part of the record, written to the run directory as JSON. Light to import: the wrapper does so
before it starts the command.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcstage.problem import Problem
from hpcstage.record.parts.checkpoints import CheckpointsPart
from hpcstage.record.parts.elastic import ElasticPart
from hpcstage.record.parts.outputs import OutputsPart


@dataclass
class RunPart:
    """The wrapper's part of the record: what it knows of the run."""

    run_id: str
    command: list[str]
    host: str
    started_unix_s: float
    """When the wrapper started."""
    child_started_s: float | None = None
    child_ended_s: float | None = None
    ended_s: float | None = None
    exit_code: int | None = None
    signal: int | None = None
    mode_asked: str = "runtime"
    scheduler: str = "none"
    job_id: str | None = None
    nodes: list[str] = field(default_factory=list)
    local_dir: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    """The settings by name."""
    pid: int | None = None
    config_origin: dict[str, str] = field(default_factory=dict)
    """Where each of them came from."""
    child_pid: int | None = None
    roots: list[str] = field(default_factory=list)
    """Roots of the datasets, known before any node has reported."""
    problems: list[Problem] = field(default_factory=list)
    direct_why: str = ""
    """Why nothing is staged although another mode was asked for; empty: the mode that was asked for is followed."""
    aside: bool = False
    """Whether hpcstage could not stage and left the machine to the command, whose end it did not see."""
    pid_space: str = ""
    """The wrapper's PID namespace; `pid` (the wrapper's own) and `child_pid` are valid only within it."""
    drains: dict[str, OutputsPart] = field(default_factory=dict)
    """What became of the command's files, by the option: out or checkpoint."""
    checkpoints: CheckpointsPart | None = None
    """The command's checkpoints; None without --checkpoint."""
    elastic: ElasticPart | None = None
    """Who trained; None without --elastic."""
