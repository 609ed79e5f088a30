"""Asks the kernel about pressure, memory and the processes of the command. What is unknown is left out, never 0."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_PRESSURES = (("io", "some"), ("io", "full"), ("cpu", "some"), ("memory", "some"))


def pressure() -> dict[str, float]:
    """Returns the seconds since boot in which some or all tasks waited for a resource, by resource and kind."""
    found = {}
    for resource, kind in _PRESSURES:
        with contextlib.suppress(OSError, ValueError, StopIteration):
            text = Path(f"/proc/pressure/{resource}").read_text()
            line = next(line for line in text.splitlines() if line.startswith(kind))
            found[f"{resource}_{kind}_s"] = int(line.rpartition("total=")[2]) / 1e6
    return found


def memory_bytes() -> int | None:
    """Returns the bytes of the node's memory that programs may use, the page cache's part included; None if unknown."""
    with contextlib.suppress(OSError, ValueError, StopIteration, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(line.split()[1]) << 10
    return None


def descendants(pid: int) -> Iterator[int]:
    """Yields the pids of a process and of all below it. Processes come and go meanwhile."""
    waiting, seen = [pid], {os.getpid()}
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        yield current
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{current}/task"):
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{current}/task/{task}/children").read_text()
                    waiting.extend(map(int, text.split()))


def age_s(pid: int) -> float | None:
    """Returns the seconds for which a process has existed; None if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        ticks = int(text.rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return uptime_s - ticks / os.sysconf("SC_CLK_TCK")


def is_python(pid: int) -> bool:
    """Returns whether a process runs a Python interpreter."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith(("python", "pypy"))
    except OSError:
        return False


def command(pid: int) -> str:
    """Returns the command line of a process, shortened."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")[:200]


def lost_pythonpath(pid: int) -> str | None:
    """Returns the PYTHONPATH that a process was started with in place of ours; None if it has ours, or if it has not
    our HPCSTAGE_NODE_DIR either."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    values = dict(part.partition(b"=")[::2] for part in raw.split(b"\0"))
    path = values.get(b"PYTHONPATH", b"")
    node_dir = values.get(b"HPCSTAGE_NODE_DIR")
    if node_dir is None or node_dir + b"/shim" in path.split(b":"):
        return None
    return path.decode(errors="replace")


class Missed:
    """Finds and lists the Python processes of the command that never attached."""

    OLD_ENOUGH_S = 2.0
    MOST_LISTED = 20

    def __init__(self) -> None:
        self._found: dict[int, dict[str, object]] = {}

    def look(self, roots: set[int], attached: set[int]) -> None:
        """Looks at the processes below `roots` for ones that are old enough and not in `attached`."""
        for root in roots:
            for pid in descendants(root):
                if pid in self._found or pid in attached or not is_python(pid):
                    continue
                if (age_s(pid) or 0.0) >= self.OLD_ENOUGH_S:
                    self._found[pid] = _described(pid)
        for pid in attached & self._found.keys():
            self.attached(pid)

    def attached(self, pid: int) -> None:
        """A process did attach."""
        self._found.pop(pid, None)

    def listed(self) -> list[dict[str, object]]:
        """Returns the first of them for the record."""
        return [*self._found.values()][: self.MOST_LISTED]

    def __len__(self) -> int:
        return len(self._found)


def _described(pid: int) -> dict[str, object]:
    lost = lost_pythonpath(pid)
    return {"pid": pid, "command": command(pid)} | ({} if lost is None else {"pythonpath": lost})
