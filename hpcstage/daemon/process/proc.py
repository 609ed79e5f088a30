"""Asks the kernel about the processes of the command. What is unknown is left out, never 0."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from hpcstage.procio import descendants
from hpcstage.protocol import nodedir
from hpcstage.protocol.trainingspec import NODE_PROGRAM, PROGRAM

if TYPE_CHECKING:
    import psutil

    from hpcstage.record.parts.part import MissedProcess

MOST_COMMAND_CHARS = 200


def exists(pid: int) -> bool:
    """Tells whether a process has this pid, of whatever user."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def lost_pythonpath(process: psutil.Process) -> str | None:
    """Returns the PYTHONPATH that a process was started with in place of ours; None if it has ours, or if it has not
    our HPCSTAGE_NODE_DIR either."""
    values = process.environ()
    path, node_dir = values.get("PYTHONPATH", ""), values.get("HPCSTAGE_NODE_DIR")
    return None if node_dir is None or f"{node_dir}/{nodedir.SHIM}:" in f"{path}:" else path


class Unattached:
    """Finds the Python processes of the command that never attached."""

    OLD_ENOUGH_S = 2.0
    MOST_LISTED = 20

    def __init__(self) -> None:
        self._found: dict[int, MissedProcess] = {}

    def look(self, roots: set[int], attached: set[int]) -> None:
        """Looks at the processes below `roots` for ones that are old enough and not in `attached`."""
        import psutil  # five milliseconds that the daemon's start does not pay for

        for root in roots:
            for pid in descendants(root, os.getpid()):
                if pid not in self._found and pid not in attached:
                    with contextlib.suppress(psutil.Error, OSError):  # it may have ended, or changed its user
                        self._look_at(psutil.Process(pid))
        for pid in attached:
            self.attached(pid)

    def _look_at(self, process: psutil.Process) -> None:
        is_python = os.path.basename(process.exe()).startswith(("python", "pypy"))
        if is_python and time.time() - process.create_time() >= self.OLD_ENOUGH_S and not _is_ours(process):
            self._found[process.pid] = _described(process)

    def attached(self, pid: int) -> None:
        """Takes a process that has attached after all off the list."""
        self._found.pop(pid, None)

    def listed(self) -> list[MissedProcess]:
        """Returns the first of them for the record."""
        return [*self._found.values()][: self.MOST_LISTED]

    def __len__(self) -> int:
        return len(self._found)


def _is_ours(process: psutil.Process) -> bool:
    """Whether hpcstage has put this process between the wrapper and the command."""
    return not {PROGRAM, NODE_PROGRAM}.isdisjoint(process.cmdline()[:4])


def _described(process: psutil.Process) -> MissedProcess:
    from hpcstage.record.parts.part import MissedProcess

    command = " ".join(process.cmdline())[:MOST_COMMAND_CHARS]
    return MissedProcess(command=command, pythonpath=lost_pythonpath(process))
