"""Computes the terms of the cost model: seconds for one pass over what a node reads in an epoch. Pure.

This module owns how rates and amounts become seconds, on one node and on several. `modes` owns what the modes make of
them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpcstage.plan.placement.hits import Sharing
from hpcstage.plan.placement.placements import Placing
from hpcstage.plan.types import Rates, Workload
from hpcstage.units import format_duration as show


@dataclass(frozen=True)
class Terms:
    """The terms of the model, all of them known."""

    epochs: int
    startup_s: float
    begin_s: float
    """Seconds from the start to the first copied file: the scan."""
    compute_s: float
    readers: int
    source_alone_s: float
    """Seconds in which one reader alone reads all files of the pass from the source."""
    source_s: float
    """Seconds of the same pass with as many transfers in flight as pay."""
    local_alone_s: float
    """Seconds in which one reader alone reads them from staged copies, here or on another node."""
    copy_s: float
    """Seconds of copying what a node reads in an epoch."""
    share: float
    """The share of the dataset that is staged."""
    files: int
    peers_s: float = 0.0
    """Seconds to get the staged files that are on other nodes, at the rate of the link."""

    def read_s(self, share: float) -> float:
        """Returns the seconds of reading once, with a share of the reads from staged copies."""
        alone = share * self.local_alone_s + (1 - share) * self.source_alone_s
        if self.readers == 0:
            return alone
        return queued_s(alone, ((1 - share) * self.source_s, share * self.peers_s), self.readers)

    def epoch_s(self, share: float) -> float:
        """Returns the seconds of reading and computing once."""
        read_s = self.read_s(share)
        return self.compute_s + read_s if self.readers == 0 else max(self.compute_s, read_s)

    def say_epoch(self, share: float) -> str:
        """Returns the epoch's formula with its numbers, as text."""
        staged = "nodes" if self.peers_s else "local"
        where = staged if share == 1 else "source" if share == 0 else f"{share:.0%} {staged}, rest source"
        read = f"{where} {show(self.read_s(share))}"
        compute = f"compute {show(self.compute_s)}"
        return f"({compute} + {read})" if self.readers == 0 else f"max({compute}, {read})"


@dataclass(frozen=True)
class Phases:
    """The terms of the first epoch, of later ones, and of those after copying everything first."""

    first: Terms
    later: Terms
    upfront: Terms
    whole_copy_s: float
    """Seconds of copying the dataset to the nodes that keep it."""
    order_known: bool


@dataclass(frozen=True)
class Conditions:
    """The input of a forecast besides workload and rates."""

    fit: float = 1.0
    """The share of the dataset that fits the budget."""
    order_known: bool = True
    begin_s: float = 0.0
    """Seconds from the start to the first copied file: the scan's time and what comes before it."""
    max_rate_bytes_per_s: float | None = None
    """The cap of the whole job."""
    nodes: int = 1
    sharing: Sharing | None = None
    """The shares that several nodes keep and get from each other; they replace `fit`."""


def queued_s(alone_s: float, shared_s: tuple[float, ...], readers: int) -> float:
    """Returns the seconds of a pass by readers that each do one thing at a time and queue for what they share.

    That is `alone_s` / readers where they share little, the largest of `shared_s` where there are many readers, and
    more than both in between (mean value analysis).
    """
    if not alone_s and not any(shared_s):
        return 0.0
    own_s = max(0.0, alone_s - sum(shared_s))
    queues, rate = [0.0] * len(shared_s), 0.0
    for count in range(1, readers + 1):
        held_s = [needed * (1 + queue) for needed, queue in zip(shared_s, queues, strict=True)]
        rate = count / (own_s + sum(held_s))
        queues = [rate * held for held in held_s]
    return 1 / rate


def phases(workload: Workload, rates: Rates, given: Conditions) -> Phases:
    """Computes the terms from known numbers."""
    sharing = given.sharing
    if sharing is None or sharing.nodes < 2:
        terms = _terms(workload, rates, given, given.fit, 0.0)
        return Phases(terms, terms, terms, terms.copy_s * given.nodes, given.order_known)
    if sharing.kind is Placing.PRIVATE:
        terms = _terms(workload, rates, given, sharing.kept, 0.0)
        later = replace(terms, share=sharing.later(terms.epochs).local)
        return Phases(terms, later, terms, terms.copy_s * given.nodes, given.order_known)
    placed, peers = max(sharing.placed, 1e-12), sharing.later(workload.epochs or 1).peers
    before = _terms(workload, rates, given, sharing.placed, sharing.hits(1).peers / placed)
    after = _terms(workload, rates, given, sharing.placed, peers / placed)
    passed_on_s = max(0.0, sharing.kept - sharing.placed / sharing.nodes) * _over(
        workload.size_bytes, rates.peer_bytes_per_s
    )
    return Phases(before, after, after, max(after.copy_s, passed_on_s / placed), given.order_known)


def _terms(workload: Workload, rates: Rates, given: Conditions, share: float, peers: float) -> Terms:
    """Computes the terms. `peers` is the share of the staged files that comes from other nodes."""
    nodes = given.nodes
    size = workload.size_bytes / nodes
    source_s = _over(size, rates.source_bytes_per_s) * nodes
    from_peers_s = peers * _over(size, rates.peer_bytes_per_s)
    return Terms(
        epochs=workload.epochs or 1,
        startup_s=workload.startup_s or 0.0,
        begin_s=given.begin_s,
        compute_s=workload.epoch_compute_s or 0.0,
        readers=workload.readers or 0,
        source_alone_s=max(_over(size, rates.reader_bytes_per_s), source_s if nodes > 1 else 0.0),
        source_s=source_s,
        local_alone_s=_over(size, rates.local_bytes_per_s) + from_peers_s,
        copy_s=max(source_s, _over(size * nodes, given.max_rate_bytes_per_s)),
        share=min(1.0, max(0.0, share)),
        files=max(1, workload.files),
        peers_s=from_peers_s,
    )


def _over(amount: float, rate: float | None) -> float:
    return amount / rate if rate else 0.0
