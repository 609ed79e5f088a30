"""Prints what the wrapper says: to stderr only, one line each, with `hpcstage:` in front; never waits for whoever reads
it."""

from __future__ import annotations

from hpcstage import stderr

_verbosity = 0
_warned: set[str] = set()
"""What was warned of already, with what to do; or the beginning of it."""


def set_verbosity(verbosity: int) -> None:
    """Sets how much is printed. -1: errors only; 0: warnings and the short report; 1: decisions as well."""
    global _verbosity
    _verbosity = verbosity


def is_quiet() -> bool:
    """Returns whether only errors are printed."""
    return _verbosity < 0


def tells_decisions() -> bool:
    """Returns whether decisions are printed."""
    return _verbosity > 0


def info(text: str) -> None:
    """Prints a decision; only with -v."""
    if tells_decisions():
        _write(text)


def warn(text: str, *, says_too: str = "") -> None:
    """Prints a warning, once; not with -q. It makes the beginning of another superfluous, `says_too`."""
    if _verbosity >= 0 and text not in _warned:
        _warned.update(filter(None, (text, says_too)))
        _write(text)


def error(text: str) -> None:
    """Prints an error; with -q, too."""
    _write(text)


def result(lines: list[str]) -> None:
    """Prints the short report at the end, without what was warned of before; not with -q."""
    if _verbosity >= 0:
        for line in lines:
            if not line.partition(": ")[2].startswith(tuple(_warned)):
                _write(line)


def _write(text: str) -> None:
    stderr.say(text.replace("\n", "\\n"))
