"""Names what lies in a run directory, which is on the shared file system.

What nodes tell each other, and act upon, is in the directory of their group, to which only the user can write.
"""

from __future__ import annotations

from pathlib import Path

RUNS = "hpcstage-runs"
"""Below the working directory: the run directories that nobody named."""
RECORD = "run.json"
PART = "run.part.json"
"""The wrapper's part of the record."""
NODES = "nodes"
"""The nodes' parts of the record, and the logs that are kept."""
GROUP = "group"
"""The files by which the nodes of a run tell each other how they do."""


def part_path(run_dir: Path, host: str) -> Path:
    """Returns the path of a node's part of the record."""
    return run_dir / NODES / f"{host}.json"


def log_path(run_dir: Path, host: str) -> Path:
    """Returns the path of the log of a node's daemon, if it was kept."""
    return run_dir / NODES / f"{host}.log"


def result_path(group_dir: Path, host: str, kind: str) -> Path:
    """Returns the path of what a node says of its output files, or of its checkpoints."""
    return group_dir / f"{host}.{kind}"
