"""What the four modes would take: Yang and Cong's cost model for one node, in Higuchi et al.'s three ways. Pure.

Per epoch, with C the compute time, D the bytes and n the files of the dataset:

    training    C                                                                       (their equation 1)
    storage     max(D / bytes per s, n / files per s) with all transfers in flight      (2)
                n x s per file + D / bytes per s for one reader alone; divided by the readers, never less than (2)
    true cost   max(C, reading) where readers work ahead, C + reading where none do     (6)
    with store  (1 - a) of the storage term + a of the local term, a the staged share   (7, 8)

Preprocessing (3, 4) is part of C: where the files lie does not change it. Of p nodes that share the source each reads
its own p-th part at a p-th of the source's rates; `upfront` copies the whole dataset to each.

    direct   startup + E x epoch(a = 0)
    upfront  copy + startup + E x epoch(a)
    runtime  epoch 1 ends when both the program and the copying have got through: max(startup + epoch(a), copy), then
             (E - 1) x epoch(a). Where the order is not known, files that are asked for are fetched first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpcstage.plan.types import Forecast, ModeForecast, Rates, Workload
from hpcstage.units import format_duration as show

DIRECT, UPFRONT, RUNTIME, AUTO = "direct", "upfront", "runtime", "auto"
TIE = 1.03
"""Forecasts this near to each other are the same; `runtime` then, as it is right about more surprises."""
ONE_EPOCH_TIE = 1.01
ASSUMED_EPOCHS = 10
ASSUMED_READERS = 0
ASSUMED_SOURCE_BYTES_PER_S = 1e9
ASSUMED_SOURCE_FILE_S = 1e-3
ASSUMED_IN_FLIGHT = 32
ASSUMED_LOCAL_BYTES_PER_S = 2e9
ASSUMED_LOCAL_FILE_S = 30e-6
_STEPS = 400


@dataclass(frozen=True)
class Terms:
    """The numbers of the model, all known: seconds for one pass over the dataset."""

    epochs: int
    startup_s: float
    begin_s: float
    """From the start to the first copied file: the scan."""
    compute_s: float
    readers: int
    source_alone_s: float
    """One reader alone reads everything from the source."""
    source_s: float
    """Everything with as many transfers in flight as pay."""
    local_alone_s: float
    copy_s: float
    """Copying what a node reads in an epoch."""
    whole_copy_s: float
    """Copying the dataset to a node."""
    share: float
    """Of the dataset that is staged."""
    order_known: bool
    files: int

    def read_s(self, share: float) -> float:
        """Reading once, a share of it from the local disk."""
        alone = share * self.local_alone_s + (1 - share) * self.source_alone_s
        if self.readers == 0:
            return alone
        return max(alone / self.readers, (1 - share) * self.source_s)

    def epoch_s(self, share: float) -> float:
        """Reading and computing once."""
        read_s = self.read_s(share)
        return self.compute_s + read_s if self.readers == 0 else max(self.compute_s, read_s)

    def say_epoch(self, share: float) -> str:
        """The epoch's formula with its numbers."""
        where = "local" if share == 1 else "source" if share == 0 else f"{share:.0%} local, rest source"
        read = f"{where} {show(self.read_s(share))}"
        compute = f"compute {show(self.compute_s)}"
        return f"({compute} + {read})" if self.readers == 0 else f"max({compute}, {read})"


def forecast(
    workload: Workload,
    rates: Rates,
    *,
    fit: float = 1.0,
    order_known: bool = True,
    begin_s: float = 0.0,
    max_rate_bytes_per_s: float | None = None,
    nodes: int = 1,
) -> Forecast:
    """The four modes. `fit` is the share of the dataset that fits the budget; `begin_s` what the scan takes."""
    workload, rates, assumptions = _assume(workload, rates)
    if not order_known:
        assumptions.append("order: not known before the program reads; files that it asks for are fetched first")
    if (workload.epochs or 1) > 1:
        assumptions.append("page cache: does not keep the source's files from one epoch to the next")
    terms = _terms(workload, rates, fit, begin_s, max_rate_bytes_per_s, nodes)
    terms = replace(terms, order_known=order_known)
    modes = {DIRECT: _direct(terms), UPFRONT: _upfront(terms), RUNTIME: _runtime(terms)}
    choice, why = choose(terms, modes)
    modes[AUTO] = replace(modes[choice], mode=AUTO, formula=f"as {choice}")
    return Forecast(modes, choice, why, tuple(assumptions))


