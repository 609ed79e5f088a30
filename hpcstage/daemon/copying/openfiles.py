"""Finds the files below some directories that processes have open or mapped, from /proc, whatever program opened
them."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import suppress

MOST_PROCESSES = 64
"""The most processes that one look takes in, in some ten milliseconds."""
_DELETED = b" (deleted)"


def in_turn(pids: Iterable[int], last: int) -> tuple[int, list[int]]:
    """Chooses the processes to look at next: those that still run and come after `last`, at most MOST_PROCESSES.

    Returns the last of them, and all of them.
    """
    running = sorted(set(pids).intersection(int(name) for name in os.listdir("/proc") if name.isdigit()))
    first = bisect_right(running, last)
    chosen = [*running[first:], *running[:first]][:MOST_PROCESSES]
    return (chosen[-1] if chosen else 0), chosen


def open_below(pids: Iterable[int], roots: Iterable[bytes]) -> set[bytes]:
    """Returns the paths of files below one of `roots` that one of these processes has open or mapped. It passes over
    processes that ended or belong to another user."""
    prefixes = tuple(root.rstrip(b"/") + b"/" for root in roots)
    found: set[bytes] = set()
    for pid in pids:
        for path in (*_descriptors(pid), *_mapped(pid)):
            if path.startswith(prefixes):
                found.add(path.removesuffix(_DELETED))
    return found


def are_mapped_below(pids: Iterable[int], roots: Iterable[bytes]) -> bool:
    """Returns whether one of these processes has a file below one of `roots` mapped."""
    prefixes = tuple(root.rstrip(b"/") + b"/" for root in roots)
    return any(path.startswith(prefixes) for pid in pids for path in _mapped(pid))


def _descriptors(pid: int) -> Iterator[bytes]:
    directory = b"/proc/%d/fd" % pid
    with suppress(OSError):
        for name in os.listdir(directory):
            with suppress(OSError):
                yield os.readlink(directory + b"/" + name)


def _mapped(pid: int) -> Iterator[bytes]:
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
        for line in file:
            at = line.find(b"/")
            if at >= 0:
                yield line[at:].rstrip(b"\n")
