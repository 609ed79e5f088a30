"""Writes what comes from other nodes and publishes it as copiers do. Works in the writing thread; receives nothing.

A file gets its final name when as many bytes have come as its rows say it has, and never before; something that has
the name already is never replaced. Ids and names come from this node's manifest, never from a bundle.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpcstage.daemon import copyfile
from hpcstage.daemon.copyfile import CopyError, Job, Status
from hpcstage.group.catalog import Catalog
from hpcstage.group.frames import Row
from hpcstage.group.link import Why

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


@dataclass
class Stored:
    """What became of a file: published (`why` NONE), or not."""

    id: int
    why: Why
    size_bytes: int = 0
    mtime_ns: int = 0
    begun_ns: int = 0
    """When its first bytes were written."""
    write_ns: int = 0


@dataclass
class _Part:
    fd: int
    job: Job
    size_bytes: int
    begun_ns: int
    received: int = 0
    write_ns: int = 0


class Incoming:
    """The files that have come in part, and what is done with rows."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}

    def store(self, view: memoryview, rows: Sequence[Row], catalog: Catalog) -> list[Stored]:
        """Writes the rows of a bundle. Returns the files that ended."""
        return [stored for row in rows if (stored := self._row(view, row, catalog)) is not None]

    def drop(self, ids: Sequence[int]) -> None:
        """Nothing more comes of these."""
        for id_ in ids:
            part = self._parts.pop(id_, None)
            if part is not None:
                _abandon(part)

    def _row(self, view: memoryview, row: Row, catalog: Catalog) -> Stored | None:
        began_ns = time.monotonic_ns()
        try:
            part = self._part(row, catalog, began_ns)
            _write(part.fd, view[row.at : row.at + row.length], row.start)
            part.received += row.length
            if part.received < row.size_bytes:
                part.write_ns += time.monotonic_ns() - began_ns
                return None
            del self._parts[row.id]
            _publish(part, row)
        except CopyError as error:
            self.drop([row.id])
            return Stored(row.id, _why(error))
        part.write_ns += time.monotonic_ns() - began_ns
        return Stored(row.id, Why.NONE, row.size_bytes, row.mtime_ns, part.begun_ns, part.write_ns)

    def _part(self, row: Row, catalog: Catalog, began_ns: int) -> _Part:
        """The file that a row continues or begins."""
        part = self._parts.get(row.id)
        if part is not None and row.start == part.received and row.size_bytes == part.size_bytes:
            return part
        self.drop([row.id])
        if row.start:
            raise CopyError(Status.CHANGED)
        job = catalog.job(row.id)
        part = self._parts[row.id] = _Part(copyfile.create(job.temporary), job, row.size_bytes, began_ns)
        return part


def _write(fd: int, data: memoryview, position: int) -> None:
    with copyfile.local_errors():
        while data:
            count = os.pwrite(fd, data, position)
            data, position = data[count:], position + count


def _publish(part: _Part, row: Row) -> None:
    try:
        with copyfile.local_errors():
            try:
                os.fchmod(part.fd, row.mode & copyfile.PERMISSIONS)
                os.utime(part.fd, ns=(row.mtime_ns, row.mtime_ns))
                if os.fstat(part.fd).st_size != row.size_bytes:
                    raise CopyError(Status.CHANGED)
            finally:
                os.close(part.fd)
        copyfile.publish(part.job)
    except CopyError:
        copyfile.discard(part.job.temporary)
        raise


def _abandon(part: _Part) -> None:
    os.close(part.fd)
    copyfile.discard(part.job.temporary)


def _why(error: CopyError) -> Why:
    if error.status is Status.EXISTS:
        return Why.EXISTS
    if error.status is Status.CHANGED:
        return Why.LOST
    return Why.FULL if error.errno in _NO_ROOM else Why.LOCAL_ERROR
