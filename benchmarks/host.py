"""What the host of a virtual machine took away: time in which a processor had work and was not let run (steal)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Ticks:
    """Of all processors since the start of the machine."""

    worked: int
    stolen: int


def ticks(stat: Path = STAT) -> Ticks | None:
    """Now; None where the kernel does not say."""
    try:
        words = stat.read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return None
    if len(words) < 9 or words[0] != "cpu":
        return None
    user, nice, system, _idle, _iowait, irq, softirq, stolen = (int(word) for word in words[1:9])
    return Ticks(user + nice + system + irq + softirq, stolen)


def stolen_share(before: Ticks | None, after: Ticks | None) -> float | None:
    """Of the processor time that was wanted in between, how much the host kept. None: not known, or nothing wanted."""
    if before is None or after is None:
        return None
    worked, stolen = after.worked - before.worked, after.stolen - before.stolen
    return stolen / (worked + stolen) if worked + stolen > 0 else None
