"""The names in a directory of the checkpointer."""

from __future__ import annotations

import os
from pathlib import Path

from hpcstage.checkpoint.generations.files import LOCK


def names(directory: Path) -> list[str]:
    """All but the file that is locked."""
    return sorted(name for name in os.listdir(directory) if name != LOCK)
