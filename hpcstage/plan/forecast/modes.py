"""Forecasts how long the four modes would take, by Yang and Cong's cost model in Higuchi et al.'s three ways. Pure.

Per epoch, with C the compute time, D the bytes and n the files of the dataset:

    training    C                                                                       (their equation 1)
    storage     max(D / bytes per s, n / files per s) with all transfers in flight      (2)
                n x s per file + D / bytes per s for one reader alone; several queue for what (2) says is shared
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

from dataclasses import replace
from typing import Any

from hpcstage.plan.forecast.terms import Conditions, Phases, Terms, phases
from hpcstage.plan.types import Forecast, ModeForecast, Rates, Workload
from hpcstage.units import format_duration as show

DIRECT, UPFRONT, RUNTIME, AUTO = "direct", "upfront", "runtime", "auto"
TIE_FACTOR = 1.03
"""Forecasts within this factor count as equal; `runtime` is then chosen, as it suffers least from a wrong forecast."""
ONE_EPOCH_TIE_FACTOR = 1.01
ASSUMED_EPOCHS = 10
ASSUMED: dict[str, tuple[Any, str]] = {
    "epochs": (ASSUMED_EPOCHS, f"epochs: {ASSUMED_EPOCHS} (set with --epochs)"),
    "epoch_compute_s": (0.0, "compute: none, so the times are those of reading alone (set with --epoch-compute)"),
    "readers": (0, "readers: 0, so the program reads each file when it needs it (set with --readers)"),
}
"""By name of an unknown value of a workload: the value that a forecast assumes, and what it says of that."""
ASSUMED_SOURCE_BYTES_PER_S = 1e9
ASSUMED_SOURCE_FILE_S = 1e-3
ASSUMED_TRANSFERS = 32
ASSUMED_LOCAL_BYTES_PER_S = 2e9
ASSUMED_LOCAL_FILE_S = 30e-6
ASSUMED_PEER_BYTES_PER_S = 1e9
_STEPS = 400


def forecast(workload: Workload, rates: Rates, given: Conditions | None = None) -> Forecast:
    """Forecasts the four modes. With several nodes `epoch_compute_s` is that of all of them together."""
    given = given or Conditions()
    workload, rates, assumptions = _assume(workload, rates, given.nodes)
    if not given.order_known:
        assumptions.append("order: not known before the program reads; files that it asks for are fetched first")
    if (workload.epochs or 1) > 1:
        assumptions.append("page cache: does not keep the source's files from one epoch to the next")
    terms = phases(workload, rates, given)
    modes = {DIRECT: _direct(terms.first), UPFRONT: _upfront(terms), RUNTIME: _runtime(terms)}
    choice, why = choose(terms.first, modes, from_nodes=terms.later.peers_s > 0)
    modes[AUTO] = replace(modes[choice], mode=AUTO, formula=f"as {choice}")
    return Forecast(modes, choice, why, tuple(assumptions))


def source_pass_s(workload: Workload, rates: Rates, max_rate_bytes_per_s: float | None) -> float:
    """Returns the seconds of copying everything from the source once, with all transfers in flight: D / R."""
    workload, rates, _ = _assume(workload, rates, 1)
    return phases(workload, rates, Conditions(max_rate_bytes_per_s=max_rate_bytes_per_s)).first.copy_s


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


# ---- the choice


def choose(terms: Terms, modes: dict[str, ModeForecast], *, from_nodes: bool = False) -> tuple[str, str]:
    """Returns the fastest mode, and why in one sentence. Near ties go to runtime, but with one epoch to direct."""
    best = min(modes.values(), key=lambda m: m.total_s)
    direct, runtime = modes[DIRECT], modes[RUNTIME]
    if terms.share == 0:
        return DIRECT, "nothing of the dataset fits the local disk's budget"
    if terms.epochs == 1 and direct.total_s <= best.total_s * ONE_EPOCH_TIE_FACTOR:
        return DIRECT, _why_direct(terms)
    if runtime.total_s <= best.total_s * TIE_FACTOR:
        return RUNTIME, _why_runtime(terms, modes, from_nodes)
    if best.mode == DIRECT:
        return DIRECT, "reading the source is fast enough, and copying would cost more than it saves"
    saved = show(runtime.total_s - best.total_s)
    return best.mode, f"the order is not known, and waiting for single files would cost {saved} more than copying first"


def _why_direct(terms: Terms) -> str:
    if terms.readers and terms.compute_s >= terms.read_s(0):
        return "the training takes longer than reading the source, and each file is read once"
    if terms.readers:
        many = f"{terms.readers} readers already keep" if terms.readers > 1 else "reader already keeps"
        return f"the program's {many} the source busy and each file is read once"
    return "each file is read once, and reading it from the source is not slower"


def _why_runtime(terms: Terms, modes: dict[str, ModeForecast], from_nodes: bool) -> str:
    total_s = modes[RUNTIME].total_s
    slower = [mode for mode in (modes[DIRECT], modes[UPFRONT]) if mode.total_s > total_s * ONE_EPOCH_TIE_FACTOR]
    if not slower:
        return "all modes take about the same time, and this one depends least on the source"
    gains = " and ".join(f"{show(mode.total_s - total_s)} less than {mode.mode}" for mode in slower)
    reason = "the copying hides behind the first epoch"
    if terms.epochs > 1:
        where = "from the nodes' disks" if from_nodes else "locally"
        reason += f" and {terms.epochs - 1} later ones read {where}"
    return f"{reason}: {gains}"


# ---- assumptions


def _assume(workload: Workload, rates: Rates, nodes: int) -> tuple[Workload, Rates, list[str]]:
    """Fills in values that are not known, and lists them."""
    unknown = {name: told for name, told in ASSUMED.items() if getattr(workload, name) is None}
    workload = replace(workload, **{name: value for name, (value, _) in unknown.items()})
    notes = [note for _, note in unknown.values()]
    rates = _assume_rates(rates, workload, notes)
    if nodes > 1:
        notes.append("source: all nodes together get no more than one node with all its transfers in flight")
    if nodes > 1 and rates.peer_bytes_per_s is None:
        rates = replace(rates, peer_bytes_per_s=ASSUMED_PEER_BYTES_PER_S)
        notes.append(f"other nodes: {ASSUMED_PEER_BYTES_PER_S / 1e9:.3g} GB/s to each node")
    return workload, rates, notes


def _assume_rates(rates: Rates, workload: Workload, notes: list[str]) -> Rates:
    if rates.reader_bytes_per_s is None and rates.reader_file_s is None:
        known = rates.source_bytes_per_s or ASSUMED_SOURCE_BYTES_PER_S
        rates = replace(rates, reader_file_s=ASSUMED_SOURCE_FILE_S, reader_bytes_per_s=known)
        speed = f"{known / 1e9:.3g} GB/s and {ASSUMED_SOURCE_FILE_S * 1e3:.3g} ms per file"
        notes.append(f"one reader at the source: {speed}")
    if rates.source_bytes_per_s is None and workload.size_bytes:
        rates = replace(rates, source_bytes_per_s=ASSUMED_SOURCE_BYTES_PER_S)
        notes.append(f"source: {ASSUMED_SOURCE_BYTES_PER_S / 1e9:.3g} GB/s")
    if rates.source_files_per_s is None:
        many = ASSUMED_TRANSFERS / max(rates.reader_file_s or 0.0, 1e-5)
        rates = replace(rates, source_files_per_s=many)
        notes.append(f"source: {many:.0f} files/s in parallel")
    if rates.local_bytes_per_s is None and rates.local_file_s is None:
        rates = replace(rates, local_bytes_per_s=ASSUMED_LOCAL_BYTES_PER_S, local_file_s=ASSUMED_LOCAL_FILE_S)
        speed = f"{ASSUMED_LOCAL_BYTES_PER_S / 1e9:.3g} GB/s, {ASSUMED_LOCAL_FILE_S * 1e6:.0f} us per file"
        notes.append(f"local disk: {speed}")
    return rates
