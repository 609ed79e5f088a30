"""Puts bytes and files into the samples in which they came from the source. Pure.

The counters grow when a transfer or a read ends: of a read that took two seconds, all bytes are in the sample in which
it ended, and of dozens of transfers that began together, those of all files are in one or two samples. Rates from such
counts would show peaks that no source gave. A transfer or read counts as evenly spread over the time that it took, on
the mean of those that ended in the sample. Bytes that came faster than any source gives them are the node's memory's,
unless the program reads large files in pieces: the kernel then reads them from the source ahead of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcstage.record.figures.speeds import CACHED_BYTES_PER_S, reads_pieces
from hpcstage.record.parts.rows import Sample
from hpcstage.units import NS_PER_S

SHORT_SHARE = 0.05
"""Amounts stay where they are if they took less than this share of the sample to come."""


def arrived(samples: Sequence[Sample]) -> list[Sample]:
    """Returns samples, given in order of time, whose bytes are those that came from the source meanwhile."""
    copied = _spread(
        samples, [s.copied_bytes for s in samples], [_each_s(s.copy_read_ns, s.copied_files) for s in samples]
    )
    is_ahead = reads_pieces(samples)
    from_source = [s.shim_bytes if is_ahead else _from_source(s) for s in samples]
    read = _spread(samples, from_source, [_each_s(s.shim_read_ns, s.shim_reads) for s in samples])
    return [
        replace(sample, copied_bytes=round(copied_bytes), shim_bytes=round(shim_bytes))
        for sample, copied_bytes, shim_bytes in zip(samples, copied, read, strict=True)
    ]


def _each_s(total_ns: int, number: int) -> float:
    """Returns the mean seconds of a transfer or read; 0 where none ended."""
    return total_ns / NS_PER_S / number if number else 0.0


def _from_source(sample: Sample) -> int:
    """Returns the bytes that the program read at the source; 0 if they came out of the node's memory."""
    return sample.shim_bytes if sample.shim_bytes * NS_PER_S <= CACHED_BYTES_PER_S * sample.shim_read_ns else 0


def _spread(samples: Sequence[Sample], amounts: Sequence[int], lengths_s: Sequence[float]) -> list[float]:
    """Returns for each sample what came meanwhile. `amounts` are of what ended in the samples and took `lengths_s`."""
    found = [float(amount) for amount in amounts]
    for at, (sample, amount, seconds) in enumerate(zip(samples, amounts, lengths_s, strict=True)):
        if amount and seconds > SHORT_SHARE * sample.length_s:
            _move_back(samples, found, at, amount, seconds)
    return found


def _move_back(samples: Sequence[Sample], found: list[float], at: int, amount: int, seconds: float) -> None:
    """Moves parts of what ended in one sample to those before it."""
    begin_s = samples[at].start_s - seconds
    per_s = amount / (seconds + samples[at].length_s)
    for before in range(at - 1, -1, -1):
        end_s = samples[before].start_s + samples[before].length_s
        if end_s <= begin_s:
            break
        moved = (end_s - max(begin_s, samples[before].start_s)) * per_s
        found[before] += moved
        found[at] -= moved
