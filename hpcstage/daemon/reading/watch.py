"""Watches what the program opens, learns from it and compares it with what was announced.

Owns the decision whether processes log (which the page tells them), the rings, and when enough is known. What is learnt
is in `learn`, how well an order was kept in `kept`. Events and announcements are handled in the order in which they
came: opens that follow the announcement of an epoch wait until its indices are mapped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcstage.daemon.process.page import Page
from hpcstage.daemon.reading.epochs import Announced, Mapped
from hpcstage.daemon.reading.kept import Following, Keeping
from hpcstage.daemon.reading.learn import Dataset, Learner, Listed
from hpcstage.daemon.reading.opens import Event, Finder, Lost, Marked, Opened, Opens, finder
from hpcstage.plan.dataset.manifest import Manifest
from hpcstage.protocol import nodedir
from hpcstage.protocol.shim import SLOTS

LOOK_EVERY_S = 0.25
BUSY_EVERY_S = 0.05
BUSY_EVENTS = 1_000
"""After a look that found more than this, the next comes after BUSY_EVERY_S: a ring might be full otherwise."""
STEP_EVENTS = 5_000
"""The most events that one look handles, in a few milliseconds, so that wants are answered in between."""
MOST_WAITING = 200_000
"""When more events wait for a mapping, they are handled without it."""
ENOUGH_PER_FILE = 4
ENOUGH_BESIDES = 100_000
MOST_POLLS = 2
MOST_POLLED = 10_000
LAST_POLLS = 32
LEAST_RECORD_BYTES = 32
"""The number of lost records is estimated from their bytes. It must not be underrated, or logging would never end."""


class Watch:
    """Owns what the module says. `on_wrong` is called with the key of a dataset whose table proved wrong."""

    def __init__(self, node_dir: Path, page: Page, started: float) -> None:
        self.on_wrong: Callable[[int], object] = bool
        self.on_mapped: Callable[[Announced], object] = bool
        """Is called with announcements whose ids are known."""
        self.learner: Learner | None = None
        self.keeping = Keeping(self._family)
        self.events = 0
        self.opened_files = self.opened_bytes = 0
        """The number of opens of files, and the sum of the sizes of these files."""
        self._sizes: Sequence[int] = ()
        self._watched = False
        self._page = page
        self._started = started
        self._opens = Opens(node_dir / nodedir.OPENS, page.ended, page.gone)
        self._find: Finder | None = None
        self._staged: Callable[[int], bool] = bool
        self._staging: Callable[[], bool] = bool
        self._backlog: deque[Event | Announced] = deque()
        self._awaited: set[Announced] = set()
        """The announcements in the backlog."""
        self._mapped: dict[Announced, Mapped | None] = {}
        self._families: dict[int, list[int]] = {}
        self._logging = False
        self._next = 0.0

    def start(self) -> None:
        """Makes processes log what they open from here on."""
        self._logging = self._watched = True
        self._page.set_logging(True)

    def open(
        self,
        manifest: Manifest,
        *,
        staged: Callable[[int], bool],
        staging: Callable[[], bool],
        known: dict[int, Listed],
    ) -> None:
        """Sets the manifest. `staged` says whether an id is staged, `staging` whether any is missing; `known` are the
        tables of a trace."""
        self._find = finder(manifest)
        self._sizes = manifest.sizes
        self._staged, self._staging = staged, staging
        self.learner = Learner(len(manifest))
        for key, rows in known.items():
            self.learner.dataset(key).tell(rows)

    def dataset(self, key: int) -> Dataset:
        """Returns what is known of one of the program's datasets. May be called only after `open`."""
        assert self.learner is not None
        return self.learner.dataset(key)

    # ---- announcements

    def announced(self, one: Announced) -> None:
        """Takes an announcement before it is answered: opens up to now belong to what was announced before."""
        if self._logging:
            self._poll(MOST_POLLS)
            self._take(MOST_POLLED)  # so that it is mapped with all that was learnt before
            self._backlog.append(one)
            self._awaited.add(one)

    def mapped(self, one: Announced, mapped: Mapped | None) -> None:
        """Takes the ids of an announcement; None if they will never be known."""
        if mapped is not None:
            self.on_mapped(one)
        if one in self._awaited:
            self._mapped[one] = mapped

    # ---- the clock

    def look_after(self, now: float) -> float | None:
        """Returns the seconds until `look` has work; None if nothing is logged."""
        return max(0.0, self._next - now) if self._logging else None

    def look(self, now: float) -> None:
        """Handles the events that came, in small steps."""
        if not self._logging or now < self._next:
            return
        came = self._poll() if len(self._backlog) < STEP_EVENTS else 0
        self._take(STEP_EVENTS)
        if self._find is not None and self._staging():
            self.keeping.look(now - self._started, now, self._staged)
        more = self._opens.more or (len(self._backlog) >= STEP_EVENTS and not self._is_held())
        self._next = now if more else now + (BUSY_EVERY_S if came > BUSY_EVENTS else LOOK_EVERY_S)
        if not self._backlog and self._knows_enough():
            self.stop()

    def stop(self) -> None:
        """Ends the logging and handles what was logged."""
        if not self._logging:
            return
        self._page.set_logging(False)
        self._poll(LAST_POLLS)
        for one in self._awaited:
            self._mapped.setdefault(one, None)
        self._take(len(self._backlog))
        self._logging = False
        self._opens.close()

    def _knows_enough(self) -> bool:
        learner = self.learner
        if learner is None or self._opens.more:
            return False
        # Logging goes on for a while when all is known: a loader may begin after the first epoch of another one.
        known = learner.complete and learner.quiet >= learner.files
        return known or self.events > ENOUGH_PER_FILE * learner.files + ENOUGH_BESIDES

    def _poll(self, most: int = 1) -> int:
        before = len(self._backlog)
        for _ in range(most):
            self._backlog.extend(in_time(self._opens.poll(self._find)))
            if not self._opens.more:
                break
        return len(self._backlog) - before

    # ---- what came

    def _is_known(self, one: Announced) -> bool:
        return one.ended or one in self._mapped

    def _is_held(self) -> bool:
        first = self._backlog[0]
        return isinstance(first, Announced) and not self._is_known(first)

    def _take(self, most: int) -> None:
        backlog = self._backlog
        for _ in range(min(most, len(backlog))):
            if self._is_held():
                if len(backlog) <= MOST_WAITING:
                    return
                self._mapped[backlog[0]] = None  # type: ignore[index]
            self._one(backlog.popleft())

    def _one(self, item: Event | Announced) -> None:
        learner = self.learner
        if isinstance(item, Announced):
            self._change(item)
        elif learner is None:
            return
        elif isinstance(item, Opened):
            self.events += 1
            self.opened_files += 1
            self.opened_bytes += self._sizes[item.file_id]
            learner.opened(item.slot, item.file_id)
            self.keeping.opened(item.slot, item.file_id)
        elif isinstance(item, Marked):
            self.events += 1
            wrong = learner.marked(item.slot, item.key, item.index)
            if wrong is not None:
                self.on_wrong(wrong)
        elif isinstance(item, Lost):
            self.events += item.lost_bytes // LEAST_RECORD_BYTES
            learner.lost(item.slot)

    def _change(self, one: Announced) -> None:
        self.keeping.end(one.who)
        self._awaited.discard(one)
        mapped = self._mapped.pop(one, None)
        if mapped is not None and len(mapped.ids):
            self.keeping.begin(Following(one.who, mapped.where))

    def _family(self, number: int) -> list[int]:
        found = self._families.get(number)
        if found is None:
            found = self._families[number] = self._page.family(number % SLOTS)
        return found

    def retire(self, slots: Sequence[int]) -> list[int]:
        """Of slots whose processes have ended those that another process may have: all is read that was logged."""
        if not self._logging:
            return list(slots)
        self._next = 0.0
        read = [slot for slot in slots if self._opens.is_read(slot)]
        for slot, family in zip(read, self._page.families(read), strict=True):
            self._families.setdefault(self._opens.number(slot), family)
            self._opens.renew(slot)
        return read

    # ---- the record

    def to_json(self) -> dict[str, Any]:
        """Returns what the record says of the opens."""
        tables = [] if self.learner is None else [_table(key, d) for key, d in self.learner.datasets.items()]
        return {
            "kept_share": self.keeping.kept_share,
            "near_share": self.keeping.near_share,
            "announced_opens": self.keeping.opens,
            "lead": self.keeping.lead.to_json(),
            "tables": tables,
            "events": self.events,
            "lost_bytes": self._opens.lost_bytes,
            "opened_files": len(self.learner.first) if self.learner is not None and self._watched else None,
        }


def _table(key: int, dataset: Dataset) -> dict[str, Any]:
    if dataset.wrong:
        source = "wrong"
    elif dataset.told:
        source = "trace" if isinstance(dataset.rows, Listed) else "program"
    else:
        source = "opens"
    counts = {"samples": dataset.learnt.samples, "judged": dataset.judged, "agreed": dataset.agreed}
    return {"key": key, "source": source, **counts}


def in_time(events: list[Event]) -> list[Event]:
    """Returns the events of several processes sorted by time; those of one process stay in their order."""
    if len({event.slot for event in events}) < 2:
        return events
    latest: dict[int, int] = {}
    times = []
    for event in events:
        ns = 0 if isinstance(event, Lost) else event.ns
        latest[event.slot] = max(latest.get(event.slot, 0), ns)
        times.append(latest[event.slot])
    return [events[place] for place in sorted(range(len(events)), key=times.__getitem__)]
