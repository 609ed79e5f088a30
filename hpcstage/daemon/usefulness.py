"""Holds copying back where it is of no use: it pauses while only programs without the shim read the datasets, which use
no copies, and ends where programs read little of the files that they open.

In a node group copying is always taken to be of use, as other nodes may need the files.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

from hpcstage.daemon.copying.engine import Engine
from hpcstage.daemon.copying.openfiles import LargeInUse
from hpcstage.daemon.copying.sightings import Sightings
from hpcstage.daemon.queue.useful import Little, Unserved
from hpcstage.daemon.reading.openwatch import OpenWatch
from hpcstage.daemon.resources import Resources
from hpcstage.problem import Problem
from hpcstage.protocol.shim import Counter

ACTIVE_S = 5.0
"""A process that opened files of the datasets and did nothing with them for this long does not use them now."""
_OPENS = (Counter.HIT_OPENS, Counter.READY_OPENS, Counter.SOURCE_OPENS)


class Usefulness:
    """Follows the programs of a node. It calls `stop` where copying is in vain; never in a group (not `is_alone`)."""

    def __init__(
        self,
        base: Resources,
        engine: Engine,
        watch: OpenWatch,
        in_use: LargeInUse,
        stop: Callable[[], None],
        *,
        is_alone: bool,
    ) -> None:
        self.unserved = Unserved()
        self._base = base
        self._engine = engine
        self._watch = watch
        self._in_use = in_use
        self._stop = stop
        self._is_alone = is_alone
        self._little = Little()
        self._opens = 0
        """The number of opens of attached processes at the last look."""

    @cached_property
    def _sightings(self) -> Sightings:
        """The watches for opens, set at their first use: where a user may have few, those for changes come first."""
        return Sightings(self._base.helpers, self._engine.manifest, self._base.own_bytes)

    def given(self, id_: int) -> None:
        """Notes that a copier is going to open a file."""
        if self._is_alone:
            self._sightings.given(id_)

    def served(self, now: float) -> None:
        """Ends a pause, since a process with the shim uses the datasets."""
        if self._is_alone:
            self.unserved.served(now)
            self._engine.is_paused = False

    def look(self, now: float, *, is_waited_for: bool) -> None:
        """Looks at who reads the datasets. `is_waited_for` says that somebody waits for the end of the staging."""
        if self._is_alone and not self._engine.queue.states.closed:
            self._stop_if_little_is_read()
            self._pause_if_unserved(now, is_waited_for=is_waited_for)

    def close(self) -> None:
        """Ends the looking: there is nothing more to copy."""
        if "_sightings" in vars(self):
            self._sightings.close()

    def _stop_if_little_is_read(self) -> None:
        processes, watch = self._base.page.attached, self._watch
        share = self._little.share(
            watch.opened_files,
            watch.opened_bytes,
            processes.sums(),
            processes.number(),
            lambda: self._in_use.are_mapped(self._base.programs),
        )
        if share is not None:
            text = f"copying was stopped, as the program reads {share:.1%} of the bytes of the files that it opens"
            remedy = "--mode upfront copies all files before the program starts"
            self._base.problems.append(Problem("little-read", text, remedy))
            self._stop()

    def _pause_if_unserved(self, now: float, *, is_waited_for: bool) -> None:
        flights, engine, processes = self._engine.queue.flights, self._engine, self._base.page.attached
        sums = processes.sums()
        before, self._opens = self._opens, sum(sums[c] for c in _OPENS)
        if self._opens > before or is_waited_for or processes.are_using(ACTIVE_S):
            self._sightings.pass_over(flights.needed())
            self.served(now)
            return
        seen = self._sightings.look(self._base.programs, processes.pids(), flights.needed(), now)
        if seen is not None:
            self.unserved.saw(seen, now)
            if self.unserved.is_paused and not engine.is_paused:
                engine.pause()
            engine.is_paused = self.unserved.is_paused
