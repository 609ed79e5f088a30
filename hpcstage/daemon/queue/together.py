"""Knows which large files this node brings together with others, each its stripes. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class JointCopies:
    """Owns with whom each such file is brought."""

    def __init__(self) -> None:
        self.own = 0
        """This node."""
        self.present: Collection[int] = ()
        """The nodes that may take part, in the order of their numbers; none while there is no group."""
        self._nodes: dict[int, tuple[int, ...]] = {}
        self._untold: dict[int, tuple[int, ...]] = {}

    @property
    def is_possible(self) -> bool:
        """Whether there are others to bring a file with."""
        return len(self.present) > 1

    def begin(self, id_: int, nodes: Collection[int]) -> None:
        """Has this node begin to bring a file with these nodes, which are to be told."""
        found = tuple(node for node in self.present if node in nodes or node == self.own)
        if len(found) > 1:
            self._nodes[id_] = self._untold[id_] = found

    def told(self, id_: int, nodes: Collection[int]) -> bool:
        """Notes that another node has begun to bring a file. Returns whether this one takes part."""
        if self.own not in nodes or not self.is_possible:
            return False
        self._nodes[id_] = tuple(nodes)
        return True

    def nodes(self, id_: int) -> tuple[int, ...]:
        """Returns the nodes that bring a file with this one; none if it is brought by this one alone."""
        return self._nodes.get(id_, ())

    @property
    def ids(self) -> Collection[int]:
        """The files that are brought so now, or about to be."""
        return self._nodes.keys()

    def end(self, id_: int) -> None:
        """Notes that this node's copy has ended."""
        self._nodes.pop(id_, None)
        self._untold.pop(id_, None)

    def untold(self) -> Mapping[int, tuple[int, ...]]:
        """Returns what other nodes are to be told, once."""
        untold, self._untold = self._untold, {}
        return untold
