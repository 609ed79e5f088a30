"""Corrects the counts of virtual nodes: several on one machine, whose daemons all see the whole command. Pure.

A process that attached to one of them counts as missed on none, and one that attached to none is one process, however
many daemons saw it.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpcstage.record.figures.coverage import EXAMPLES, Coverage
from hpcstage.record.parts.part import NodePart


def is_virtual(node: NodePart) -> bool:
    """Returns whether a node is virtual, by its name `HOST.vINDEX`."""
    return node.node_count > 1 and node.host.endswith(f".v{node.node_index}")


def pids_of(node: NodePart) -> frozenset[int]:
    """Returns the pids of the processes that attached to a virtual node; none for other nodes."""
    return frozenset(process.pid for process in node.processes) if is_virtual(node) else frozenset()


def settle(nodes: Sequence[tuple[NodePart, frozenset[int], Coverage]]) -> None:
    """Corrects how many processes were missed: the first virtual node gets all of them."""
    virtual = [found for found in nodes if is_virtual(found[0])]
    attached = frozenset[int]().union(*(pids for _, pids, _ in virtual))
    missed = {m.get("pid"): m for node, _, _ in virtual for m in node.missed_processes if m.get("pid") not in attached}
    _settle_accounts([coverage for _, _, coverage in virtual])
    counts = [_unlisted(node, len(attached) - len(pids)) for node, pids, _ in virtual]
    for at, (_, _, coverage) in enumerate(virtual):
        coverage["processes_missed"] = 0 if at else max(len(missed), *counts)
        coverage["missed_examples"] = [] if at else list(missed.values())[:EXAMPLES]


def _settle_accounts(nodes: Sequence[Coverage]) -> None:
    """Adds up the accounts at the first virtual node: one node has the command's counter, all have those of its
    processes."""
    known = [coverage["accounts"] for coverage in nodes if coverage["accounts"]]
    if known:
        sums = {name: sum(account[name] for account in known) for name in known[0]}
        for at, coverage in enumerate(nodes):
            coverage["accounts"] = dict.fromkeys(sums, 0) if at else sums


def _unlisted(node: NodePart, elsewhere: int) -> int:
    """Returns how many processes a node missed, less those that attached elsewhere, if it missed more than it lists."""
    return max(0, node.missed_count - elsewhere) if node.missed_count > len(node.missed_processes) else 0
