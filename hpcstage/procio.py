"""Reads from /proc what a process has read so far, which processes are below it, and the id of this boot."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


def read_bytes(path: str) -> int | None:
    """Returns `rchar` of an io file in /proc; None where the kernel does not say."""
    try:
        with open(path, "rb") as file:
            first = file.readline()
    except OSError:
        return None
    name, _, value = first.partition(b":")
    return int(value) if name == b"rchar" else None


def children(pid: int) -> list[int]:
    """Returns the pids of a process's children; none of one that is gone."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int, without: int | None = None) -> Iterator[int]:
    """Yields the pids of a process and of all below it, but not of one and what is below that. Processes come and go
    meanwhile. It reads the tree alone, where psutil reads the parents of all processes of the node."""
    waiting, seen = [pid], {without}
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen.add(current)
            yield current
            waiting += children(current)


def boot_id() -> str:
    """Names this boot of this machine, as no other does; empty where the kernel does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
