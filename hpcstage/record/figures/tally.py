"""Sums counters over attached processes and nodes, and tells zero from unknown."""

from __future__ import annotations

from collections.abc import Iterable

from hpcstage.record.parts.part import UNCOUNTED_LAYER, ProcessPart

DIRECT_LAYER = "direct"
"""A process of this layer attached but counts nothing: its self-tests failed."""
UNSEEN_LAYERS = (DIRECT_LAYER, UNCOUNTED_LAYER)


def count(process: ProcessPart, name: str) -> int:
    """Returns a counter; the part leaves out those that are zero."""
    return process.counters.get(name, 0)


def total(processes: Iterable[ProcessPart], name: str) -> int:
    """Returns a counter summed over processes."""
    return sum(count(process, name) for process in processes)


def number(processes: Iterable[ProcessPart]) -> int:
    """Counts the processes that these rows stand for."""
    return sum(process.processes for process in processes)


def opens_of(process: ProcessPart) -> int:
    """Counts the successful opens for reading below a dataset."""
    return swapped_of(process) + count(process, "source_opens")


def swapped_of(process: ProcessPart) -> int:
    """Counts the opens that got the staged copy."""
    return count(process, "hit_opens") + count(process, "ready_opens")


def reads_known(process: ProcessPart) -> bool:
    """Returns whether this process's reads were measured."""
    return bool(count(process, "reads_measured")) and process.layer not in UNSEEN_LAYERS


def life_ns(process: ProcessPart) -> int:
    """Returns the nanoseconds from a process's attaching to its end; 0: unknown.

    Where the end was not seen, its last call on a dataset's file counts as the end.
    """
    if process.processes > 1:
        return count(process, "life_ns")
    begin_ns = count(process, "attach_ns")
    end_ns = count(process, "exit_ns") or count(process, "last_ns")
    return end_ns - begin_ns if end_ns > begin_ns > 0 else 0


def phase_ns(process: ProcessPart) -> int:
    """Returns the nanoseconds from a process's first call on a dataset's file to its last."""
    if process.processes > 1:
        return count(process, "phase_ns")
    return max(0, count(process, "last_ns") - count(process, "first_ns"))


def maps(process: ProcessPart) -> bool:
    """Returns whether the process mapped files of the datasets into memory, which it then reads without calls."""
    return bool(count(process, "source_maps") or count(process, "local_maps"))


def source_reads(processes: Iterable[ProcessPart], name: str) -> int | None:
    """Sums a counter of reads at the source; None if a process that opened files there did not measure its reads."""
    return _reads(processes, name, "source_maps", "source_opens")


def local_reads(processes: Iterable[ProcessPart], name: str) -> int | None:
    """Sums a counter of reads of staged copies; None if a process that opened some did not measure its reads."""
    return _reads(processes, name, "local_maps", "hit_opens", "ready_opens")


def _reads(processes: Iterable[ProcessPart], name: str, mapped: str, *opens: str) -> int | None:
    value = 0
    for process in processes:
        if process.layer in UNSEEN_LAYERS or count(process, mapped):
            return None
        if any(count(process, o) for o in opens) and not reads_known(process):
            return None
        value += count(process, name)
    return value


def add(*values: float | None) -> float | None:
    """Returns the sum; None if a part is None."""
    if any(value is None for value in values):
        return None
    return sum(value for value in values if value is not None)


def ratio(part: float | None, whole: float | None) -> float | None:
    """Returns part / whole; None if either is unknown or the whole is 0."""
    if part is None or not whole:
        return None
    return part / whole
