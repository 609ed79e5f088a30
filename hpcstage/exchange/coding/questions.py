"""Asks other nodes for what their agents hold, and answers what they ask: ranges of files, lists of generations.

Owns the open questions of this node, and the directories that its agent lets others read. A question that cannot be
answered any more is answered with an error.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from pathlib import Path

from hpcstage.checkpoint.generations.files import GenerationPart, is_number
from hpcstage.exchange.coding.port import AgentPort
from hpcstage.exchange.coding.wire import packed, say
from hpcstage.exchange.lane import Lane
from hpcstage.exchange.service import Station
from hpcstage.protocol import coding

READS_S = 0.05
"""The next read of a rebuild is expected for so long; meanwhile this node looks for it every _LOOK_S."""
_LOOK_S = 0.3e-3
MOST_KEYS = 1024


class Questions:
    """Owns what is asked, of this node and by it. Files are read in `lane`."""

    def __init__(self, station: Station, lane: Lane) -> None:
        self._station = station
        self._node = station.daemon.hello.index
        self._lane = lane
        self._held: dict[str, Path] = {}
        """The directories that others may read, by their keys."""
        self._asked: dict[int, tuple[int, AgentPort]] = {}
        """The nodes that were asked, and by whom, by the id of the question. No two agents of a node give one id."""
        self._read_at = -math.inf
        """When somebody read last."""

    def hold(self, message: coding.Hold) -> None:
        """Lets other nodes read a directory of this node's agent."""
        is_known = message.key in self._held or len(self._held) < MOST_KEYS
        if is_known and len(message.key) <= coding.MAX_KEY_LENGTH and os.path.isabs(message.directory):
            self._held[message.key] = Path(message.directory)

    def ask(self, question: coding.Read | coding.ListStore, port: AgentPort) -> None:
        """Asks a node what a process of this one wants to know; it may be this one."""
        self._asked[question.id] = question.node, port
        if question.node == self._node:
            self.serve(self._node, question)
            return
        self._read_at = time.monotonic()
        if not say(self._station, question.node, packed(question)):
            self.answered(question.node, _unreachable(question.id, question.node))

    def serve(self, node: int, question: coding.Read | coding.ListStore) -> None:
        """Answers a question of a node."""
        self._read_at = time.monotonic()
        directory = self._held.get(question.key)
        if directory is None:
            why = f"node {self._node} holds nothing of that name"
            self._give(node, coding.StoreAnswer(question.id, errno.ENOENT, why, 0, b""))
        else:
            self._lane.submit(lambda: answer(directory, question), lambda found: self._give(node, found))

    def _give(self, node: int, found: coding.StoreAnswer) -> None:
        if node == self._node:
            self.answered(node, found)
        else:
            say(self._station, node, packed(found))

    def answered(self, node: int, found: coding.StoreAnswer) -> None:
        """Gives the answer of a node to who asked."""
        asked, port = self._asked.get(found.id, (None, None))
        if port is not None and asked == node:
            del self._asked[found.id]
            port.send(found)

    def left(self, node: int) -> None:
        """Answers what a node was asked that is not there any more."""
        for id_ in [id_ for id_, (asked, _) in self._asked.items() if asked == node]:
            self.answered(node, _unreachable(id_, node))

    def next_at(self) -> float:
        """Returns when a read may come."""
        now = time.monotonic()
        return now + _LOOK_S if now - self._read_at < READS_S else math.inf


def _unreachable(id_: int, node: int) -> coding.StoreAnswer:
    return coding.StoreAnswer(id_, errno.EHOSTUNREACH, f"node {node} is not in the group", 0, b"")


def answer(directory: Path, question: coding.Read | coding.ListStore) -> coding.StoreAnswer:
    """Reads what is asked for below a directory, and nothing but files of generations."""
    try:
        from hpcstage.checkpoint.generations.reading import LocalSource  # NumPy takes long

        with LocalSource(directory) as source:
            if isinstance(question, coding.ListStore):
                return coding.StoreAnswer(question.id, 0, "", 0, json.dumps(source.numbers()).encode())
            number, part = question.number, GenerationPart(question.part)
            if not is_number(number) or question.offset < 0 or not 0 <= question.length <= coding.MAX_PIECE_BYTES:
                raise ValueError("a place that no file has")
            content = memoryview(bytearray(question.length))
            count = source.read_into(number, part, content, question.offset)
            return coding.StoreAnswer(question.id, 0, "", source.size_bytes(number, part), bytes(content[:count]))
    except ValueError as error:
        found = errno.EINVAL, str(error)
    except OSError as error:
        found = error.errno or errno.EIO, error.strerror or ""
    except ImportError as error:
        found = errno.ENOSYS, f"{error.name} cannot be imported"
    return coding.StoreAnswer(question.id, *found, 0, b"")
