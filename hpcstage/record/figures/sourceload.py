"""Estimates how long a file takes at the source for a number of readers, from what the run itself measured. Pure.

The run measures the source at two loads. Files that were copied with no other beside them say how long one reader waits
for a file, and the copiers at full load say how many files the source passes in a second. Between the two, a source of
any kind is bounded: `K` readers, each of which does something else for `think_s` between files, wait for a file no less
than one reader does, and together they get no more than the whole source passes. At one end of the range their requests
meet only where they must; at the other all read at the same moments, as readers do that began together and compute for
the same time. Where one reader alone was faster than all together, either the copiers were slow or the source allows
short bursts: the ends of the range are then what the one reader got and what all of them got.

Where the source changed over time, the bounds are taken for each sample of the run, and their mean is weighted by time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from hpcstage.record.figures.arrivals import each_s, spread
from hpcstage.record.parts.part import NodePart
from hpcstage.record.parts.rows import Sample
from hpcstage.units import NS_PER_S

LEAST_FILES = 3
"""At least this many files must have been copied alone to say how long a file takes for one reader."""
LEAST_SEEN_S = 0.5
"""The copiers must have been at full load for at least this long for their samples to be used one by one."""
MOST_SAMPLES = 400
FULL_SHARE = 0.6
"""The source sets the copiers' rate if their transfers spend at least this share of their time at the source."""
REMEMBERED_S = 1.2
"""A client of a network file system may still know a name that it looked up this long ago; about a second is usual."""
UNSTEADY_SHARE = 0.25
"""The source changes if its smoothed rates differ from their mean by more than this share of it, on average."""
LEAST_TURNS = 6
"""The mean of a source that changes holds if the smoothed rates crossed it at least this often."""
KEPT_SHARE, DROPPED_SHARE = 0.9, 0.1
"""A client keeps what was read if at least the first share of a file's pages is in memory after a later open; it does
not if at most the second share is."""
FITS_SHARE, TOO_LARGE_SHARE = 0.5, 1.5
"""All files stay in memory if they take less than the first share of it, and none if more than the second."""
LEAST_MEAN_S = 1.2
"""A rate that was seen for a shorter time is no mean, as other jobs come and go in seconds."""
RATE_SHARE = 0.5
"""LEAST_MEAN_S matters where the source's rate, not its latency, sets at least this share of the time of a file."""
LEAST_HALF = 4
"""Each half of the rates needs at least this many samples for their difference to say how the source changed."""
MOST_FACTOR = 2.0
"""The rates at full load are raised at most to this multiple, where the mean of all copying is larger."""
Rates = tuple[tuple[float, float], ...]
"""Pairs (seconds, files per second)."""


@dataclass(frozen=True)
class Range:
    """The bounds between which a time lies, in seconds."""

    low: float
    high: float

    @property
    def middle(self) -> float:
        """Returns the mean of the bounds, which is the best guess."""
        return (self.low + self.high) / 2


@dataclass(frozen=True)
class Seen:
    """The figures that one node measured of the source."""

    alone_files: int
    open_s: float
    read_s: float
    """Mean seconds to open and to read a file that was copied alone."""
    cold_open_s: float | None
    """Seconds of an open whose name the client had forgotten; None: not measured."""
    kept_share: float | None
    window_bytes: int | None
    """The largest window that the kernel reads ahead."""
    memory_bytes: int | None
    rates: Rates
    """The rates that the node got while only the source set them."""
    loaded_s: float | None
    """Mean seconds that a file took at the source at full load."""
    flying: float
    """Mean number of transfers in flight at full load."""
    copying_s: float
    """Seconds in which any file was being copied."""
    looked_up: bool
    """Whether the scan had looked the names up so shortly before that the client still knew them."""


def seen_of(node: NodePart) -> Seen:
    """Computes a node's figures of the source from its samples and totals."""
    alone = node.alone
    files = alone.files or 0
    full = _at_full_load(node)
    usable = [sample for sample, _ in full]
    copied = sum(s.copied_files for s in usable)
    at_source_s = sum(s.copy_open_ns + s.copy_read_ns for s in usable) / NS_PER_S
    return Seen(
        alone_files=files,
        open_s=(alone.open_ns or 0) / NS_PER_S / max(files, 1),
        read_s=(alone.read_ns or 0) / NS_PER_S / max(files, 1),
        cold_open_s=None if alone.cold_open_ns is None else alone.cold_open_ns / NS_PER_S,
        kept_share=alone.kept_share,
        window_bytes=alone.window_bytes,
        memory_bytes=node.memory_bytes,
        rates=_rates(node, full),
        loaded_s=at_source_s / copied if copied else None,
        flying=fmean([s.busy for s in usable]) if usable else 0.0,
        copying_s=node.totals.copy_busy_s or 0.0,
        looked_up=node.scan_s is not None and node.scan_s < REMEMBERED_S,
    )


Full = tuple[Sample, float]
"""A sample at full load, and the number of files for whose copying the source worked meanwhile."""


