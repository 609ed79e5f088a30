"""Decides whether copying is of no use: the program reads little of its files, or has no shim that would read copies.

Pure: callers pass `now`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from hpcstage.protocol.shim import Counter

LEAST_OPENS = 64
LEAST_MEAN_BYTES = 1 << 20
"""The least mean size of the files that were opened: smaller ones come as a whole in little more time."""
LITTLE_SHARE = 0.1
LOOKS_IN_A_ROW = 3
"""The number of looks in a row, a second apart, that have to find little read."""
SEEN_SHARE = 0.9
LEAST_FILES = 3
LEAST_S = 0.5
"""Fewer files are enough, too, if this much time lies between the first and the last look that showed one."""
QUIET_S = 10.0
MOST_DOUBLINGS = 10


class Little:
    """Finds out whether the program reads so little of the files that it opens that copying them whole is in vain.

    The evidence is the bytes that the shims counted as read from the files whose opens were logged. There is none where
    not all processes measure their reads, where opens were missed, or where files are mapped, since no shim counts what
    is read from a mapping.
    """

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
        if not known or opened_bytes < opened * LEAST_MEAN_BYTES or not 0 < read_bytes < LITTLE_SHARE * opened_bytes:
            self._looks = 0
            return None
        self._are_mapped = self._are_mapped or are_mapped()
        self._looks += 1
        return None if self._are_mapped or self._looks < LOOKS_IN_A_ROW else read_bytes / opened_bytes


class Unserved:
    """Decides when copying pauses because only programs without the shim read the datasets, which use no copies.

    Copying pauses once several files were seen to be read like that, or one for a moment. It goes on as soon as a
    process with the shim opens a file, or when no such reading was seen for a while, which doubles with each further
    pause.
    """

    def __init__(self) -> None:
        self.files: set[int] = set()
        """The files that programs without the shim were seen to read when copying paused."""
        self._paused_s = 0.0
        self._paused_at: float | None = None
        self._pauses = 0
        self._recent: set[int] = set()
        self._first = self._last = 0.0

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be copied now."""
        return self._paused_at is not None

    def paused_s(self, now: float) -> float:
        """Returns how long copying has paused in all."""
        return self._paused_s + (now - self._paused_at if self._paused_at is not None else 0.0)

    def saw(self, files: Collection[int], now: float) -> None:
        """Notes the files that a look has shown to be read."""
        if files:
            self._first = self._first if self._recent else now
            self._last = now
            self._recent.update(files)
        elif self._recent and now - self._last >= QUIET_S * 2 ** min(max(self._pauses - 1, 0), MOST_DOUBLINGS):
            self.served(now)
        if not self.is_paused and self._is_enough():
            self._paused_at = now
            self._pauses += 1
        if self.is_paused:
            self.files |= self._recent

    def _is_enough(self) -> bool:
        return len(self._recent) >= LEAST_FILES or (bool(self._recent) and self._last - self._first >= LEAST_S)

    def served(self, now: float) -> None:
        """Notes that copies are of use, or may be: copying goes on."""
        self._recent.clear()
        self._paused_s = self.paused_s(now)
        self._paused_at = None
