"""Owns what this node receives: files that its daemon asked for, from the nodes that have them.

The module owns which file is awaited from which node. It drops what was not asked for, what comes from another node,
and what comes under another manifest.

The writing thread publishes it as copiers do: a file gets its final name when as many bytes have come as its rows say
it has, and never before; something that has the name already is never replaced. Ids and names come from this node's
manifest, never from a bundle.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hpcstage.exchange.files import batch
from hpcstage.exchange.lane import Lane
from hpcstage.exchange.transport.buffers import Buffer
from hpcstage.exchange.transport.frames import CONTROL_TAG, Bundle, BundleRow, ControlFrame, Sort
from hpcstage.exchange.transport.mpi import Mail, Post
from hpcstage.protocol.exchange import MAX_IDS, Got, Missed, Why
from hpcstage.store import copyfile
from hpcstage.store.catalog import Catalog
from hpcstage.store.copyfile import CopyError, CopyJob, Status

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT}


class Stored(NamedTuple):
    """Says what became of a file: published (`why` NONE), or not."""

    id: int
    why: Why
    size_bytes: int = 0
    mtime_ns: int = 0


@dataclass
class _Part:
    fd: int
    job: CopyJob
    size_bytes: int
    received: int = 0


class Incoming:
    """Holds the files that have come in part, and writes rows."""

    def __init__(self) -> None:
        self._parts: dict[int, _Part] = {}

    def store(self, buffer: Buffer, rows: Sequence[BundleRow], catalog: Catalog) -> list[Stored]:
        """Writes the rows of a bundle. Returns the files that ended."""
        can_write = batch.can_write()
        whole = [row for row in rows if can_write and row.length == row.size_bytes]
        if self._parts:
            self.drop([row.id for row in whole])
        gotten = [(row.at, row.length, row.mode, row.mtime_ns, *catalog.names(row.id)) for row in whole]
        written = batch.write_files(gotten, buffer) if gotten else []
        stored = [
            Stored(row.id, _why_of(error), row.size_bytes, row.mtime_ns)
            for row, error in zip(whole, written, strict=True)
        ]
        if len(whole) < len(rows):
            rest = (row for row in rows if not can_write or row.length < row.size_bytes)
            ended = (self._row(buffer.view, row, catalog) for row in rest)
            stored += [one for one in ended if one is not None]
        return stored

    def drop(self, ids: Sequence[int]) -> None:
        """Abandons these files, of which nothing more comes."""
        for id_ in ids:
            part = self._parts.pop(id_, None)
            if part is not None:
                _abandon(part)

    def _row(self, view: memoryview, row: BundleRow, catalog: Catalog) -> Stored | None:
        try:
            part = self._part(row, catalog)
            data = view[row.at : row.at + row.length]
            if any(data[:1]) or data.tobytes() != bytes(row.length):  # else it stays a hole
                copyfile.write_all(part.fd, data, row.start)
            part.received += row.length
            if part.received < row.size_bytes:
                return None
            del self._parts[row.id]
            _publish(part, row)
        except CopyError as error:
            self.drop([row.id])
            return Stored(row.id, _why(error))
        return Stored(row.id, Why.NONE, row.size_bytes, row.mtime_ns)

    def _part(self, row: BundleRow, catalog: Catalog) -> _Part:
        """Returns the file that a row continues or begins."""
        part = self._parts.get(row.id)
        if part is not None and row.start == part.received and row.size_bytes == part.size_bytes:
            return part
        self.drop([row.id])
        if row.start:
            raise CopyError(Status.CHANGED)
        job = catalog.job(row.id)
        part = self._parts[row.id] = _Part(copyfile.create(job.temporary), job, row.size_bytes)
        with copyfile.local_errors():
            os.ftruncate(part.fd, row.size_bytes)
        return part


def _publish(part: _Part, row: BundleRow) -> None:
    """Checks, stamps and names a file of which all has come, and closes it. Raises CopyError."""
    try:
        with copyfile.local_errors():
            try:
                if os.fstat(part.fd).st_size != row.size_bytes:
                    raise CopyError(Status.CHANGED)
                os.fchmod(part.fd, row.mode & copyfile.PERMISSIONS)
                os.utime(part.fd, ns=(row.mtime_ns, row.mtime_ns))
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
    return Why.LOST if error.status is Status.CHANGED else _why_of(error.errno or errno.EIO)


def _why_of(number: int) -> Why:
    """Returns the reason that stands for an error of the local disk."""
    if not number:
        return Why.NONE
    if number == errno.EEXIST:
        return Why.EXISTS
    return Why.FULL if number in _NO_ROOM else Why.LOCAL_ERROR


class Receiver:
    """Receives files. Sources are positions in the group; what is told to the daemon names nodes, by
    `nodes[position]`."""

    def __init__(self, post: Post, lane: Lane, nodes: Sequence[int]) -> None:
        self._post = post
        self._lane = lane
        self._nodes = nodes
        self._incoming = Incoming()
        self._awaited: dict[int, int] = {}
        """By id: the source that was asked."""
        self.got: list[Got] = []
        """Files that have come, to be told to the daemon."""
        self.missed: list[Missed] = []
        """Files that do not come, to be told to the daemon."""

    def fetch(self, source: int, ids: Sequence[int], catalog: Catalog) -> None:
        """Asks a node for files. A file that is awaited already is not asked for again."""
        fresh = [id_ for id_ in dict.fromkeys(ids) if id_ not in self._awaited]
        unknown = tuple(id_ for id_ in fresh if id_ not in catalog)
        if unknown:
            self.missed.append(Missed(self._nodes[source], Why.UNKNOWN, unknown))
            fresh = [id_ for id_ in fresh if id_ in catalog]
        self._awaited.update(dict.fromkeys(fresh, source))
        for start in range(0, len(fresh), MAX_IDS):
            message = ControlFrame(Sort.ASK, catalog.fingerprint, ids=tuple(fresh[start : start + MAX_IDS]))
            self._post.send(message.pack(), source, CONTROL_TAG)

    def refused(self, source: int, why: Why, ids: Sequence[int]) -> None:
        """Notes that a node does not send these files, of which a part may have come."""
        ours = tuple(id_ for id_ in dict.fromkeys(ids) if self._is_awaited(source, id_))
        if not ours:
            return
        for id_ in ours:
            del self._awaited[id_]
        self.missed.append(Missed(self._nodes[source], why, ours))
        self._lane.submit(lambda: self._incoming.drop(ours), lambda _: None)

    def bundle(self, mail: Mail, bundle: Bundle, catalog: Catalog) -> None:
        """Has the rows written that are awaited from their sender, and then gives the buffer back."""
        assert mail.buffer is not None
        buffer = mail.buffer
        rows = [row for row in bundle.rows if self._is_awaited(mail.source, row.id)]
        if bundle.fingerprint != catalog.fingerprint or not rows:
            self._post.arrivals.give(buffer)
            return

        def stored(results: list[Stored]) -> None:
            self._post.arrivals.give(buffer)
            self._stored(mail.source, results)

        self._lane.submit(lambda: self._incoming.store(buffer, rows, catalog), stored)

    def _is_awaited(self, source: int, id_: int) -> bool:
        return self._awaited.get(id_) == source

    def _stored(self, source: int, results: Sequence[Stored]) -> None:
        node = self._nodes[source]
        for result in results:
            if self._awaited.pop(result.id, None) is None:
                continue
            if result.why is not Why.NONE:
                self.missed.append(Missed(node, result.why, (result.id,)))
                continue
            self.got.append(Got(node, result.id, result.size_bytes, result.mtime_ns))
