"""What the host of a virtual machine took away: time in which a processor had work and was not let run (steal)."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Ticks:
    """Seconds of all processors since the start of the machine."""

    worked: float
    stolen: float


def ticks() -> Ticks:
    """Now. A kernel that does not account for it has nothing stolen."""
    now = psutil.cpu_times()
    names = ("user", "nice", "system", "irq", "softirq")
    return Ticks(sum(getattr(now, name, 0.0) for name in names), getattr(now, "steal", 0.0))


def stolen_share(before: Ticks, after: Ticks) -> float:
    """Of the processor time that was wanted in between, how much the host kept."""
    worked, stolen = after.worked - before.worked, after.stolen - before.stolen
    return stolen / (worked + stolen) if worked + stolen > 0 else 0.0
