"""Owns what this node receives: files that its daemon asked for, from the nodes that have them.

The module owns which file is awaited from which node. It drops what was not asked for, what comes from another node,
and what comes under another manifest.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpcstage.exchange.files.filewriting import Incoming, Stored
from hpcstage.exchange.lane import Lane
from hpcstage.exchange.transport.frames import CONTROL_TAG, Bundle, ControlFrame, Sort
from hpcstage.exchange.transport.mpi import Mail, Post
from hpcstage.protocol.exchange import MAX_IDS, Got, Missed, Why
from hpcstage.store.catalog import Catalog


@dataclass
class _Awaited:
    source: int
    asked_ns: int


class Receiver:
    """Receives files. Sources are positions in the group; what is told to the daemon names nodes, by
    `nodes[position]`."""

    def __init__(self, post: Post, lane: Lane, nodes: Sequence[int]) -> None:
        self._post = post
        self._lane = lane
        self._nodes = nodes
        self._incoming = Incoming()
        self._awaited: dict[int, _Awaited] = {}
        self.got: list[Got] = []
        """Files that have come, to be told to the daemon."""
        self.missed: list[Missed] = []
        """Files that do not come, to be told to the daemon."""

    def fetch(self, source: int, ids: Sequence[int], catalog: Catalog) -> None:
        """Asks a node for files. A file that is awaited already is not asked for again."""
        now_ns = time.monotonic_ns()
        fresh = [id_ for id_ in dict.fromkeys(ids) if id_ not in self._awaited]
        unknown = tuple(id_ for id_ in fresh if id_ not in catalog)
        if unknown:
            self.missed.append(Missed(self._nodes[source], Why.UNKNOWN, unknown))
            fresh = [id_ for id_ in fresh if id_ in catalog]
        self._awaited.update((id_, _Awaited(source, now_ns)) for id_ in fresh)
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
        awaited, source = self._awaited, mail.source
        rows = [row for row in bundle.rows if row.id in awaited and awaited[row.id].source == source]
        if bundle.fingerprint != catalog.fingerprint or not rows:
            self._post.arrivals.give(buffer)
            return

        def stored(results: list[Stored]) -> None:
            self._post.arrivals.give(buffer)
            self._stored(mail.source, results)

        self._lane.submit(lambda: self._incoming.store(buffer, rows, catalog), stored)

    def _is_awaited(self, source: int, id_: int) -> bool:
        awaited = self._awaited.get(id_)
        return awaited is not None and awaited.source == source

    def _stored(self, source: int, results: Sequence[Stored]) -> None:
        now_ns = time.monotonic_ns()
        node = self._nodes[source]
        for result in results:
            awaited = self._awaited.pop(result.id, None)
            if awaited is None:
                continue
            if result.why is not Why.NONE:
                self.missed.append(Missed(node, result.why, (result.id,)))
                continue
            opened_ns = max(0, result.begun_ns - awaited.asked_ns)
            read_ns = max(0, now_ns - result.begun_ns - result.write_ns)
            self.got.append(
                Got(node, result.id, result.size_bytes, result.mtime_ns, opened_ns, read_ns, result.write_ns)
            )
