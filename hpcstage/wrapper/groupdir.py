"""Chooses where the nodes of a run find the script that brings them up: a place that only this user can change.

The module owns the choice and the check. Other nodes execute that script, so whoever could replace it, or a directory
above it, could run programs as this user. A directory is safe if it belongs to this user or to root and no one else may
write to it. Others may write to a sticky directory, since they cannot replace there what is not theirs. What lies below
a directory that no one else may enter is safe in any case.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from hpcstage.errors import NotStarted
from hpcstage.protocol.rundir import GROUP
from hpcstage.record.index import state_dir

_FALLBACK = "groups"


def choose(run_dir: Path, run_id: str, env: Mapping[str, str]) -> Path:
    """Returns a directory below the run directory, else below the user's state directory. Raises NotStarted if others
    can write to both."""
    first = Path(os.path.realpath(run_dir)) / GROUP
    why = exposed(first)
    if why is None:
        return first
    other = Path(os.path.realpath(state_dir(env))) / _FALLBACK / run_id
    with suppress(OSError):
        other.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if exposed(other) is None and os.access(other.parent, os.W_OK):
            return other
    raise NotStarted(
        f"the other nodes are left alone: they would execute a script in {run_dir}, but {why}",
        "use --run-dir to name a directory that only you can change, or let no one else write to that one (chmod go-w)",
    )


def exposed(path: Path) -> str | None:
    """Returns which directory from / to `path` others could change, and why; None if there is none. Stops at the first
    directory that does not exist."""
    for place in (*reversed(path.parents), path):
        try:
            found = os.lstat(place)
        except OSError:
            return None
        if found.st_uid not in _trusted():
            return f"{place} belongs to user {found.st_uid}"
        writers = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if writers & stat.S_IWGRP and _is_own_group(found.st_gid):
            writers &= ~stat.S_IWGRP
        if writers and not found.st_mode & stat.S_ISVTX:
            return f"{'everybody' if writers & stat.S_IWOTH else f'group {found.st_gid}'} may write to {place}"
        if not found.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            return None
    return None


def _trusted() -> tuple[int, ...]:
    """Returns the trusted users: this user, root and, in a container that has no name for the host's root, the id that
    stands for it."""
    own = (0, os.geteuid())
    with suppress(OSError, ValueError):
        mapped = sum(int(line.split()[2]) for line in Path("/proc/self/uid_map").read_text().splitlines())
        if mapped < 2**32 - 1:
            return (*own, int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return own


def _is_own_group(gid: int) -> bool:
    """Returns whether a group has this user alone: many systems make one for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
