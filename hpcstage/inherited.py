"""Handles how this process was started: its standard streams and its working directory may be missing, PYTHONPATH is
the command's, and the umask may be of no use.

The module owns what takes their place in this process. A command that this process starts gets them as they were.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

STREAMS = (0, 1, 2)


def hold_streams() -> None:
    """Keeps the numbers of closed standard streams from being given to files of hpcstage. The placeholders are closed
    in every program that this process starts, so that the program finds the streams closed as well."""
    for number in STREAMS:
        try:
            os.fstat(number)
        except OSError:
            try:
                os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)  # takes the lowest number that is free, which is this one
            except OSError:
                return
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for as long as we live


def own_packages_first() -> None:
    """Moves the directories of PYTHONPATH behind those of this Python: they are meant for the command, and may hold
    other versions of what hpcstage imports, or modules with such names. The one that holds hpcstage stays in front."""
    with contextlib.suppress(OSError):  # the working directory is gone: nothing in it can be imported
        given = {os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
        given.discard(os.fspath(Path(__file__).resolve().parent.parent))
        sys.path.sort(key=lambda entry: os.path.abspath(entry) in given)


def umask() -> int:
    """Returns the umask, which the command gets, too."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def hides_own_files() -> bool:
    """Returns whether this user cannot use the directories that this process makes, because of the umask."""
    return bool(umask() & 0o700) and os.geteuid() != 0


def directory() -> Path:
    """Returns the working directory. If it was deleted, returns the kernel's name for it, which is no directory's
    name."""
    try:
        return Path.cwd()
    except OSError:
        pass
    try:
        return Path(os.readlink("/proc/self/cwd"))
    except OSError:
        return Path("/proc/self/cwd")
