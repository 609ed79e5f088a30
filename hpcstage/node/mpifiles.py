"""Removes the names of MPI's files in /dev/shm and /tmp as soon as all processes have them, so that a kill leaves none.

MPICH keeps the name of its shared memory until the orderly end, and its launcher keeps a description of the machine in
/tmp. A group that is killed would leave megabytes of memory behind each time; mapped memory works on without a name.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

from hpcstage import procio

PREFIX = "/dev/shm/mpich_"  # noqa: S108  only what this process has mapped

_DESCRIPTION = "hydra_hwloc_xmlfile_"
_TMP = Path("/tmp")  # noqa: S108  where MPICH's launcher puts it
_PROXY = "hydra_pmi_proxy"
_TICK_S = 0.05


def unlink_description() -> None:
    """Removes the file that the launcher of this process wrote for MPI's start, which has read it. Its name is not
    known: it is removed if it is the only one of this user since the launcher's start; where there are more, all
    stay."""
    if os.environ.get("MPI_LOCALRANKID") != "0":
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        began = _began_unix_s(os.getppid())
        found = [path for path in _TMP.glob(f"{_DESCRIPTION}*") if _is_own_since(path, began)]
        if began is not None and len(found) == 1:
            found[0].unlink()


def _is_own_since(path: Path, began: float | None) -> bool:
    found = path.lstat()
    return began is not None and found.st_uid == os.geteuid() and found.st_mtime >= began - _TICK_S


def _began_unix_s(pid: int) -> float | None:
    """Returns the time at which MPICH's launcher began; None if the process is not the launcher."""
    name, _, fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")
    if not name.endswith(_PROXY):
        return None
    began_s = int(fields.split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)


def unlink_own() -> list[str]:
    """Removes the names of the segments that this process has mapped. Returns them."""
    found = mapped()
    unlink(found)
    return found


def unlink(names: Iterable[str]) -> None:
    """Removes these names; some may already be gone."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(name)


def of_tree(pid: int) -> set[str]:
    """Returns the names that a process and its descendants have mapped."""
    found: set[str] = set()
    for one in procio.descendants(pid):
        found.update(mapped(one))
    return found


def mapped(pid: int | str = "self") -> list[str]:
    """Returns the names of MPI's segments that a process has mapped and that still have one."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    names = {line[line.index(PREFIX) :] for line in lines if PREFIX in line}
    return sorted(name for name in names if " " not in name)