# ---- the modes


def _direct(terms: Terms) -> ModeForecast:
    epoch_s = terms.epoch_s(0)
    total_s = terms.startup_s + terms.epochs * epoch_s
    formula = f"startup {show(terms.startup_s)} + {terms.epochs} x {terms.say_epoch(0)}"
    first_s = terms.startup_s + terms.source_alone_s / terms.files
    return ModeForecast(DIRECT, total_s, first_s, terms.startup_s + epoch_s, epoch_s, formula)


def _upfront(terms: Terms) -> ModeForecast:
    copy_s = terms.begin_s + terms.share * terms.whole_copy_s
    epoch_s = terms.epoch_s(terms.share)
    before_s = copy_s + terms.startup_s
    formula = (
        f"scan and copy {show(copy_s)} + startup {show(terms.startup_s)} + "
        f"{terms.epochs} x {terms.say_epoch(terms.share)}"
    )
    first_s = before_s + terms.local_alone_s / terms.files
    return ModeForecast(UPFRONT, before_s + terms.epochs * epoch_s, first_s, before_s + epoch_s, epoch_s, formula)


def _runtime(terms: Terms) -> ModeForecast:
    first_s, text = _first_epoch(terms)
    later_s = terms.epoch_s(terms.share)
    formula = text
    if terms.epochs > 1:
        formula += f" + {terms.epochs - 1} x {terms.say_epoch(terms.share)}"
    first_batch_s = max(terms.startup_s, terms.begin_s) + terms.source_alone_s / terms.files
    return ModeForecast(RUNTIME, first_s + (terms.epochs - 1) * later_s, first_batch_s, first_s, later_s, formula)


def _first_epoch(terms: Terms) -> tuple[float, str]:
    if not terms.order_known:
        first_s = _unordered_s(terms)
        return (
            first_s,
            f"startup {show(terms.startup_s)} + first epoch, order not known, {show(first_s - terms.startup_s)}",
        )
    program_s = terms.startup_s + terms.epoch_s(terms.share)
    copied_s = terms.begin_s + terms.share * terms.copy_s
    rest_s = (1 - terms.share) * terms.epoch_s(0)
    program = f"startup {show(terms.startup_s)} + {terms.say_epoch(terms.share)}"
    copy = f"scan and copy {show(copied_s)}" + (f" + {show(rest_s)} for what does not fit" if rest_s else "")
    return max(program_s, copied_s + rest_s), f"max({program}, {copy})"


def _unordered_s(terms: Terms) -> float:
    """Epoch 1 where the copying does not know what comes next: step by step through the program's reads.

    Whatever was read is staged (as far as it fits), so of the files still unread the share (staged - read) / (1 - read)
    is found; the others are fetched while the program waits.
    """
    now_s = terms.startup_s
    for step in range(_STEPS):
        read = step / _STEPS
        copied = (now_s - terms.begin_s) / terms.copy_s if terms.copy_s else 1.0
        staged = min(max(copied, terms.share * read, 0.0), terms.share)
        found = min(max((staged - terms.share * read) / (1 - read), 0.0), 1.0)
        now_s += terms.epoch_s(found) / _STEPS
    return now_s


# ---- the choice


def choose(terms: Terms, modes: dict[str, ModeForecast]) -> tuple[str, str]:
    """The fastest mode; near ties go to runtime, but with one epoch to direct. And why, in one sentence."""
    best = min(modes.values(), key=lambda m: m.total_s)
    direct, runtime = modes[DIRECT], modes[RUNTIME]
    if terms.share == 0:
        return DIRECT, "nothing of the dataset fits the local disk's budget"
    if terms.epochs == 1 and direct.total_s <= best.total_s * ONE_EPOCH_TIE:
        return DIRECT, _why_direct(terms)
    if runtime.total_s <= best.total_s * TIE:
        return RUNTIME, _why_runtime(terms, direct, modes[UPFRONT], runtime)
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


def _why_runtime(terms: Terms, direct: ModeForecast, upfront: ModeForecast, runtime: ModeForecast) -> str:
    gains = [
        f"{show(mode.total_s - runtime.total_s)} less than {mode.mode}"
        for mode in (direct, upfront)
        if mode.total_s > runtime.total_s * ONE_EPOCH_TIE
    ]
    reason = "the copying hides behind the first epoch"
    if terms.epochs > 1:
        reason += f" and {terms.epochs - 1} later ones read locally"
    return f"{reason}: {' and '.join(gains)}" if gains else "all are alike, and it depends least on the source"


