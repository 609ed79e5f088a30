"""Forecasts how long the three modes would take, by Yang and Cong's cost model in Higuchi et al.'s ways. Pure.

Nothing is assumed of the program, the source and the disk: `missing_figures` names what is not known, and without that
there is no forecast. Per epoch, with C the compute time and D the bytes of the dataset:

    training    C                                                                       (their equation 1)
    storage     D / bytes per s of the source, or of one reader alone; several queue for what they share      (2)
    true cost   max(C, reading) where readers work ahead, C + reading where none do     (6)
    with store  (1 - a) of the storage term + a of the local term, a the staged share   (7, 8)

Preprocessing (3, 4) is part of C, as it does not depend on where the files lie. Each of p nodes that share the source
reads its own p-th part at a p-th of the source's rates; `upfront` copies the whole dataset to each. Where nodes get
files from each other, these come over each node's own link, beside the source, so the larger of the two terms of (7)
counts. A replica is filled while the training runs, which does not wait for it.

    direct   startup + E x epoch(a = 0)
    upfront  copy + startup + E x epoch(a)
    runtime  epoch 1 ends when both the program and the copying are through: max(startup + epoch(a), copy), then
             (E - 1) x epoch(a). Where the order is not known, files that the program asks for are fetched first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpcstage.plan.placement.nodesplan import Sharing
from hpcstage.plan.placement.placements import Placing
from hpcstage.plan.types import Forecast, ModeForecast, Rates, Workload
from hpcstage.units import format_duration as show

DIRECT, UPFRONT, RUNTIME = "direct", "upfront", "runtime"
OF_WORKLOAD = ("epochs", "epoch_compute_s", "readers", "startup_s")
OF_RATES = ("source_bytes_per_s", "reader_bytes_per_s", "local_bytes_per_s", "peer_bytes_per_s")
_OF_NODES = "peer_bytes_per_s"
_STEPS = 400


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


def forecast(workload: Workload, rates: Rates, given: Conditions | None = None) -> Forecast:
    """Forecasts the modes from figures of which none is missing. With several nodes `epoch_compute_s` is that of all
    of them together."""
    given = given or Conditions()
    assumptions = []
    if given.nodes > 1:
        assumptions.append("source: all nodes together get no more than one node with all its transfers in flight")
    if not given.order_known:
        assumptions.append("order: not known before the program reads; files that it asks for are fetched first")
    if (workload.epochs or 1) > 1:
        assumptions.append("page cache: does not keep the source's files from one epoch to the next")
    terms = phases(workload, rates, given)
    modes = {DIRECT: _direct(terms.first), UPFRONT: _upfront(terms), RUNTIME: _runtime(terms)}
    return Forecast(modes, tuple(assumptions))


def missing_figures(workload: Workload, rates: Rates, nodes: int) -> tuple[str, ...]:
    """Returns the names of the figures that a forecast for so many nodes needs and that are not known."""
    needed = [(workload, name) for name in OF_WORKLOAD]
    of_rates = [(rates, name) for name in OF_RATES if nodes > 1 or name != _OF_NODES]
    return tuple(name for figures, name in [*needed, *of_rates] if getattr(figures, name) is None)


# ---- the modes


def _direct(terms: Terms) -> ModeForecast:
    epoch_s = terms.epoch_s(0)
    total_s = terms.startup_s + terms.epochs * epoch_s
    formula = f"startup {show(terms.startup_s)} + {terms.epochs} x {terms.say_epoch(0)}"
    first_s = terms.startup_s + terms.source_alone_s / terms.files
    return ModeForecast(DIRECT, total_s, first_s, terms.startup_s + epoch_s, epoch_s, formula)


def _upfront(phases: Phases) -> ModeForecast:
    terms = phases.upfront
    copy_s = terms.begin_s + terms.share * phases.whole_copy_s
    epoch_s = terms.epoch_s(terms.share)
    before_s = copy_s + terms.startup_s
    before = f"scan and copy {show(copy_s)} + startup {show(terms.startup_s)}"
    formula = f"{before} + {terms.epochs} x {terms.say_epoch(terms.share)}"
    first_s = before_s + terms.local_alone_s / terms.files
    return ModeForecast(UPFRONT, before_s + terms.epochs * epoch_s, first_s, before_s + epoch_s, epoch_s, formula)


def _runtime(phases: Phases) -> ModeForecast:
    terms, later = phases.first, phases.later
    first_s, formula = _ordered(terms) if phases.order_known else _unordered(terms)
    later_s = later.epoch_s(later.share)
    if terms.epochs > 1:
        formula += f" + {terms.epochs - 1} x {later.say_epoch(later.share)}"
    first_batch_s = max(terms.startup_s, terms.begin_s) + terms.source_alone_s / terms.files
    return ModeForecast(RUNTIME, first_s + (terms.epochs - 1) * later_s, first_batch_s, first_s, later_s, formula)


def _ordered(terms: Terms) -> tuple[float, str]:
    """Returns the end of epoch 1 where the copying knows the order, and its formula."""
    program_s = terms.startup_s + terms.epoch_s(terms.share)
    copied_s = terms.begin_s + terms.share * terms.copy_s
    rest_s = (1 - terms.share) * terms.epoch_s(0)
    program = f"startup {show(terms.startup_s)} + {terms.say_epoch(terms.share)}"
    copy = f"scan and copy {show(copied_s)}" + (f" + {show(rest_s)} for what does not fit" if rest_s else "")
    return max(program_s, copied_s + rest_s), f"max({program}, {copy})"


def _unordered(terms: Terms) -> tuple[float, str]:
    """Returns the end of epoch 1 where the copying does not know the order, and its formula; goes through the reads
    step by step.

    Files that were read are staged (as far as they fit), so the program finds the share (staged - read) / (1 - read) of
    the unread files; the others are fetched while it waits.
    """
    now_s = terms.startup_s
    for step in range(_STEPS):
        read = step / _STEPS
        copied = (now_s - terms.begin_s) / terms.copy_s if terms.copy_s else 1.0
        staged = min(max(copied, terms.share * read, 0.0), terms.share)
        found = min(max((staged - terms.share * read) / (1 - read), 0.0), 1.0)
        now_s += terms.epoch_s(found) / _STEPS
    return now_s, f"startup {show(terms.startup_s)} + first epoch, order not known, {show(now_s - terms.startup_s)}"
