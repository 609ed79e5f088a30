"""Decides what is done in the target: from events in the watched directory and results of actions it makes actions.

It is pure: values in, values out; no clock and no disk. It knows names in two ways. Marks and removals are names as
they are in the watched directory now. Entries are names as they are in the target. The renames between the two are a
queue: each is carried out in the order in which it was seen, and what concerns a name of a rename that waits, waits
with it.

The rules:

* Content is a state, never an event: a marked name is brought up to what the local entry is when it is carried. So a
  mark too many costs a look, and an order of events that was seen wrongly costs a copy.
* The name of what the target held at the start is a state, too: where the local link to it has another name, it is
  renamed in the target. So a rename that was missed or misread is made up for.
* A removal is an event, never a state: only a name that was seen to be removed while the command ran is removed in the
  target, once everything that changed before it is there, HOLD_S after the last removal, and only as long as the
  watched directory exists: when a directory is wiped from outside, its own removal is the last that is seen.
* Where events were lost, all names are marked and nothing is removed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from hpcstage.outputs.facts import (
    Action,
    Deed,
    EntryKind,
    Fingerprint,
    Leftover,
    News,
    SeenEvent,
    SeenKind,
    TargetEntry,
)
from hpcstage.outputs.marks import Mark
from hpcstage.outputs.namequeue import AFTER_ALL, MOST_ERASES, MOST_TRIES, PendingRename, Removal
from hpcstage.outputs.outcomes import Outcomes
from hpcstage.outputs.seen import Intake
from hpcstage.outputs.state import DrainFindings, DrainState

NO_TIME = "there was no time left"
MOST_SHOWN = 100_000
"""The most names of other nodes that are shown."""
_SHOWN_AT_ONCE = 256
MOST_FREED = 64
"""The files that are freed at once at most."""
LEAST_FREED_BYTES = 64 << 10
"""A link in the place of a smaller file would free little."""


class Ledger:
    """Owns what is known of the target, what waits, and what is under way."""

    def __init__(self, entries: dict[str, TargetEntry] | None = None, *, is_late: bool = False) -> None:
        self._state = state = DrainState(entries or {}, is_late=is_late)
        self.see = Intake(state).see
        self.take = Outcomes(state).take
        self.entries = state.known.entries
        self.intents = state.known.intents
        self.marks = state.marks
        self.renames: Sequence[PendingRename] = state.queue.renames
        self.removed: Mapping[str, Removal] = state.queue.removed
        self.forget = state.forget

    @property
    def unclosed(self) -> set[str]:
        """Files that were written to and not closed since."""
        return self._state.unclosed

    @property
    def unstamped(self) -> set[str]:
        """Directories whose times in the target are not the local ones."""
        return self._state.known.unstamped

    @property
    def findings(self) -> DrainFindings:
        """The names that the end of a run tells of."""
        return self._state.findings

    def recall(self, event: SeenEvent, first: Iterable[str]) -> None:
        """Takes in an event that a journal says was seen, and not carried out when it was written."""
        queue = self._state.queue
        if event.kind is SeenKind.WRITTEN:
            self.unclosed.add(event.name)
        elif event.kind is SeenKind.CLOSED:
            self.unclosed.discard(event.name)
        elif event.kind is SeenKind.MOVED:
            queue.rename(event.name, event.new, is_dir=event.is_dir, first=first)
        elif event.kind is SeenKind.GONE:
            self.forget()
        elif event.kind is SeenKind.MADE:
            queue.exists_again(event.name)
        else:
            queue.remove(event.name, AFTER_ALL, 0.0, is_dir=event.is_dir)

    def unseal(self) -> None:
        """Notes that files may have been written to unseen: equal times prove nothing."""
        for name, entry in self.entries.items():
            self.entries[name] = replace(entry, is_sealed=False)

    def command_ended(self) -> None:
        """Carries no removal and no rename over that is seen from here on."""
        self._state.is_over = True
        self._state.news.clear()

    def hear(self, one: News) -> None:
        """Takes in what another node says; nothing is shown after the command's end."""
        if not self._state.is_over:
            self._state.news.pop(one.name, None)
            self._state.news[one.name] = one

    def end(self, now: float) -> None:
        """Makes everything due: all was looked at once more after the command's end."""
        self._state.is_ending = True
        self.marks.hurry(now)

    # ---- what is to be done

    def actions(self, now: float, slots: int) -> list[Action]:
        """Returns what is to be done now, with at most so many files to be carried. Renames and removals are kept
        in their order."""
        state = self._state
        found = [*self._structural(now), *self._of_others()]
        for name, mark in self.marks.take_due(now, state.is_blocked, slots):
            state.flying[name] = mark
            found.append(self._carry(name, mark))
        if not found and state.is_ending and state.is_carried():
            names = state.known.take_unstamped(MOST_ERASES)
            state.flying.update((name, Mark(0, 0.0)) for name in names)
            found = [Action(Deed.STAMP, name, is_dir=True) for name in names]
        return found

    def files_to_free(self, size_bytes: int, now: float) -> list[Action]:
        """Returns the files that the target has as they are, the largest first, until they are of so many bytes. While
        some are under way there are no others."""
        state, found = self._state, list[Action]()
        if state.is_over or state.freeing:
            return found
        for size, name in heapq.nlargest(MOST_FREED, self._freeable(now)):
            if size_bytes <= 0:
                break
            size_bytes -= size
            state.freeing.add(name)
            found.append(Action(Deed.FREE, name, entry=self.entries[name]))
        return found

    def _freeable(self, now: float) -> Iterator[tuple[int, str]]:
        state = self._state
        waiting = (self.marks.by_name, self.removed, state.unclosed)
        for name, entry in self.entries.items():
            if entry.kind is not EntryKind.FILE or entry.appending or entry.here is None:
                continue
            if entry.here.size_bytes < LEAST_FREED_BYTES or any(name in names for names in waiting):
                continue
            if state.unfreeable.get(name, 0.0) <= now and not state.is_blocked(name):
                yield entry.here.size_bytes, name

    def _carry(self, name: str, mark: Mark) -> Action:
        state = self._state
        return Action(
            Deed.CARRY,
            name,
            entry=self.entries.get(name),
            new_entry=self.intents.get(name),
            is_written=mark.is_written,
            is_open=mark.is_open and not state.is_ending,
            is_last_try=state.is_ending and mark.tries >= MOST_TRIES - 1,
            is_late=state.is_late,
            beside=state.findings.beside.get(name, ""),
        )

    def _structural(self, now: float) -> Iterator[Action]:
        state = self._state
        busy = {*state.flying, *state.freeing}
        rename = state.queue.rename_to_do(now, busy)
        if rename is not None:
            yield self._move(rename)
        for name, removal in state.queue.removals_to_do(now, busy, state.oldest, is_ending=state.is_ending):
            entry, intent = self.entries.get(name), self.intents.get(name)
            is_late = state.is_late
            yield Action(Deed.ERASE, name, is_dir=removal.is_dir, entry=entry, new_entry=intent, is_late=is_late)

    def _of_others(self) -> Iterator[Action]:
        """Yields what is to be shown and hidden of what other nodes said; names that wait for something wait here, too.
        A name that is this node's own stays."""
        state = self._state
        free = (name for name in state.news if not (self._waits(name) or state.is_blocked(name)))
        for name in list(islice(free, max(0, _SHOWN_AT_ONCE - len(state.showing)))):
            one, entry = state.news.pop(name), self.entries.get(name)
            action = self._to_show(one, entry) if one.is_given else self._to_hide(one, entry)
            if action is not None:
                state.flying[name] = Mark(0, 0.0, is_open=True)
                state.showing.add(name)
                yield action

    def _waits(self, name: str) -> bool:
        return name in self.marks.by_name or name in self.removed

    def _to_show(self, one: News, entry: TargetEntry | None) -> Action | None:
        there = Fingerprint(one.inode, -1, one.mtime_ns)
        if entry is None and self._state.shown < MOST_SHOWN:
            kind = EntryKind.DIRECTORY if one.is_dir else EntryKind.EARLIER
            shown = TargetEntry(
                kind, there, mode=max(0, one.mode), shown_as="" if one.is_dir else one.name, is_others=not one.is_dir
            )
            return Action(Deed.SHOW, one.name, is_dir=one.is_dir, new_entry=shown)
        is_link = entry is not None and entry.kind is EntryKind.EARLIER and entry.shown_as == one.name
        if entry is None or not is_link or one.is_dir or entry.there == there:
            return None
        return Action(
            Deed.SHOW, one.name, entry=entry, new_entry=replace(entry, there=there, here=None, is_others=True)
        )

    def _to_hide(self, one: News, entry: TargetEntry | None) -> Action | None:
        is_link = entry is not None and entry.kind is EntryKind.EARLIER and entry.there.inode == one.inode
        return Action(Deed.HIDE, one.name, entry=entry) if is_link else None

    def _move(self, rename: PendingRename) -> Action:
        return Action(
            Deed.MOVE,
            rename.old,
            rename.new,
            rename.is_dir,
            self.entries.get(rename.old),
            self.entries.get(rename.new),
            is_late=self._state.is_late,
            first=self._state.known.inodes_of(rename.first),
        )

    # ---- how things stand

    def is_settled(self) -> bool:
        """Tells whether there is nothing left to do."""
        state = self._state
        return state.is_carried() and not (state.is_ending and state.known.unstamped)

    def wake_at(self) -> float | None:
        """Returns the time at which something will be due; None if only events and results can change that."""
        times = (self.marks.next_due(), self._state.queue.wake_at())
        return min((time for time in times if time is not None), default=None)

    def undrained(self) -> list[Leftover]:
        """Returns the names that are not in the target as they are in the watched directory, and why."""
        why = dict(self.findings.failed)
        for name, mark in (*self.marks.by_name.items(), *self._state.flying.items()):
            why.setdefault(name, mark.why or NO_TIME)
        if self._state.is_over:
            for rename in self.renames:
                why.setdefault(rename.old, f"it was renamed to {rename.new}: {NO_TIME}")
            for name in self.removed:
                why.setdefault(name, f"it was removed: {NO_TIME}")
        return [Leftover(name, reason) for name, reason in sorted(why.items())]
