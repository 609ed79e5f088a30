"""The rule by which large files are copied while programs of this node read large files at the source. Pure.

1. Follow. Beyond FOLLOWED_BYTES read in a row, and beyond any run of the file that a jump ended, what comes next is
   brought first: as many bytes as the run has, at most MOST_AHEAD_BYTES, past the end of the file into the next ones of
   the order. A jump empties this window.
2. Stand aside. Of one file at a time that programs read, one thread brings the rest in chunks of about CHUNK_NS. A
   chunk begins while the node is quiet, and once it was quiet, since the last one began, for as long as that took.
   Never is more copied of a file than twice what was read of it. What page faults brought is not counted before
   MAPPED_SHARE of the file was; then all of it counts as read, since what the copier reads is in the page cache, too.
3. Wait. A reader waits for a block that follows it, see the shim. Nobody waits for what stands aside.
4. A whole file takes the place of the open file.

The shim measures runs and what was read, copiers what a chunk takes and how long the node was quiet, the daemon who has
which file open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

FOLLOWED_BYTES = 8 << 20
MOST_AHEAD_BYTES = 64 << 20
CHUNK_NS = 5_000_000
MAPPED_SHARE = 1 / 4
LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 64 << 10, 1 << 20


class Front(NamedTuple):
    """How far a reader is."""

    at: int
    """Where its last read ended."""
    run: int
    """How much it has read in a row up to there."""


@dataclass(frozen=True)
class FileReads:
    """What programs of this node have read of a file since it has a row."""

    size_bytes: int
    read_bytes: int = 0
    """By calls, at the source or of what has arrived."""
    faults_bytes: int = 0
    jumped_bytes: int = 0
    """The longest run that a jump ended."""
    fronts: tuple[Front, ...] = ()
    ahead_bytes: int = 0
    """What is to come of it, from its begin on, ahead of a reader of the file before it in the order."""

    @property
    def credit_bytes(self) -> int:
        """The most that is copied of it beside its readers."""
        return 2 * (self.read_bytes + self.faults_bytes)

    def _windows(self) -> list[range]:
        least = max(FOLLOWED_BYTES, self.jumped_bytes)
        found = [range(at, at + min(run, MOST_AHEAD_BYTES)) for at, run in self.fronts if run > least]
        return [range(self.ahead_bytes), *found] if self.ahead_bytes else found

    def windows(self) -> list[range]:
        """Returns the bytes that come ahead of readers in order."""
        clipped = (range(window.start, min(window.stop, self.size_bytes)) for window in self._windows())
        return [window for window in clipped if window]

    @property
    def beyond_bytes(self) -> int:
        """How many bytes of the next files of the order come ahead of a reader, too."""
        return max((window.stop - self.size_bytes for window in self._windows()), default=0)


def set_aside(credits: Mapping[int, int], now: int | None, least_bytes: int) -> int | None:
    """Returns the file of which the rest is brought: the one of which that is done now as long as it has credit, else
    the one that has most, if that is so much."""
    if now is not None and credits.get(now, 0) > 0:
        return now
    best = max(credits, key=credits.__getitem__, default=None)
    return best if best is not None and credits[best] >= least_bytes else None


class Aside:
    """Decides when a chunk of what stands aside begins, and how large it is."""

    def __init__(self) -> None:
        self.chunk_bytes = LEAST_CHUNK_BYTES
        self._took_ns = 0
        self._quiet_ns = 0
        """How long the node had been quiet when the last chunk began."""

    def may_begin(self, quiet_ns: int, *, is_quiet: bool) -> bool:
        """Returns whether a chunk may begin. `quiet_ns`: how long the node has been quiet until now."""
        return is_quiet and quiet_ns - self._quiet_ns >= self._took_ns

    def begins(self, quiet_ns: int) -> None:
        """Notes that a chunk begins."""
        self._quiet_ns = quiet_ns

    def ended(self, size_bytes: int, took_ns: int) -> None:
        """Notes what the chunk took: the next one is to take CHUNK_NS, as far as is known."""
        self._took_ns = took_ns
        fitting = min(size_bytes * CHUNK_NS // max(took_ns, 1), 2 * self.chunk_bytes, MOST_CHUNK_BYTES)
        self.chunk_bytes = max(LEAST_CHUNK_BYTES, fitting - fitting % LEAST_CHUNK_BYTES)
