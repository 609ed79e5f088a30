"""Reads from the kernel's counter what a process has read so far. Owns the format of the io files in /proc."""

from __future__ import annotations


def read_bytes(path: str) -> int | None:
    """Returns `rchar` of an io file in /proc; None where the kernel does not say."""
    try:
        with open(path, "rb") as file:
            first = file.readline()
    except OSError:
        return None
    name, _, value = first.partition(b":")
    return int(value) if name == b"rchar" else None
