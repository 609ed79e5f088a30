"""Forecasts how long the three modes would take, by Yang and Cong's cost model in Higuchi et al.'s ways. Pure.

Nothing is assumed of the program, the source and the disk: `missing_figures` names what is not known, and without that
there is no forecast. Per epoch, with C the compute time and D the bytes of the dataset:

    training    C                                                                       (their equation 1)
    storage     D / bytes per s of the source, or of one reader alone; several queue for what they share      (2)
    true cost   max(C, reading) where readers work ahead, C + reading where none do     (6)
    with store  the storage term of what comes from the source + the terms of local disk and other nodes      (7, 8)

Preprocessing (3, 4) is part of C, as it does not depend on where the files lie. Each of p nodes that share the source
reads its own p-th part at a p-th of the source's rates; `upfront` copies the whole dataset to each. What comes from
other nodes comes over each node's own link, beside the source, so the larger of the two terms of (7) counts.

    direct   startup + E x epoch(all from the source)
    upfront  copy + startup + E x epoch(as staged)
    runtime  epoch 1 ends when both the program and the copying are through: max(startup + epoch(as staged), copy), then
             E - 1 later epochs. Where the order is not known, epoch 1 takes what it takes in the better other mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcstage.plan.placement.nodesplan import Hits, Sharing, mean_hits
from hpcstage.plan.placement.placements import Placing
from hpcstage.plan.types import Forecast, ModeForecast, Rates, Workload
from hpcstage.units import format_duration as show

DIRECT, UPFRONT, RUNTIME = "direct", "upfront", "runtime"
OF_WORKLOAD = ("epochs", "epoch_compute_s", "readers", "startup_s")
OF_RATES = ("source_bytes_per_s", "reader_bytes_per_s", "local_bytes_per_s", "peer_bytes_per_s")
_OF_NODES = "peer_bytes_per_s"
_AT_SOURCE = Hits(0.0, 0.0, 1.0)
_ONE_NODE = Sharing(Placing.PRIVATE, 1, 1.0)


@dataclass(frozen=True)
class Conditions:
    """The input of a forecast besides workload and rates."""

    sharing: Sharing = _ONE_NODE
    """The shares that nodes keep and get from each other; of one node, the share that fits the budget."""
    order_known: bool = True
    begin_s: float = 0.0
    """Seconds from the start to the first copied file: the scan's time and what comes before it."""
    max_rate_bytes_per_s: float | None = None
    """The cap of the whole job."""


def missing_figures(workload: Workload, rates: Rates, nodes: int) -> tuple[str, ...]:
    """Returns the names of the figures that a forecast for so many nodes needs and that are not known."""
    needed = [(workload, name) for name in OF_WORKLOAD]
    of_rates = [(rates, name) for name in OF_RATES if nodes > 1 or name != _OF_NODES]
    return tuple(name for figures, name in [*needed, *of_rates] if getattr(figures, name) is None)


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


class _Epochs:
    """The seconds of epochs by where their reads are served, from figures of which none is missing."""

    def __init__(self, workload: Workload, rates: Rates, nodes: int) -> None:
        part = workload.size_bytes / nodes
        self.compute_s, self.readers = workload.epoch_compute_s or 0.0, workload.readers or 0
        self._source_s = _over(workload.size_bytes, rates.source_bytes_per_s)
        self._alone_s = max(_over(part, rates.reader_bytes_per_s), self._source_s if nodes > 1 else 0.0)
        self._local_s, self._peers_s = _over(part, rates.local_bytes_per_s), _over(part, rates.peer_bytes_per_s)

    def read_s(self, hits: Hits) -> float:
        """Returns the seconds of reading once."""
        peers_s = hits.peers * self._peers_s
        alone_s = (hits.local + hits.peers) * self._local_s + peers_s + hits.source * self._alone_s
        return queued_s(alone_s, (hits.source * self._source_s, peers_s), self.readers) if self.readers else alone_s

    def seconds(self, hits: Hits) -> float:
        """Returns the seconds of reading and computing once."""
        return max(self.compute_s, self.read_s(hits)) if self.readers else self.compute_s + self.read_s(hits)

    def text(self, hits: Hits) -> str:
        """Returns the epoch's formula with its numbers."""
        staged = "nodes" if hits.peers else "local"
        where = {0.0: staged, 1.0: "source"}.get(hits.source, f"{1 - hits.source:.0%} {staged}, rest source")
        terms = f"compute {show(self.compute_s)}", f"{where} {show(self.read_s(hits))}"
        return f"max({', '.join(terms)})" if self.readers else f"({' + '.join(terms)})"


def forecast(workload: Workload, rates: Rates, given: Conditions | None = None) -> Forecast:
    """Forecasts the modes from figures of which none is missing. With several nodes `epoch_compute_s` is that of all
    of them together."""
    given = given or Conditions()
    sharing, startup_s, count = given.sharing, workload.startup_s or 0.0, workload.epochs or 1
    epochs = _Epochs(workload, rates, sharing.nodes)
    is_private, staged = sharing.kind is Placing.PRIVATE, sharing.staged()
    first = staged if is_private else sharing.hits(1)
    later = staged if sharing.nodes == 1 else mean_hits(map(sharing.hits, range(2, max(3, count + 1))))
    size, times = workload.size_bytes, sharing.placed * (sharing.nodes if is_private else 1)
    cap = min(filter(None, (rates.source_bytes_per_s, given.max_rate_bytes_per_s)), default=None)
    ahead_s = given.begin_s + sharing.placed * _over(size, cap)
    passed_on = 0.0 if is_private else max(0.0, sharing.kept - sharing.placed / sharing.nodes)
    copy_s = given.begin_s + max(times * _over(size, cap), passed_on * _over(size, rates.peer_bytes_per_s))
    start = f"startup {show(startup_s)}"

    direct_s = epochs.seconds(_AT_SOURCE)
    direct = ModeForecast(
        startup_s + count * direct_s, startup_s + direct_s, direct_s, f"{start} + {count} x {epochs.text(_AT_SOURCE)}"
    )
    after_s, before_s = epochs.seconds(staged), copy_s + startup_s
    how = f"scan and copy {show(copy_s)} + {start} + {count} x {epochs.text(staged)}"
    upfront = ModeForecast(before_s + count * after_s, before_s + after_s, after_s, how)

    rest_s = first.source * direct_s
    first_s = max(startup_s + epochs.seconds(first), ahead_s + rest_s)
    more = f" + {show(rest_s)} for what does not fit" if rest_s else ""
    how = f"max({start} + {epochs.text(first)}, scan and copy {show(ahead_s)}{more})"
    if not given.order_known:
        first_s = min(direct.first_epoch_s, upfront.first_epoch_s)
        how = f"first epoch, order not known, {show(first_s)}"
    later_s = epochs.seconds(later)
    how += f" + {count - 1} x {epochs.text(later)}" if count > 1 else ""
    runtime = ModeForecast(first_s + (count - 1) * later_s, first_s, later_s, how)
    return Forecast({DIRECT: direct, UPFRONT: upfront, RUNTIME: runtime}, tuple(_assumptions(given, count)))


def _assumptions(given: Conditions, epochs: int) -> list[str]:
    said = []
    if given.sharing.nodes > 1:
        said.append("source: all nodes together get no more than one node with all its transfers in flight")
    if not given.order_known:
        said.append("order: not known before the program reads; its first epoch takes what the better other mode takes")
    if epochs > 1:
        said.append("page cache: does not keep the source's files from one epoch to the next")
    return said


def _over(amount: float, rate: float | None) -> float:
    return amount / rate if rate else 0.0
