"""Watches what the program opens: the order of first opens, and how far ahead of it the copies are.

Owns the decision whether processes log (which the page tells them), the rings, and when enough is known. `ahead` holds
what is made of the opens of announced files.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcstage.daemon.process.daemonpage import Page
from hpcstage.daemon.queue.queue import Queue
from hpcstage.daemon.queue.states import FINAL
from hpcstage.daemon.reading.ahead import Following, Followings
from hpcstage.daemon.reading.epochs import Announced, Mapped
from hpcstage.daemon.reading.opens import Event, Finder, LostRecords, Opens, finder
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.protocol import nodedir
from hpcstage.protocol.shim import SLOTS

if TYPE_CHECKING:
    from hpcstage.record.parts.part import OrderLead

LOOK_EVERY_S = 0.25
BUSY_EVERY_S = 0.05
BUSY_EVENTS = 1_000
"""After a look that found more than this, the next comes after BUSY_EVERY_S: a ring might be full otherwise."""
STEP_EVENTS = 5_000
"""The most events that one look handles, in a few milliseconds, so that requests are answered in between."""
ENOUGH_PER_FILE = 4
ENOUGH_BESIDES = 100_000
LAST_POLLS = 32
LEAST_RECORD_BYTES = 32
"""The number of lost records is estimated from their bytes. It must not be underrated, or logging would never end."""


class OpenLog:
    """Owns the decision whether processes log, and the rings, from the daemon's start on. Before there is a manifest,
    what comes is only read."""

    def __init__(self, node_dir: Path, page: Page) -> None:
        self._page = page
        self._opens = Opens(node_dir / nodedir.OPENS, page.attached.ended, page.attached.gone)
        self._families: dict[int, list[int]] = {}
        self.next_look = 0.0
        """The time of the next look at the rings."""
        self.is_on = False
        """Whether processes log."""

    @property
    def more(self) -> bool:
        """Whether the last poll left something because it had read enough."""
        return self._opens.more

    def start(self) -> None:
        """Makes processes log what they open from here on."""
        self.is_on = True
        self._page.set_logging(True)

    def stop(self, find: Finder | None) -> list[Event]:
        """Ends the logging. Returns the events that were left; without a manifest none."""
        if not self.is_on:
            return []
        self._page.set_logging(False)
        left = self.poll(find, LAST_POLLS)
        self.is_on = False
        self._opens.close()
        return left

    def poll(self, find: Finder | None, most: int = 1) -> list[Event]:
        """Returns the events that came."""
        found: list[Event] = []
        for _ in range(most):
            found += in_time(self._opens.poll(find))
            if not self._opens.more:
                break
        return found

    def keep_up(self, now: float) -> None:
        """Reads what was logged if it is time: a ring might be full otherwise."""
        if self.is_on and now >= self.next_look:
            self.poll(None)
            self.next_look = now + LOOK_EVERY_S

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until the next look; None if nothing is logged."""
        return max(0.0, self.next_look - now) if self.is_on else None

    def family(self, number: int) -> list[int]:
        """Returns the pids of a process and of its parents."""
        found = self._families.get(number)
        if found is None:
            found = self._families[number] = self._page.attached.families([number % SLOTS])[0]
        return found

    def retire(self, slots: Sequence[int]) -> list[int]:
        """Returns those of the slots of ended processes that another process may have: all is read that was logged."""
        if not self.is_on:
            return list(slots)
        self.next_look = 0.0
        read = [slot for slot in slots if self._opens.is_read(slot)]
        for slot, family in zip(read, self._page.attached.families(read), strict=True):
            self._families.setdefault(self._opens.number(slot), family)
            self._opens.renew(slot)
        return read


class OpenWatch:
    """Handles what programs open, once there is a manifest. It calls `on_wrong` with the name of a table that proved
    wrong."""

    def __init__(
        self,
        log: OpenLog,
        manifest: Manifest,
        queue: Queue,
        on_wrong: Callable[[str], object],
    ) -> None:
        self.first = array("I")
        """Ids in the order in which they were first opened."""
        self.events = 0
        self.opened_files = self.opened_bytes = 0
        """The number of opens of files, and the sum of the sizes of these files."""
        self._log = log
        self._queue = queue
        self._sizes = manifest.sizes
        self._followings = Followings(log.family, on_wrong)
        self._seen = bytearray(len(manifest))
        self._find = finder(manifest)
        self._backlog: deque[Event] = deque()

    # ---- announcements

    def announced(self, one: Announced) -> None:
        """Ends the epoch that a loader read."""
        self._followings.end(one.who)

    def mapped(self, one: Announced, mapped: Mapped) -> None:
        """Follows an announced epoch from now on."""
        if self._log.is_on and len(mapped.ids):
            self._followings.begin(Following(one.who, mapped.where, one.table, time.monotonic_ns()))

    # ---- the clock

    def look(self, now: float) -> None:
        """Handles the events that came, in small steps."""
        if not self._log.is_on or now < self._log.next_look:
            return
        came = self._poll() if len(self._backlog) < STEP_EVENTS else 0
        self._take(STEP_EVENTS)
        if not self._queue.settled:
            self._followings.look(now, lambda id_: self._queue.states.of(id_) in FINAL)
        more = self._log.more or len(self._backlog) >= STEP_EVENTS
        self._log.next_look = now if more else now + (BUSY_EVERY_S if came > BUSY_EVENTS else LOOK_EVERY_S)
        if not self._backlog and self._knows_enough():
            self.stop()

    def stop(self) -> None:
        """Ends the logging and handles what was logged."""
        self._backlog.extend(self._log.stop(self._find))
        self._take(len(self._backlog))

    def _knows_enough(self) -> bool:
        if self._log.more:
            return False
        files = len(self._seen)
        known = len(self.first) == files and self._queue.settled
        return known or self.events > ENOUGH_PER_FILE * files + ENOUGH_BESIDES

    def _poll(self) -> int:
        came = self._log.poll(self._find)
        self._backlog.extend(came)
        return len(came)

    # ---- what came

    def _take(self, most: int) -> None:
        for _ in range(min(most, len(self._backlog))):
            self._one(self._backlog.popleft())

    def _one(self, item: Event) -> None:
        if isinstance(item, LostRecords):
            self.events += item.lost_bytes // LEAST_RECORD_BYTES
            return
        self.events += 1
        self.opened_files += 1
        self.opened_bytes += self._sizes[item.file_id]
        if not self._seen[item.file_id]:
            self._seen[item.file_id] = 1
            self.first.append(item.file_id)
        self._followings.opened(item.slot, item.file_id, item.ns)

    # ---- the record

    def lead(self) -> OrderLead | None:
        """Returns how far ahead the copies were, for the record."""
        return self._followings.lead.record()


def in_time(events: list[Event]) -> list[Event]:
    """Returns the events of several processes sorted by time; those of one process stay in their order."""
    if len({event.slot for event in events}) < 2:
        return events
    latest: dict[int, int] = {}
    times = []
    for event in events:
        ns = 0 if isinstance(event, LostRecords) else event.ns
        latest[event.slot] = max(latest.get(event.slot, 0), ns)
        times.append(latest[event.slot])
    return [events[place] for place in sorted(range(len(events)), key=times.__getitem__)]
