"""Reads from an earlier record what the forecast of the command's next run needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from hpcstage.record.schema import Record, TimeSplit


@dataclass(frozen=True)
class Measured:
    """The figures of an earlier run; None is unknown. `source` names the run."""

    epochs: int | None = None
    epoch_compute_s: float | None = None
    """Seconds that one epoch would take if reading took no time: computing and preprocessing."""
    startup_s: float | None = None
    readers: int | None = None
    """Loader workers of one training process; 0: it reads without prefetch."""
    source_bytes_per_s: float | None = None
    reader_bytes_per_s: float | None = None
    local_bytes_per_s: float | None = None
    """As in `plan.types.Rates`."""
    source: str = ""


def workload_of(record: Record) -> Measured:
    """Returns the epochs, the compute time per epoch, the time before the first read, the readers of a run, and how
    fast it read."""
    split = record.time_split
    epochs = _epochs_by_opens(record) or split.loader_epochs or None
    return Measured(
        epochs=epochs,
        epoch_compute_s=_epoch_compute_s(split, epochs),
        startup_s=split.other_s if split.loader_workers is not None and split.compute_s is not None else None,
        readers=split.loader_workers,
        source_bytes_per_s=record.contention.typical_bytes_per_s or None,
        reader_bytes_per_s=_median(node.reader_bytes_per_s for node in record.nodes),
        local_bytes_per_s=_median(node.disk_read_bytes_per_s for node in record.nodes),
        source=f"record of {record.run.id}",
    )


def _median(rates: Iterable[float | None]) -> float | None:
    return median(known) if (known := [rate for rate in rates if rate]) else None


def _epochs_by_opens(record: Record) -> int | None:
    """Returns how often the datasets' files were opened, if that is about a whole number; None if not.

    Opens are asked first, as a loader counts its epochs over validation data, too.
    """
    known = [dataset.files for dataset in record.datasets if dataset.files is not None]
    opens, files = record.coverage.opens, sum(known)
    if not opens or not files or len(known) < len(record.datasets):
        return None
    times = opens / files
    return round(times) if times >= 0.9 and abs(times - round(times)) < 0.1 * times else None


def _epoch_compute_s(split: TimeSplit, epochs: int | None) -> float | None:
    if not epochs or split.compute_s is None:
        return None
    return (split.compute_s + (split.preprocess_s or 0.0)) / epochs
