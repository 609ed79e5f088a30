"""Cuts between the nodes of a training, each of which has a network of its own, and who should train in spite of them.

Owns what is cut and mended, and what must follow from it: those train that reach the leading node in both directions,
and of two of them that do not reach each other one. `networks` makes the networks.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from benchmarks.stretching.networks import Cut, Networks
from hpcstage.elastic.membership.deciding import APART_S

Key = tuple[str, int]
"""A node: its job, and its number there."""
CUTS = ("cut off", "what is sent lost", "what is received lost", "link cut", "link cut in one direction")
"""The kinds of faults of a network."""
TORCHRUN = """#!/bin/sh
# `torchrun` in the network of its node, whose address it is given.
read -r enter address < "$CHAOS/network-$CHAOS_JOB-$HPCSTAGE_VIRTUAL_NODE"
for word do
    shift
    case $word in --local-addr=*) word=--local-addr=$address ;; esac
    set -- "$@" "$word"
done
exec nsenter "$enter" -- "$CHAOS_PYTHON" -m torch.distributed.run "$@"
"""


@dataclass(frozen=True)
class Damage:
    """What is cut by one fault, and mended together."""

    cuts: tuple[Cut, ...]
    link: frozenset[Key] = frozenset()
    """The two nodes whose link it is, if it is one."""


class NodeNetworks:
    """The networks of the nodes of one training, in whose environment `CHAOS` names the directory `work`, `CHAOS_JOB`
    the job, and `CHAOS_PYTHON` the Python."""

    def __init__(self, work: Path) -> None:
        self.damages: list[Damage] = []
        self._work = work
        self._networks = Networks()
        self._numbers: dict[Key, int] = {}
        self._count = 0
        self._apart_until_s: dict[frozenset[Key], float] = {}
        """The nodes whose link was cut for a while: they need not train together."""
        self.torchrun = work / "torchrun"
        self.torchrun.write_text(TORCHRUN)
        self.torchrun.chmod(0o700)

    def add(self, key: Key) -> None:
        """Makes the network of a node that is about to be started."""
        self._count += 1
        self._numbers[key] = self._count
        self._networks.add(self._count)
        enter = self._networks.enter(self._count)[1]
        (self._work / f"network-{key[0]}-{key[1]}").write_text(f"{enter} {self._networks.address(self._count)}\n")

    def remove(self, key: Key) -> None:
        """Forgets a node that is lost."""
        self._networks.remove(self._numbers.pop(key))
        left = set(self._networks.cuts)
        self.damages = [damage for damage in self.damages if left.issuperset(damage.cuts)]

    def node_at(self, address: str) -> Key | None:
        """Returns the node that has an address, if it is there."""
        return next((key for key, number in self._numbers.items() if Networks.address(number) == address), None)

    def cut_off(self, key: Key, *, sends: bool, receives: bool) -> None:
        """Has what a node sends be lost, or what it is sent, whoever the others are."""
        number = self._numbers[key]
        self._cut(Damage((Cut(number, None),) * sends + (Cut(None, number),) * receives))

    def part(self, one: Key, other: Key, *, both: bool) -> None:
        """Cuts the link between two nodes, in one direction or both."""
        first, second = self._numbers[one], self._numbers[other]
        cuts = (Cut(first, second), Cut(second, first))
        self._cut(Damage(cuts if both else cuts[:1], frozenset((one, other))))

    def mend(self, damage: Damage) -> None:
        """Ends what one fault has cut."""
        self.damages.remove(damage)
        for cut in damage.cuts:
            self._networks.mend(cut)
        if damage.link:
            self._apart_until_s[damage.link] = time.monotonic() + APART_S

    def may_train(self, team: Collection[Key], running: Collection[Key], leader: Key | None) -> bool:
        """Whether of the nodes that run these should train, and nobody else, if one of them leads."""
        if leader is None or leader not in running:
            return False
        heard = {key for key in running if key == leader or self._reach(key, leader)}
        return (
            heard.issuperset(team)
            and all(self._reach(one, other) for one in team for other in team if one != other)
            and all(any(self._are_apart(key, one) for one in team) for key in heard.difference(team))
        )

    def close(self) -> None:
        """Ends all of them."""
        self._networks.close()

    def _cut(self, damage: Damage) -> None:
        self.damages.append(damage)
        for cut in damage.cuts:
            self._networks.cut(cut)

    def _reach(self, one: Key, other: Key) -> bool:
        first, second = self._numbers[one], self._numbers[other]
        return not (self._networks.is_cut(first, second) or self._networks.is_cut(second, first))

    def _are_apart(self, one: Key, other: Key) -> bool:
        """Whether two nodes need not train together."""
        pair = frozenset((one, other))
        return not self._reach(one, other) or time.monotonic() < self._apart_until_s.get(pair, 0.0)
