"""Drains a watched directory while programs write to it: joins the watch, the ledger, the journal and the uploader.

Owns one drain from its start to its end, as a service of an event loop: descriptors, work by the clock, an end in a
bounded time. Every call is short: what may hang is done by the uploader's process. It decides nothing that the ledger
does not; whether files may be carried now, since programs wait for reads, is asked for.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from hpcstage.outputs.facts import (
    Action,
    ActionResult,
    Deed,
    Ending,
    EntryKind,
    Fingerprint,
    Leftover,
    SeenEvent,
    SeenKind,
)
from hpcstage.outputs.freeing import leaves_times
from hpcstage.outputs.journal import Journal
from hpcstage.outputs.ledger import NO_TIME, Ledger
from hpcstage.outputs.places import found_below
from hpcstage.outputs.prepare import PreparedPlace
from hpcstage.outputs.state import DrainFindings
from hpcstage.outputs.told import ToldPaths
from hpcstage.outputs.unseen import name_unseen
from hpcstage.outputs.watch import PAIR_S, TreeWatch
from hpcstage.outputs.workers import THREADS, UploaderProcess

FLUSH_S = 0.05
LEAST_WAIT_S = 0.02
"""The shortest wait for what is due: the uploader gets that long to take what it has been given."""
NOT_SEEN_AGAIN = "it was copied, and there was no time to see whether another node replaced it"
LOOK_AT_ONCE = 2000
"""The names that one turn of the last look takes in."""


@dataclass(frozen=True)
class DrainReport:
    """The result of a drain."""

    undrained: list[Leftover]
    """Names that are not in the target as they are in the local directory."""
    unclosed: list[str]
    """Files that a program had not closed: they were carried as they were."""
    findings: DrainFindings = field(default_factory=DrainFindings)
    files: int = 0
    bytes_carried: int = 0
    unwatched: list[Leftover] = field(default_factory=list)
    overflows: int = 0
    is_gone: bool = False
    """Whether the local directory was removed, moved or unmounted while it was watched."""


class OutputDrain:
    """Owns the drain of one watched directory."""

    def __init__(
        self,
        prepared: PreparedPlace,
        may_copy: Callable[[int], float] = lambda _: 0.0,
        rate: float | None = None,
        told: ToldPaths | None = None,
    ) -> None:
        """`may_copy` is asked before a file of so many bytes is carried, and returns the seconds to wait after it.
        `told` is where the nodes of a run tell each other of names. Raises OSError where the kernel has no queue of
        events left."""
        self._root = prepared.place.root
        self._target = prepared.charter.target
        self._is_shared = bool(prepared.charter.node)
        self._watch = TreeWatch(self._root, prepared.place.scratch)
        self._ledger = Ledger(dict(prepared.entries))
        self._journal = Journal.open(prepared.place.journal)
        self._process = UploaderProcess(prepared.place, prepared.charter, self._journal, rate, told)
        self._may_copy = may_copy
        self._wait_until = 0.0
        self._last_look: Iterator[SeenEvent] | None = None
        self._files = self._bytes = 0
        self._process.listen()

    # ---- as a service

    def descriptors(self) -> Mapping[int, Callable[[], object]]:
        """Returns the descriptors to watch for reading. Their calls do nothing: `work` reads all that has come."""
        fds = [*self._process.fds(), *([] if self._watch.is_gone else [self._watch.fd])]
        return dict.fromkeys(fds, lambda: None)

    def work(self, now: float) -> None:
        """Takes in what was seen and done, and hands out what is to be done."""
        for event in self._watch.read(now):
            self._take(event, now)
        self._look_again(now)
        for result in self._process.receive():
            self._took(result, now)
        for news in self._process.heard():
            self._ledger.hear(news)
        while actions := self._ledger.actions(now, self._slots(now)):
            self._give(actions, now)
        self._process.compact()

    def wake_after(self, now: float) -> float | None:
        """Returns the seconds until `work` has something to do without a descriptor being ready."""
        if self._last_look is not None:
            return 0.0
        waits = [self._watch.wake_after(now)]
        wake_at = self._ledger.wake_at()
        if wake_at is not None and (self._process.carrying < 2 * THREADS):
            waits.append(max(LEAST_WAIT_S, wake_at - now, self._wait_until - now))
        if not self._process.flush() or (not self._process.fds() and not self.is_drained):
            waits.append(FLUSH_S)
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def give_way(self, size_bytes: int, now: float) -> None:
        """Begins to free so many bytes of the local disk: links take the place of files that are drained and open
        nowhere."""
        if actions := self._ledger.files_to_free(size_bytes, now):
            self._process.give(actions)

    def end(self, now: float) -> None:
        """Begins the last part: the command has ended, and what is removed from here on is not carried over. All that
        is there is looked at once more, since a memory map changes files without an event."""
        for until in (now, now + PAIR_S):
            for event in self._watch.read(until):
                self._take(event, now)
        self._ledger.command_ended()
        failed = self._ledger.findings.failed
        self._last_look = iter(()) if self._watch.is_gone else found_below(self._root, failed=failed)

    @property
    def is_drained(self) -> bool:
        """Whether nothing is left to do; before `end`, until the next event."""
        return self._last_look is None and self._watch.is_idle() and self._ledger.is_settled()

    def report(self) -> DrainReport:
        """Returns the result as it is now. Where events were lost, names that went unseen are among the findings."""
        ledger, watch = self._ledger, self._watch
        if (watch.overflows or watch.unwatched) and not watch.is_gone:
            name_unseen(self._root, ledger, lambda _name, _entry: True)
        return DrainReport(
            undrained=[self._told(one) for one in ledger.undrained()],
            unclosed=sorted(ledger.unclosed),
            findings=ledger.findings,
            files=self._files,
            bytes_carried=self._bytes,
            unwatched=[Leftover(name, why) for name, why in sorted(watch.unwatched.items())],
            overflows=watch.overflows,
            is_gone=watch.is_gone,
        )

    def close(self) -> None:
        """Ends the watch and the process; what is not drained stays for a late drain."""
        self._watch.close()
        self._process.close()
        self._journal.close()

    # ---- parts

    def _take(self, event: SeenEvent, now: float) -> None:
        if event.kind is SeenKind.FOUND and self._is_current(event.name):
            return
        if event.kind is SeenKind.MISSED and not leaves_times(self._root):
            self._ledger.unseal()
        if event.kind is SeenKind.MADE and event.name not in self._ledger.removed and self._is_link(event.name):
            return
        renames = len(self._ledger.renames)
        noted = self._ledger.see(event, now)
        if noted is not None:
            is_queued = len(self._ledger.renames) > renames
            self._journal.saw(noted, self._ledger.renames[-1].first if is_queued else ())

    def _is_current(self, name: str) -> bool:
        """Tells whether an entry is as the target has it, by a look at the local disk only. Where other nodes drain to
        the same target, files that this one wrote there are looked at there in the end."""
        entry = self._ledger.entries.get(name)
        if entry is None or name in self._ledger.marks.by_name or self._ledger.renames:
            return False
        if self._is_shared and self._last_look is not None and entry.kind is EntryKind.FILE:
            return False
        with suppress(OSError):
            if entry.kind is EntryKind.EARLIER:
                return entry.shown_as == name and os.readlink(f"{self._root}/{name}") == f"{self._target}/{name}"
            status = os.lstat(f"{self._root}/{name}")
            if entry.kind is EntryKind.DIRECTORY:
                mode = stat.S_IMODE(status.st_mode) | stat.S_IRWXU
                return stat.S_ISDIR(status.st_mode) and mode == entry.mode | stat.S_IRWXU
            is_same = Fingerprint.of(status) == entry.here and not entry.appending
            if entry.kind is EntryKind.LINK or not is_same:
                return is_same
            is_proof = entry.is_sealed or self._last_look is None  # a file that is being written to is asked for again
            return is_proof and stat.S_IMODE(status.st_mode) == entry.mode
        return False

    def _is_link(self, name: str) -> bool:
        """Tells whether a name is that of a link to what the target has, which was just made by hpcstage."""
        entry = self._ledger.entries.get(name)
        return entry is not None and entry.kind is EntryKind.EARLIER and self._is_current(name)

    def _told(self, one: Leftover) -> Leftover:
        """Returns what is said of a name: one that only waited to be looked at again was copied."""
        entry = self._ledger.entries.get(one.name)
        if not self._is_shared or one.why != NO_TIME or entry is None or one.name in self._ledger.unclosed:
            return one
        if entry.kind is EntryKind.FILE and not entry.appending:
            with suppress(OSError):
                status = os.lstat(f"{self._root}/{one.name}")
                is_same = Fingerprint.of(status) == entry.here and stat.S_IMODE(status.st_mode) == entry.mode
                if is_same and entry.is_sealed:
                    return Leftover(one.name, NOT_SEEN_AGAIN)
        return one

    def _forget_mark(self, name: str) -> None:
        """Forgets the mark of a name that was made to show what another node wrote, if it is still that."""
        mark = self._ledger.marks.by_name.pop(name, None)
        if mark is not None and not self._is_current(name):
            self._ledger.marks.put(name, mark)

    def _look_again(self, now: float) -> None:
        if self._last_look is None:
            return
        for _ in range(LOOK_AT_ONCE):
            event = next(self._last_look, None)
            if event is None:
                self._last_look = None
                self._ledger.end(now)
                return
            self._take(event, now)

    def _slots(self, now: float) -> int:
        """Returns how many files may be handed out now: one at a time, since the wait follows the file that causes
        it."""
        is_free = self._process.carrying < 2 * THREADS and not self._process.is_resting
        return int(now >= self._wait_until and is_free)

    def _give(self, actions: list[Action], now: float) -> None:
        for action in actions:
            if action.deed is Deed.CARRY:
                with suppress(OSError):
                    size_bytes = os.lstat(f"{self._root}/{action.name}").st_size
                    self._wait_until = max(self._wait_until, now + self._may_copy(size_bytes))
        self._process.give(actions)

    def _took(self, result: ActionResult, now: float) -> None:
        for renamed in self._ledger.take(result, now):
            self._journal.saw(renamed)
        if result.deed is Deed.SHOW and result.ending is Ending.DONE:
            self._forget_mark(result.name)
        if result.has_copied:
            self._files += 1
            self._bytes += result.bytes_carried
