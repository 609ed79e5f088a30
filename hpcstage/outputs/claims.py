"""Decides which node's file gets a name that several nodes wrote, once all of them have drained.

While the command runs, the node whose file came first has the name, and the others' files lie beside it as NAME.HOST:
nobody replaces what another node wrote. At the end each node claims its files of such names, with the time of their
last change, and one process gives the name to the last. Owns the claims and the two steps of that in the target. A name
whose holder claims nothing, since its node was lost or it is not of the run, stays as it is.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, count
from typing import Any

from hpcstage.outputs.facts import EntryKind
from hpcstage.outputs.guard import has_inode
from hpcstage.outputs.journal import recall
from hpcstage.outputs.prepare import OutputPlace, time_there
from hpcstage.outputs.target import Target, status_of


@dataclass(frozen=True)
class Claim:
    """A node's file of a name that several nodes wrote."""

    name: str
    where: str
    """The name that it has in the target."""
    inode: int
    """The inode that it has there."""
    changed_ns: int
    """The last change of the local file, by the clock of the target's file system."""

    def to_json(self) -> dict[str, Any]:
        """Returns plain data."""
        return asdict(self)


def claims_of(place: OutputPlace, names: Collection[str]) -> list[Claim]:
    """Returns what a node that has drained claims of these names. Raises OSError."""
    recalled = recall(place.journal) if names else None
    if recalled is None:
        return []
    target = Target(recalled.charter)
    target.check()
    ahead_ns = _clock_ahead_ns(target.root)
    found = []
    for name in names:
        beside, entry = recalled.ledger.findings.beside.get(name), recalled.ledger.entries.get(name)
        there, here = status_of(target.path(beside or name)), status_of(f"{place.root}/{name}")
        is_copy = entry is not None and (entry.kind in {EntryKind.FILE, EntryKind.LINK} or entry.here is not None)
        is_ours = bool(beside) or (is_copy and there is not None and has_inode(entry, there))
        if is_ours and there is not None and here is not None:
            changed_ns = here.st_ctime_ns + ahead_ns
            if entry is not None and entry.kind is EntryKind.EARLIER:  # a link has taken the place of the file
                is_same = there.st_mtime_ns == entry.there.mtime_ns
                changed_ns = entry.ctime_ns + ahead_ns if is_same else there.st_ctime_ns
            found.append(Claim(name, beside or name, there.st_ino, changed_ns))
    return found


def _clock_ahead_ns(directory: str) -> int:
    """Returns how far the clock of the target's file system is ahead of this node's."""
    before = time.time_ns()
    there = time_there(directory)
    return there - (before + time.time_ns()) // 2


def settle(directory: str, claims: Mapping[str, Sequence[Claim]]) -> dict[str, dict[str, str]]:
    """Gives each name to the node whose claim is the last, by the claims of each host. Returns for each name where the
    files of the other nodes are, by host."""
    by_name: dict[str, dict[str, Claim]] = {}
    for host, several in claims.items():
        for claim in filter(_is_below, several):
            by_name.setdefault(claim.name, {})[host] = claim
    return {name: _settled(directory, name, by_host) for name, by_host in by_name.items()}


def _is_below(claim: Claim) -> bool:
    return not any({"", ".", ".."}.intersection(name.split("/")) for name in (claim.name, claim.where))


def _settled(directory: str, name: str, by_host: Mapping[str, Claim]) -> dict[str, str]:
    where = {host: claim.where for host, claim in by_host.items()}
    holder = next((host for host, place in where.items() if place == name), None)
    last = max(by_host, key=lambda host: (by_host[host].changed_ns, host))
    with suppress(OSError):
        if last != holder and _is(directory, by_host[last]):
            path = f"{directory}/{name}"
            if holder is not None and _is(directory, by_host[holder]):
                where[holder] = _kept_as(directory, name, holder)
                _replace(f"{directory}/{where[last]}", path)
                where[last] = name
            elif holder is None and status_of(path) is None:
                os.link(f"{directory}/{where[last]}", path, follow_symlinks=False)
                os.unlink(f"{directory}/{where[last]}")
                where[last] = name
    return {host: place for host, place in where.items() if place != name}


def _is(directory: str, claim: Claim) -> bool:
    found = status_of(f"{directory}/{claim.where}")
    return found is not None and found.st_ino == claim.inode


def _kept_as(directory: str, name: str, host: str) -> str:
    """Gives a file a name of its host, too, and returns it. Where there are no hard links, it loses the other one."""
    path = f"{directory}/{name}"
    for kept in _names_of(name, host):
        try:
            os.link(path, f"{directory}/{kept}", follow_symlinks=False)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}:
                raise
            if status_of(f"{directory}/{kept}") is not None:
                continue
            os.rename(path, f"{directory}/{kept}")
        return kept
    raise AssertionError


def _names_of(name: str, host: str) -> Iterator[str]:
    return chain([f"{name}.{host}"], (f"{name}.{host}.{number}" for number in count(1)))


def _replace(path: str, by_name: str) -> None:
    os.rename(path, by_name)
    fd = os.open(os.path.dirname(by_name), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with suppress(OSError):
            os.fsync(fd)
    finally:
        os.close(fd)
