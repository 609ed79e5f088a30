"""Ends a process of hpcstage. Owns nothing else."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn


def end(code: int) -> NoReturn:
    """Ends this process at once: Python takes 20 ms to take itself apart, and its parent waits for that."""
    with contextlib.suppress(OSError, ValueError):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code & 0xFF)
    sys.exit(code)  # Python reports what could not be written
