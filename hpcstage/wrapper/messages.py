"""What the wrapper says: to stderr only, one line each, `hpcstage:` in front."""

from __future__ import annotations

import contextlib
import sys

_verbosity = 0


def set_verbosity(verbosity: int) -> None:
    """-1: errors only; 0: warnings and the short report; 1: what is decided, too."""
    global _verbosity
    _verbosity = verbosity


def info(text: str) -> None:
    """Something decided; with -v."""
    if _verbosity > 0:
        _write(text)


def warn(text: str) -> None:
    """Something that is off; not with -q."""
    if _verbosity >= 0:
        _write(text)


def result(lines: list[str]) -> None:
    """The short report at the end; not with -q."""
    if _verbosity >= 0:
        for line in lines:
            _write(line)


def _write(text: str) -> None:
    clean = text.replace("\n", "\\n")
    with contextlib.suppress(OSError, ValueError):  # a closed stderr must not change the exit code
        sys.stderr.write(f"hpcstage: {clean}\n")
        sys.stderr.flush()
