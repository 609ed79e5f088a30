"""Knows which nodes do not reach each other though the leading host hears all of them, and who trains without whom.

Pure. A network that is cut between two nodes makes every collective of theirs hang. What nodes say of that holds for
`APART_S`: until then the two do not train together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpcstage.elastic.membership.values import GONE, Beat, Generation

APART_S = 600.0


@dataclass(frozen=True)
class SeenNode:
    """A node, as the host of the store sees it."""

    beat: Beat
    silent_s: float

    def is_there(self, lease_s: float) -> bool:
        """Returns whether it lives, and has not gone."""
        return self.silent_s < lease_s and self.beat.state not in GONE


class Apart:
    """Owns the pairs."""

    def __init__(self, known: Sequence[tuple[str, str, float]] = (), now_s: float = 0.0) -> None:
        """`known`: what `pairs` returned where another host led before."""
        self._until_s = {frozenset(pair): now_s + left_s for *pair, left_s in known}
        self.told: list[tuple[str, str]] = []
        """The hosts of pairs that are new since the caller has emptied this."""

    def pairs(self, now_s: float) -> tuple[tuple[str, str, float], ...]:
        """Returns the nodes of each pair, by their ids, and the seconds for which they are apart."""
        return tuple((*sorted(pair), until_s - now_s) for pair, until_s in self._until_s.items())  # type: ignore[misc]

    def sorted_out(
        self, now_s: float, current: Generation | None, seen: Sequence[SeenNode], lease_s: float
    ) -> Sequence[SeenNode]:
        """Returns the nodes as if those had left that cannot train with others that are there. As few as possible are
        left out, and of two the one with the higher rank."""
        there = {node.beat.node.id: node.beat for node in seen if node.is_there(lease_s)}
        self._hear(now_s, current, there)
        self._until_s = {pair: until_s for pair, until_s in self._until_s.items() if now_s < until_s}
        pairs = [pair for pair in self._until_s if pair <= there.keys()]
        if not pairs:
            return seen
        ranks = {node.id: rank for rank, node in enumerate(current.nodes)} if current else {}
        counts = Counter(id_ for pair in pairs for id_ in pair)
        kept: set[str] = set()
        for id_ in sorted(there, key=lambda id_: (id_ not in ranks, counts[id_], ranks.get(id_, 0))):
            if not any(frozenset((id_, other)) in self._until_s for other in kept):
                kept.add(id_)
        return [
            node if node.beat.node.id in kept or node.beat.node.id not in there else _as_left(node) for node in seen
        ]

    def _hear(self, now_s: float, current: Generation | None, there: dict[str, Beat]) -> None:
        for beat in there.values():
            if current is None or beat.generation != current.number:
                continue
            for id_ in beat.unreached:
                pair = frozenset((beat.node.id, id_))
                if id_ in there and id_ != beat.node.id:
                    if pair not in self._until_s:
                        self.told.append((beat.node.host, there[id_].node.host))
                    self._until_s[pair] = now_s + APART_S


def _as_left(node: SeenNode) -> SeenNode:
    return replace(node, beat=replace(node.beat, state="left"))
