"""MPI's files in /dev/shm: taken out of sight as soon as all processes have them, so that none is left by a kill.

MPICH keeps the name of its shared memory until the orderly end. A group that is killed would leave megabytes of memory
behind each time; what is mapped works on without a name.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

PREFIX = "/dev/shm/mpich_"  # noqa: S108  only what this process has mapped


def unlink_own() -> list[str]:
    """Removes the names of the segments that this process has mapped; gives them."""
    found = mapped()
    unlink(found)
    return found


def unlink(names: Iterable[str]) -> None:
    """Removes names that may have gone."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)


def of_tree(pid: int) -> set[str]:
    """Names that a process's descendants have mapped."""
    found: set[str] = set()
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        found.update(mapped(one))
        with contextlib.suppress(OSError, ValueError):
            waiting += [int(word) for word in Path(f"/proc/{one}/task/{one}/children").read_text().split()]
    return found


def mapped(pid: int | str = "self") -> list[str]:
    """Names of MPI's segments that a process has mapped and that still have one."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    names = {line[line.index(PREFIX) :] for line in lines if PREFIX in line}
    return sorted(name for name in names if " " not in name)
