"""Reads from /proc what a process has read so far, and the id of this boot."""

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


def boot_id() -> str:
    """Names this boot of this machine, as no other does; empty where the kernel does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""