def _at_full_load(node: NodePart) -> list[Full]:
    samples = node.samples
    each = [each_s(s.copy_open_ns + s.copy_read_ns, s.copied_files) for s in samples]
    files = spread(samples, [s.copied_files for s in samples], each)
    found = [(s, n) for s, n in zip(samples, files, strict=True) if not s.limited and s.busy >= 1 and s.length_s > 0]
    return found[1:]


def _rates(node: NodePart, full: Sequence[Full]) -> Rates:
    """Returns the rates of the samples at full load; where these are too short, the mean of all copying.

    The mean of all copying is too low by what its beginning and end cost, but of a few samples chance decides how many
    of the files in flight end in them: the larger mean holds.
    """
    whole = _of_all_copying(node)
    if sum(s.length_s for s, _ in full) < LEAST_SEEN_S or not any(s.copied_files for s, _ in full):
        return whole
    sampled = _joined(full)
    factor = min(MOST_FACTOR, max(1.0, mean_rate(whole) / mean_rate(sampled)))
    return tuple((seconds, rate * factor) for seconds, rate in sampled)


def _of_all_copying(node: NodePart) -> Rates:
    """Returns the mean rate from the files that were copied alone to the last one."""
    alone = node.alone
    busy_s = (node.totals.copy_busy_s or 0.0) - ((alone.open_ns or 0) + (alone.read_ns or 0)) / NS_PER_S
    files = (node.totals.source_files or 0) - (alone.files or 0)
    return ((busy_s, files / busy_s),) if busy_s > 0 and files > 0 else ()


