"""Tells the reports of an agent to those of the other nodes, over the exchange of its node, and hears theirs.

Owns the link, which is opened again when it was lost, and what counts as the membership: a node whose agent has gone
is not there. Where no exchange can come any more, a node that the lead knows as the only one that lives is a job of its
own.
"""

from __future__ import annotations

import json
import math
import time
import zlib
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from hpcstage.checkpoint.job.ledger import NodeReport
from hpcstage.checkpoint.protection.exchangesocket import LinkLost
from hpcstage.checkpoint.protection.link import GroupLink
from hpcstage.jsonform import read
from hpcstage.protocol.coding import AgentGone, AgentMessage, EncodeEnded, Members
from hpcstage.protocol.leadspec import STANDING
from hpcstage.reading import readable

_OPEN_EVERY_S = 0.1
_STANDING_EVERY_S = 0.5
_VIEWS = 1000
"""A generation of the membership has so many views at most: one more with each agent that goes."""


@dataclass(frozen=True)
class PresentNodes:
    """Who is there. None: this node is not connected."""

    number: int
    present: frozenset[int]


@dataclass(frozen=True)
class Heard:
    """The report of another node."""

    node: int
    report: NodeReport


News = PresentNodes | Heard | EncodeEnded


class Talk:
    """The conversation of one agent."""

    def __init__(self, node_dir: Path, group_dir: Path, me: int, *, is_alone: bool = False) -> None:
        """`is_alone`: the job has no other node."""
        self._is_alone = is_alone
        self._node_dir = node_dir
        self._group_dir = group_dir
        self._me = me
        self._link: GroupLink | None = None
        self._held: dict[str, Path] = {}
        self._gone: set[int] = set()
        self._open_at = self._standing_at = 0.0
        self._view = PresentNodes(-1, frozenset())
        self.apart_since: float | None = None if is_alone else time.monotonic()
        """Since when this node is not connected; None: it is, or needs nobody."""

    @property
    def link(self) -> GroupLink | None:
        """The connection; None while there is none."""
        return self._link

    def fds(self) -> list[int]:
        """Returns what to wait for."""
        return [] if self._link is None else [self._link.fileno()]

    def wait_s(self) -> float:
        """Returns the longest wait that is sensible now."""
        if self._link is None:
            return math.inf if self._is_alone else _OPEN_EVERY_S
        return 0.0 if self._link.has_events else math.inf

    def hold(self, key: str, directory: Path) -> None:
        """Lets other nodes read the generations below a directory, also over later links."""
        self._held[key] = directory
        if self._link is not None:
            try:
                self._link.hold(key, directory)
            except LinkLost:
                self._lose()

    def say(self, report: NodeReport, nodes: Collection[int]) -> None:
        """Tells a report; to whom it cannot be told, a later one will be."""
        if not nodes:
            return
        data = zlib.compress(json.dumps(asdict(report)).encode(), 1)
        try:
            for node in nodes:
                if self._link is not None:
                    self._link.send(node, data)
        except LinkLost:
            self._lose()

    def news(self) -> list[News]:
        """Returns what has happened. Does not wait."""
        found: list[News] = []
        before = self._view
        now = time.monotonic()
        if self._link is None and now >= self._open_at and not self._is_alone:
            self._open(now)
        if self._is_alone:
            self._view = PresentNodes(0, frozenset({self._me}))
        elif self._link is None:
            self._look_alone(now)
        else:
            found += self._events()
        return [self._view, *found] if self._view != before else found

    def close(self) -> None:
        """Ends the conversation."""
        if self._link is not None:
            self._link.close()
            self._link = None

    def _open(self, now: float) -> None:
        self._open_at = now + _OPEN_EVERY_S
        try:
            link = GroupLink.open(self._node_dir, 0.0)
            for key, directory in self._held.items():
                link.hold(key, directory)
        except LinkLost:
            return
        self._link, self._gone = link, set()
        self._see_members()

    def _events(self) -> list[News]:
        found: list[News] = []
        assert self._link is not None
        try:
            for event in self._link.events(0.0):
                if isinstance(event, AgentMessage):
                    report = read(NodeReport, json.loads(zlib.decompress(event.message)))
                    found.append(Heard(event.node, report))
                elif isinstance(event, EncodeEnded):
                    found.append(event)
                elif isinstance(event, AgentGone):
                    self._gone.add(event.node)
                    self._see_members()
                elif isinstance(event, Members):
                    self._see_members()
        except LinkLost:
            self._lose()
        return found

    def _see_members(self) -> None:
        assert self._link is not None
        membership = self._link.membership
        present = frozenset(membership.present) - self._gone
        self._view = PresentNodes(membership.generation * _VIEWS + len(self._gone), present)
        self.apart_since = None

    def _lose(self) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._view = PresentNodes(-1, frozenset())
        now = time.monotonic()
        self.apart_since = now if self.apart_since is None else self.apart_since
        self._open_at, self._standing_at = now, now + _STANDING_EVERY_S

    def _look_alone(self, now: float) -> None:
        """Looks whether this node is the only one that lives."""
        if now < self._standing_at or self._view.present:
            return
        self._standing_at = now + _STANDING_EVERY_S
        try:
            found = json.loads((self._group_dir / STANDING).read_text())
            is_alone = found["alive"] == [self._me]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if is_alone:
            self._view = PresentNodes(int(found["generation"]) * _VIEWS + _VIEWS - 1, frozenset({self._me}))
            self.apart_since = None


def wait(talk: Talk, fds: Iterable[int], timeout_s: float) -> None:
    """Waits until something may have happened."""
    wait_s = min(timeout_s, talk.wait_s())
    readable([*fds, *talk.fds()], None if math.isinf(wait_s) else wait_s)
