"""Forecasts how long the three modes would take on one node, by Yang and Cong's cost model in Higuchi et al.'s ways.
Pure.

Nothing is assumed of the program, the source and the disk: `missing_figures` names what is not known, and without that
there is no forecast. Per epoch, with C the compute time and D the bytes of the dataset:

    training    C                                                                       (their equation 1)
    storage     D / bytes per s of the source, or of one reader alone; several queue for what they share      (2)
    true cost   max(C, reading) where readers work ahead, C + reading where none do     (6)
    with store  (1 - a) of the storage term + a of the local term, a the staged share   (7, 8)

Preprocessing (3, 4) is part of C, as it does not depend on where the files lie.

    direct   startup + E x epoch(a = 0)
    upfront  copy + startup + E x epoch(a)
    runtime  epoch 1 ends when both the program and the copying are through: max(startup + epoch(a), copy), then
             (E - 1) x epoch(a). Where the order is not known, epoch 1 takes what it takes in the better other mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcstage.plan.types import Forecast, ModeForecast, Rates, Workload
from hpcstage.units import format_duration as show

DIRECT, UPFRONT, RUNTIME = "direct", "upfront", "runtime"
OF_WORKLOAD = ("epochs", "epoch_compute_s", "readers", "startup_s")
OF_RATES = ("source_bytes_per_s", "reader_bytes_per_s", "local_bytes_per_s")


@dataclass(frozen=True)
class Conditions:
    """The input of a forecast besides workload and rates."""

    fit: float = 1.0
    """The share of the dataset that fits the budget."""
    order_known: bool = True
    begin_s: float = 0.0
    """Seconds from the start to the first copied file: the scan's time and what comes before it."""
    max_rate_bytes_per_s: float | None = None


def missing_figures(workload: Workload, rates: Rates) -> tuple[str, ...]:
    """Returns the names of the figures that a forecast needs and that are not known."""
    needed = [*((workload, name) for name in OF_WORKLOAD), *((rates, name) for name in OF_RATES)]
    return tuple(name for figures, name in needed if getattr(figures, name) is None)


def queued_s(alone_s: float, shared_s: float, readers: int) -> float:
    """Returns the seconds of a pass by readers that each do one thing at a time and queue for what they share.

    That is `alone_s` / readers where they share little, `shared_s` where there are many readers, and more than both in
    between (mean value analysis).
    """
    if not alone_s and not shared_s:
        return 0.0
    own_s, queue, rate = max(0.0, alone_s - shared_s), 0.0, 0.0
    for count in range(1, readers + 1):
        held_s = shared_s * (1 + queue)
        rate = count / (own_s + held_s)
        queue = rate * held_s
    return 1 / rate


class _Epochs:
    """The seconds of epochs by the staged share, from figures of which none is missing."""

    def __init__(self, workload: Workload, rates: Rates) -> None:
        size = workload.size_bytes
        self._compute_s, self._readers = workload.epoch_compute_s or 0.0, workload.readers or 0
        self._source_s, self._alone_s = _over(size, rates.source_bytes_per_s), _over(size, rates.reader_bytes_per_s)
        self._local_s = _over(size, rates.local_bytes_per_s)

    def read_s(self, share: float) -> float:
        """Returns the seconds of reading once."""
        alone_s = share * self._local_s + (1 - share) * self._alone_s
        return queued_s(alone_s, (1 - share) * self._source_s, self._readers) if self._readers else alone_s

    def seconds(self, share: float) -> float:
        """Returns the seconds of reading and computing once."""
        read_s = self.read_s(share)
        return max(self._compute_s, read_s) if self._readers else self._compute_s + read_s

    def text(self, share: float) -> str:
        """Returns the epoch's formula with its numbers."""
        where = {0.0: "source", 1.0: "local"}.get(share, f"{share:.0%} local, rest source")
        terms = f"compute {show(self._compute_s)}", f"{where} {show(self.read_s(share))}"
        return f"max({', '.join(terms)})" if self._readers else f"({' + '.join(terms)})"


def forecast(workload: Workload, rates: Rates, given: Conditions | None = None) -> Forecast:
    """Forecasts the modes from figures of which none is missing."""
    given = given or Conditions()
    epochs, startup_s, count, share = (
        _Epochs(workload, rates),
        workload.startup_s or 0.0,
        workload.epochs or 1,
        given.fit,
    )
    cap = min(filter(None, (rates.source_bytes_per_s, given.max_rate_bytes_per_s)), default=None)
    copy_s, start = given.begin_s + share * _over(workload.size_bytes, cap), f"startup {show(startup_s)}"

    direct_s, after_s = epochs.seconds(0), epochs.seconds(share)
    how = f"{start} + {count} x {epochs.text(0)}"
    direct = ModeForecast(startup_s + count * direct_s, startup_s + direct_s, direct_s, how)
    before_s = copy_s + startup_s
    how = f"scan and copy {show(copy_s)} + {start} + {count} x {epochs.text(share)}"
    upfront = ModeForecast(before_s + count * after_s, before_s + after_s, after_s, how)

    rest_s = (1 - share) * direct_s
    first_s = max(startup_s + after_s, copy_s + rest_s)
    more = f" + {show(rest_s)} for what does not fit" if rest_s else ""
    how = f"max({start} + {epochs.text(share)}, scan and copy {show(copy_s)}{more})"
    if not given.order_known:
        first_s = min(direct.first_epoch_s, upfront.first_epoch_s)
        how = f"first epoch, order not known, {show(first_s)}"
    how += f" + {count - 1} x {epochs.text(share)}" if count > 1 else ""
    runtime = ModeForecast(first_s + (count - 1) * after_s, first_s, after_s, how)

    assumptions = []
    if not given.order_known:
        assumptions.append(
            "order: not known before the program reads; its first epoch takes what the better other mode takes"
        )
    if count > 1:
        assumptions.append("page cache: does not keep the source's files from one epoch to the next")
    return Forecast({DIRECT: direct, UPFRONT: upfront, RUNTIME: runtime}, tuple(assumptions))


def _over(amount: float, rate: float | None) -> float:
    return amount / rate if rate else 0.0