def _joined(full: Sequence[Full]) -> Rates:
    """Joins neighbours into at most MOST_SAMPLES samples."""
    step = -(-len(full) // MOST_SAMPLES)
    groups = [full[at : at + step] for at in range(0, len(full), step)]
    seconds = [sum(s.length_s for s, _ in group) for group in groups]
    files = [sum(n + s.shim_opens for s, n in group) for group in groups]
    return tuple((length_s, number / length_s) for length_s, number in zip(seconds, files, strict=True))


@dataclass(frozen=True)
class Load:
    """The figures of the source that all nodes together measured."""

    alone: Range | None
    """Seconds of a file for one reader that opens it as a program does."""
    open: Range | None
    """The part of `alone` before the first byte."""
    rates: Rates
    loaded_s: float | None
    flying: float
    keeps: bool | None
    """Whether a client keeps what was read for a later open."""
    copying_s: float
    """Seconds in which files were being copied on the node where that took longest."""
    request_s: float = 0.0
    """Mean seconds of an open whose name was known, or of one with its look-up where the scan was long ago."""
    window_bytes: int | None = None
    """The largest window that the kernel reads ahead; None: unknown, or not the same on all nodes."""

    @property
    def read_s(self) -> float:
        """Returns the part of `alone` after the open."""
        return self.alone.low - self.open.low if self.alone and self.open else 0.0

    @property
    def waiting_s(self) -> float:
        """Returns the part of `read_s` that is more than a file takes when the source passes as many as it can."""
        rate = mean_rate(self.rates)
        return max(0.0, self.read_s - 1 / rate) if rate else 0.0

    def cycle(self, readers: float, think_s: float) -> Range | None:
        """Returns the seconds from one file of a reader to its next, with this many readers."""
        if self.alone is None or not self.rates:
            return None
        low = self._mean(self.rates, readers, think_s, self.alone.low, together=False)
        high = self._mean(self.rates, readers, think_s, self.alone.high, together=True)
        if self.loaded_s is not None and readers <= self.flying:
            high = max(low, min(high, think_s + max(self.loaded_s, self.alone.high)))
        drift = self._drift(readers, think_s)
        return Range(max(0.0, low - drift), high + drift)

    def is_steady(self) -> bool:
        """Returns whether the mean of the measured rates holds for the source over a longer time."""
        smooth, mean = _smooth(self.rates), mean_rate(self.rates)
        above = [rate > mean for rate in smooth]
        return len(smooth) <= 1 or sum(one is not other for one, other in pairwise(above)) >= LEAST_TURNS

    def is_brief(self, readers: float) -> bool:
        """Returns whether the source's rate, which others share, sets the time of a file but was seen too briefly."""
        rate = mean_rate(self.rates)
        if self.alone is None or not rate or self.copying_s >= LEAST_MEAN_S:
            return False
        each_s = max(self.alone.low, readers / rate)
        passing_s = each_s if readers / rate >= self.alone.low else 1 / rate
        return passing_s >= RATE_SHARE * each_s

    def _drift(self, readers: float, think_s: float) -> float:
        """Returns by how many seconds the cycle times of both halves of the rates differ from their middle."""
        half = len(self.rates) // 2
        if half < LEAST_HALF or self.alone is None:
            return 0.0
        parts = [self.rates[:half], self.rates[half:]]
        one, other = (self._mean(part, readers, think_s, self.alone.middle, together=False) for part in parts)
        return abs(one - other) / 2

    def _mean(self, rates: Rates, readers: float, think_s: float, alone_s: float, *, together: bool) -> float:
        first = self._first_rate()
        least_s = 1 / first if first else 0.0
        scale = min(1.0, alone_s / least_s) if least_s and not (together and self._is_full()) else 1.0
        latency_s = max(0.0, alone_s - least_s)
        passed = total_s = 0.0
        for seconds, rate in rates:
            total_s += seconds
            if rate > 0:
                delay_s, service_s = think_s + latency_s, scale / rate
                bound_s = max(delay_s + service_s, readers * service_s)
                together_s = think_s + max(latency_s + service_s, readers * service_s)
                each_s = together_s if together else bound_s
                passed += seconds / each_s
        return total_s / passed if passed else float("inf")

    def _is_full(self) -> bool:
        """Returns whether the copiers spent their time at the source, so that the source, not they, set the rate."""
        seconds = sum(s for s, _ in self.rates)
        passed = sum(s * rate for s, rate in self.rates)
        return bool(seconds and self.loaded_s and self.loaded_s * passed / seconds >= FULL_SHARE * self.flying)

    def _first_rate(self) -> float:
        """Returns the rate of the time right after files were copied alone."""
        return mean_rate(self.rates[:3])


def mean_rate(rates: Rates) -> float:
    seconds = sum(s for s, _ in rates)
    return sum(s * rate for s, rate in rates) / seconds if seconds else 0.0


def _smooth(rates: Rates) -> list[float]:
    return [mean_rate(rates[max(0, at - 1) : at + 2]) for at in range(len(rates))]


def _evened(rates: Rates) -> Rates:
    """Joins the rates into one where they differ no more than by chance (a file ends in one sample or in the next)."""
    mean, smooth = mean_rate(rates), _smooth(rates)
    spread = sum(abs(rate - mean) for rate in smooth) / len(smooth) if smooth else 0.0
    if spread > UNSTEADY_SHARE * mean:
        return rates
    seconds = sum(s for s, _ in rates)
    return ((seconds, mean),) if seconds else ()


def load_of(seen: Iterable[Seen], size_bytes: int | None) -> Load:
    """Combines the nodes' figures. `size_bytes`, that of all files, tells whether they fit into memory."""
    nodes = list(seen)
    alone = [node for node in nodes if node.alone_files >= LEAST_FILES]
    cold = next((node.cold_open_s for node in nodes if node.cold_open_s is not None), None)
    read_s, open_s = _per_file([n.read_s for n in alone], alone), _per_file([n.open_s for n in alone], alone)
    opened = _opened(alone, open_s, cold)
    whole = None if opened is None else Range(opened.low + read_s, opened.high + read_s)
    loaded = [node.loaded_s for node in nodes if node.loaded_s is not None]
    memory = [node.memory_bytes for node in nodes if node.memory_bytes is not None]
    windows = {node.window_bytes for node in nodes}
    return Load(
        alone=whole,
        open=opened,
        rates=_evened(_together([node.rates for node in nodes if node.rates])),
        loaded_s=fmean(loaded) if loaded else None,
        flying=sum(node.flying for node in nodes),
        keeps=_keeps(nodes, size_bytes, min(memory, default=None)),
        copying_s=max((node.copying_s for node in nodes), default=0.0),
        request_s=open_s,
        window_bytes=windows.pop() if len(windows) == 1 else None,
    )


def _per_file(seconds: Sequence[float], alone: Sequence[Seen]) -> float:
    """Returns the mean of nodes' values over the files that they copied alone."""
    files = sum(node.alone_files for node in alone)
    return sum(s * n.alone_files for s, n in zip(seconds, alone, strict=True)) / files if files else 0.0


def _opened(alone: Sequence[Seen], warm_s: float, cold_s: float | None) -> Range | None:
    """Returns the seconds of an open that includes the look-up of the name.

    Where the scan had just looked the names up and no file was opened again later, the cost of the look-up is unknown,
    but at most about that of the open.
    """
    if not alone:
        return None
    if cold_s is not None and any(n.looked_up for n in alone):
        return Range(max(warm_s, cold_s), max(warm_s, cold_s))
    if any(n.looked_up for n in alone):
        return Range(warm_s, 2 * warm_s)
    least_s = warm_s if cold_s is None else min(warm_s, cold_s)
    return Range(least_s, least_s)


def _together(rates: Sequence[Rates]) -> Rates:
    """Adds up the mean rates of several nodes, which copy at the same time."""
    if len(rates) <= 1:
        return rates[0] if rates else ()
    means = [sum(s * rate for s, rate in node) / sum(s for s, _ in node) for node in rates]
    return ((fmean([sum(s for s, _ in node) for node in rates]), sum(means)),)


def _keeps(nodes: Sequence[Seen], size_bytes: int | None, memory_bytes: int | None) -> bool | None:
    shares = [node.kept_share for node in nodes if node.kept_share is not None]
    if shares and max(shares) <= DROPPED_SHARE:
        return False
    if size_bytes is None or memory_bytes is None:
        return None
    if size_bytes > TOO_LARGE_SHARE * memory_bytes:
        return False
    return True if shares and min(shares) >= KEPT_SHARE and size_bytes < FITS_SHARE * memory_bytes else None
