"""Forecasts how long the three modes would take, by Yang and Cong's cost model in Higuchi et al.'s ways. Pure.

Nothing is assumed of the program, the source and the disk: `missing` names the figures that are not known, and without
them there is no forecast. Per epoch, with C the compute time and D the bytes of the dataset:

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

from hpcstage.plan.forecast.terms import Conditions, Phases, Terms, phases
from hpcstage.plan.types import Forecast, ModeForecast, Rates, Workload
from hpcstage.units import format_duration as show

DIRECT, UPFRONT, RUNTIME = "direct", "upfront", "runtime"
OF_WORKLOAD = ("epochs", "epoch_compute_s", "readers", "startup_s")
OF_RATES = ("source_bytes_per_s", "reader_bytes_per_s", "local_bytes_per_s", "peer_bytes_per_s")
_OF_NODES = "peer_bytes_per_s"
_STEPS = 400


def forecast(workload: Workload, rates: Rates, given: Conditions | None = None) -> Forecast:
    """Forecasts the modes from figures of which none is `missing`. With several nodes `epoch_compute_s` is that of all
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


def missing(workload: Workload, rates: Rates, nodes: int) -> tuple[str, ...]:
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
