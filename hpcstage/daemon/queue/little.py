"""Finds out whether the program reads so little of the files that it opens that copying them whole is in vain. Pure.

The evidence is the bytes that the shims counted as read from the files whose opens were logged. There is none
where not all processes measure their reads, where opens were missed, or where files are mapped, since no shim counts
what is read from a mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hpcstage.protocol.shim import Counter

LEAST_OPENS = 64
LEAST_MEAN_BYTES = 1 << 20
"""The least mean size of the files that were opened: smaller ones come as a whole in little more time."""
LITTLE = 0.1
LOOKS = 3
"""The number of looks in a row, a second apart, that have to find little read."""
SEEN_SHARE = 0.9


class Little:
    """Judges the counters at every look and remembers how many looks in a row found little read."""

    def __init__(self) -> None:
        self._looks = 0
        self._are_mapped = False

    def share(
        self, opened: int, opened_bytes: int, sums: Sequence[int], processes: int, are_mapped: Callable[[], bool]
    ) -> float | None:
        """Returns the share of the opened bytes that was read, once it is known to be little; None before. `opened`
        files of `opened_bytes` together were logged; `sums` are the counters of all `processes`; `are_mapped` says
        whether files are mapped now."""
        opens = sums[Counter.HIT_OPENS] + sums[Counter.READY_OPENS] + sums[Counter.SOURCE_OPENS]
        read_bytes = sums[Counter.LOCAL_READ_BYTES] + sums[Counter.SOURCE_READ_BYTES]
        known = opened >= max(LEAST_OPENS, SEEN_SHARE * opens) and sums[Counter.READS_MEASURED] >= processes
        if not known or opened_bytes < opened * LEAST_MEAN_BYTES or not 0 < read_bytes < LITTLE * opened_bytes:
            self._looks = 0
            return None
        self._are_mapped = self._are_mapped or are_mapped()
        self._looks += 1
        return None if self._are_mapped or self._looks < LOOKS else read_bytes / opened_bytes
