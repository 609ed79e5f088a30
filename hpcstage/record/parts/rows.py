"""Defines the rows of a node's part of the record: samples and processes. The daemon imports them at its start.

Seconds are relative to `started_unix_s`; an unknown value is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Sample:
    """The daemon's counts of one interval of about a second."""

    start_s: float
    length_s: float
    copied_bytes: int = 0
    """Bytes that copiers read from the source."""
    copied_files: int = 0
    copy_open_ns: int = 0
    copy_read_ns: int = 0
    """Summed over transfers, as `copy_open_ns` and `copy_write_ns` are."""
    copy_write_ns: int = 0
    busy: float = 0.0
    """Mean number of transfers in flight."""
    limited: bool = False
    """The rate cap, the local disk or an empty queue held transfers back: the sample says nothing about the source."""
    shim_opens: int = 0
    """The program's opens for reading at the source (from the page)."""
    shim_open_ns: int = 0
    shim_bytes: int = 0
    shim_read_ns: int = 0
    local_bytes: int = 0
    """Bytes that the program read from staged copies."""
    peer_bytes: int = 0
    """Bytes of staged files that came from other nodes."""
    loader_epochs: int = 0
    """Epochs that PyTorch's loaders ended, summed over processes, as `loader_wait_ns` is."""
    loader_wait_ns: int = 0
    """How long training waited for batches, of the waits that ended in the interval."""


UNCOUNTED_LAYER = "uncounted"
"""In place of a layer: the process attached but counts nothing, because no slot was left for it in the page."""


@dataclass
class ProcessPart:
    """One attached process: the head and the counters of its slot. Or several that have ended, summed up (pid 0)."""

    pid: int
    parent_pid: int
    layer: str
    counters: dict[str, int]
    """The counters by their lower-case names in `protocol.shim.Counter`, without zeros; `direct_<reason>` counts the
    opens at the source with that reason. looked_ns is how long the daemon looked at the process's threads;
    look_inside_source_ns, look_wait_local_ns and the like are what it saw (see `daemon.process.looks`)."""
    hist_open: dict[int, int] = field(default_factory=dict)
    """Opens at the source: their number by bucket (`protocol.shim.bucket_of_ns`)."""
    hist_read: dict[int, int] = field(default_factory=dict)
    processes: int = 1
    """The number of processes in this row. That of several has life_ns among its counters: how long they lived, summed.
    Its times of day are those of the first and the last of them."""
