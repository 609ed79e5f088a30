"""Sums over attached processes and nodes that know the difference between zero and unknown."""

from __future__ import annotations

from collections.abc import Iterable

from hpcstage.record.parts.part import ProcessPart

UNSEEN_LAYER = "direct"
"""A process of this layer attached but counts nothing: its self-tests failed."""


def count(process: ProcessPart, name: str) -> int:
    """A counter (zeros are left out in the part)."""
    return process.counters.get(name, 0)


def total(processes: Iterable[ProcessPart], name: str) -> int:
    """A counter summed over processes."""
    return sum(count(process, name) for process in processes)


def opens_of(process: ProcessPart) -> int:
    """Opens for reading below a dataset that succeeded."""
    return swapped_of(process) + count(process, "source_opens")


def swapped_of(process: ProcessPart) -> int:
    """Opens that got the staged copy."""
    return count(process, "hit_opens") + count(process, "ready_opens")


def reads_known(process: ProcessPart) -> bool:
    """Whether this process's reads were measured."""
    return bool(count(process, "reads_measured")) and process.layer != UNSEEN_LAYER


def life_ns(process: ProcessPart) -> int:
    """From its attaching to its end, or to its last call on a dataset's file where its end was not seen; 0: unknown."""
    begin_ns = count(process, "attach_ns")
    end_ns = count(process, "exit_ns") or count(process, "last_ns")
    return end_ns - begin_ns if end_ns > begin_ns > 0 else 0


def maps(process: ProcessPart) -> bool:
    """Whether it mapped files of the datasets into memory: what it read there, no call has told."""
    return bool(count(process, "source_maps") or count(process, "local_maps"))


def source_reads(processes: Iterable[ProcessPart], name: str) -> int | None:
    """A counter of reads at the source; None if a process that opened files there did not measure its reads."""
    return _reads(processes, name, "source_maps", "source_opens")


def local_reads(processes: Iterable[ProcessPart], name: str) -> int | None:
    """A counter of reads of staged copies; None if a process that opened some did not measure its reads."""
    return _reads(processes, name, "local_maps", "hit_opens", "ready_opens")


def _reads(processes: Iterable[ProcessPart], name: str, mapped: str, *opens: str) -> int | None:
    value = 0
    for process in processes:
        if process.layer == UNSEEN_LAYER or count(process, mapped):
            return None
        if any(count(process, o) for o in opens) and not reads_known(process):
            return None
        value += count(process, name)
    return value


def add(*values: float | None) -> float | None:
    """The sum, unknown if a part is."""
    if any(value is None for value in values):
        return None
    return sum(value for value in values if value is not None)


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole; None if either is unknown or the whole is nothing."""
    if part is None or not whole:
        return None
    return part / whole