# ---- terms and assumptions


def _terms(
    workload: Workload, rates: Rates, share: float, begin_s: float, max_rate_bytes_per_s: float | None, nodes: int
) -> Terms:
    files, size = max(1, workload.files) / nodes, workload.size_bytes / nodes
    source_s = _pass_s(files, size, rates.source_files_per_s, rates.source_bytes_per_s) * nodes
    copy_s = max(source_s, _pass_s(files, size, rates.copy_files_per_s, rates.copy_bytes_per_s) * nodes)
    if max_rate_bytes_per_s:
        copy_s = max(copy_s, size * nodes / max_rate_bytes_per_s)
    alone_s = files * (rates.reader_file_s or 0.0) + _over(size, rates.reader_bytes_per_s)
    return Terms(
        epochs=workload.epochs or 1,
        startup_s=workload.startup_s,
        begin_s=begin_s,
        compute_s=workload.epoch_compute_s or 0.0,
        readers=workload.readers or 0,
        source_alone_s=max(alone_s, source_s if nodes > 1 else 0.0),
        source_s=source_s,
        local_alone_s=files * (rates.local_file_s or 0.0) + _over(size, rates.local_bytes_per_s),
        copy_s=copy_s,
        whole_copy_s=copy_s * nodes,
        share=min(1.0, max(0.0, share)),
        order_known=True,
        files=max(1, workload.files),
    )


def _pass_s(files: float, size: float, files_per_s: float | None, bytes_per_s: float | None) -> float:
    return max(_over(files, files_per_s), _over(size, bytes_per_s))


def _over(amount: float, rate: float | None) -> float:
    return amount / rate if rate else 0.0


def _assume(workload: Workload, rates: Rates) -> tuple[Workload, Rates, list[str]]:
    """Fills in what nobody knows, and lists it."""
    notes: list[str] = []
    if workload.epochs is None:
        workload = replace(workload, epochs=ASSUMED_EPOCHS)
        notes.append(f"epochs: {ASSUMED_EPOCHS} (say it with --epochs)")
    if workload.epoch_compute_s is None:
        workload = replace(workload, epoch_compute_s=0.0)
        notes.append("compute: none, times are those of reading alone (say it with --epoch-compute)")
    if workload.readers is None:
        workload = replace(workload, readers=ASSUMED_READERS)
        notes.append("readers: 0, the program reads when it needs a file (say it with --readers)")
    return workload, _assume_rates(rates, workload, notes), notes


def _assume_rates(rates: Rates, workload: Workload, notes: list[str]) -> Rates:
    if rates.reader_bytes_per_s is None and rates.reader_file_s is None:
        known = rates.source_bytes_per_s or ASSUMED_SOURCE_BYTES_PER_S
        rates = replace(rates, reader_file_s=ASSUMED_SOURCE_FILE_S, reader_bytes_per_s=known)
        notes.append(
            f"one reader at the source: {known / 1e9:.3g} GB/s and {ASSUMED_SOURCE_FILE_S * 1e3:.3g} ms per file"
        )
    if rates.source_bytes_per_s is None and workload.size_bytes:
        rates = replace(rates, source_bytes_per_s=ASSUMED_SOURCE_BYTES_PER_S)
        notes.append(f"source: {ASSUMED_SOURCE_BYTES_PER_S / 1e9:.3g} GB/s")
    if rates.source_files_per_s is None:
        many = ASSUMED_IN_FLIGHT / max(rates.reader_file_s or 0.0, 1e-5)
        rates = replace(rates, source_files_per_s=many)
        notes.append(f"source: {many:.0f} files/s in parallel")
    if rates.local_bytes_per_s is None and rates.local_file_s is None:
        rates = replace(rates, local_bytes_per_s=ASSUMED_LOCAL_BYTES_PER_S, local_file_s=ASSUMED_LOCAL_FILE_S)
        speed = f"{ASSUMED_LOCAL_BYTES_PER_S / 1e9:.3g} GB/s, {ASSUMED_LOCAL_FILE_S * 1e6:.0f} us per file"
        notes.append(f"local disk: {speed}")
    return rates
