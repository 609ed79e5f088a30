"""Decides what is done in the target: from events in the watched directory and results of actions it makes actions.

It is pure: values in, values out; no clock and no disk. It knows names in two ways. Marks and removals are names as
they are in the watched directory now. Entries are names as they are in the target. The renames between the two are a
queue: each is carried out in the order in which it was seen, and what concerns a name of a rename that waits, waits
with it.

The rules:

* Content is a state, never an event: a marked name is brought up to what the local entry is when it is carried. So a
  mark too many costs a look, and an order of events that was seen wrongly costs a copy.
* A removal is an event, never a state: only a name that was seen to be removed is removed in the target, once
  everything that changed before it is there, HOLD_S after the last removal, and only as long as the watched directory
  exists: when a directory is wiped from outside, its own removal is the last that is seen.
* Where events were lost, all names are marked and nothing is removed.
"""

from __future__ import annotations

import errno
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hpcstage.outputs.facts import (
    Action,
    ActionResult,
    Deed,
    Ending,
    EntryKind,
    Leftover,
    SeenEvent,
    SeenKind,
    TargetEntry,
    ancestors,
    is_below,
)
from hpcstage.outputs.marks import BLOCKED_S, CLOSED_S, OPEN_S, Mark, Marks

HOLD_S = 5.0
MOST_HOLD_S = 600.0
"""A program that never stops removing files has them removed after this time."""
MOST_ERASES = 32
_OF_THE_COMMAND = frozenset({SeenKind.WRITTEN, SeenKind.REMOVED, SeenKind.MOVED, SeenKind.MOVED_AWAY})
"""The events that are taken in in another way after the command's end."""
_LAST = 1 << 62
"""The number of a removal from a journal: everything else goes before it."""
MOST_TRIES = 4
"""At the end of a run, a name that failed so often is given up."""


@dataclass
class Removal:
    """A removal that was seen and is not carried out."""

    seq: int
    is_dir: bool
    seen_at: float
    tries: int = 0


@dataclass(frozen=True)
class PendingRename:
    """A rename that was seen and is not carried out."""

    old: str
    new: str
    is_dir: bool
    first: tuple[str, ...] = ()
    """Names at or below the new one that were removed before the rename."""


@dataclass
class DrainFindings:
    """The names that the end of a run tells of."""

    beside: dict[str, str] = field(default_factory=dict)
    """By name: the name in the target that the local entry got, since the target's was not the one last seen."""
    skipped: dict[str, str] = field(default_factory=dict)
    """By name: the kind of an entry that is not carried over."""
    kept: dict[str, str] = field(default_factory=dict)
    """By name: why the target still has an entry that was removed or renamed."""
    failed: dict[str, str] = field(default_factory=dict)
    """By name: why the entry is not in the target."""


class Ledger:
    """Owns what is known of the target, what waits, and what is under way."""

    def __init__(self, entries: dict[str, TargetEntry] | None = None, *, is_late: bool = False) -> None:
        self.entries = entries or {}
        self.intents: dict[str, TargetEntry] = {}
        """Entries that were about to be written when the run was killed; filled from a journal only."""
        self.marks = Marks()
        self.removed: dict[str, Removal] = {}
        self.renames: deque[PendingRename] = deque()
        self.unclosed: set[str] = set()
        """Files that were written to and not closed since."""
        self.findings = DrainFindings()
        self.is_late = is_late
        self.is_over = is_late
        """Whether the command has ended: what is removed from here on is removed by others."""
        self.is_ending = is_late
        self._flying: dict[str, Mark] = {}
        self._stamping: set[str] = set()
        """Directories that get their exact times at the end."""
        self._misplaced: Counter[str] = Counter()
        """By name: how often the local link there stood for what the target has elsewhere."""
        self._structure = _Structure()

    # ---- what was seen

    def see(self, event: SeenEvent, now: float) -> SeenEvent | None:
        """Takes an event in. Returns it if a later drain has to know it."""
        if self.is_over and event.kind in _OF_THE_COMMAND:
            return self._see_afterwards(event, now)
        name = event.name
        match event.kind:
            case SeenKind.MADE:
                due = now if event.is_dir else now + OPEN_S
                self.marks.add(name, due, is_written=True, is_open=not event.is_dir)
                return event if self._exists_again(name) else None
            case SeenKind.WRITTEN:
                self.unclosed.add(name)
                self.marks.add(name, now + OPEN_S, is_written=True, is_open=True)
            case SeenKind.CLOSED:
                self.unclosed.discard(name)
                self.marks.add(name, now + CLOSED_S, is_written=True, is_open=False)
            case SeenKind.ATTRIBUTES | SeenKind.FOUND:
                self.marks.add(name, now + CLOSED_S)
                if event.kind is SeenKind.FOUND and self._exists_again(name):
                    return SeenEvent(SeenKind.MADE, name)
            case SeenKind.REMOVED:
                return event if self._see_removed(event, now) else None
            case SeenKind.MOVED:
                return self._see_moved(event, now)
            case SeenKind.MOVED_AWAY:
                return event if self._see_moved_away(event, now) else None
            case SeenKind.MISSED:
                pass
            case SeenKind.GONE:
                if self.is_over:
                    self._see_lost("", is_dir=True)
                self.forget_removals()
                return event
        return None

    def _see_afterwards(self, event: SeenEvent, now: float) -> SeenEvent | None:
        """Takes in an event after the command's end: nothing is removed or renamed in the target for it."""
        if event.kind is SeenKind.WRITTEN:
            self.unclosed.add(event.name)
        elif event.kind is SeenKind.MOVED:
            self.marks.rename(event.name, event.new, is_dir=event.is_dir)
            self.marks.add(event.new, now)
        else:
            self._see_lost(event.name, is_dir=event.is_dir)
        return None

    def _see_lost(self, name: str, *, is_dir: bool) -> None:
        """Names what was removed after the command's end and is not in the target."""
        waiting, findings = (self.marks.by_name, self._flying), self.findings
        lost = [other for names in waiting for other in names if is_dir and is_below(other, name)]
        is_known = any(name in names for names in (self.entries, findings.skipped, findings.beside))
        if name and (not is_known or any(name in names for names in waiting)):
            lost.append(name)
        self.findings.failed.update(dict.fromkeys(lost, "was removed before it was drained"))
        self.marks.drop(name, is_dir=is_dir)

    def forget_removals(self) -> None:
        """Carries no removal and no rename over from here on: the watched directory has gone."""
        self.removed.clear()
        self.renames.clear()
        self._structure.held.clear()
        self.marks.by_name.clear()

    def _see_removed(self, event: SeenEvent, now: float) -> bool:
        name = event.name
        self.marks.drop(name, is_dir=event.is_dir)
        self.unclosed.discard(name)
        if name not in self.entries and name not in self._flying and not self.renames:
            return False
        self.removed[name] = Removal(self.marks.next_seq(), event.is_dir, now)
        self._structure.removed_at = now
        return True

    def _exists_again(self, name: str) -> bool:
        """Forgets the removal of a name that was seen to be there. Returns whether there was one."""
        return self.removed.pop(name, None) is not None

    def _see_moved_away(self, event: SeenEvent, now: float) -> bool:
        """Takes in that a name was moved out of the watched directory. The content of a file is elsewhere now; what
        only the target has, and a directory, whose names were not seen to go one by one, stay there."""
        name = event.name
        entry = self.entries.get(name)
        if event.is_dir or (entry is not None and entry.kind is EntryKind.EARLIER):
            self.marks.drop(name, is_dir=event.is_dir)
            self.findings.kept[name] = "was moved out of the local directory"
            return False
        return self._see_removed(event, now)

    def _see_moved(self, event: SeenEvent, now: float) -> SeenEvent | None:
        old, new, is_dir = event.name, event.new, event.is_dir
        self.marks.drop(new, is_dir=is_dir)
        self.marks.rename(old, new, is_dir=is_dir)
        self.marks.add(new, now + CLOSED_S)
        self.unclosed = {new + name[len(old) :] if is_below(name, old) else name for name in self.unclosed}
        if self.renames or self._knows(old, is_dir):
            self._queue(old, new, is_dir, [name for name in self.removed if is_below(name, new)])
            return event
        return SeenEvent(SeenKind.MADE, new) if self._exists_again(new) else None

    def _knows(self, name: str, is_dir: bool) -> bool:
        """Tells whether the target has the name, or something below it, or may have it soon."""
        if name in self.entries or name in self._flying:
            return True
        return is_dir and any(is_below(other, name) for names in (self.entries, self._flying) for other in names)

    def _queue(self, old: str, new: str, is_dir: bool, first: Iterable[str]) -> None:
        """Queues a rename, before which these names were removed. Other removals are renamed with it."""
        self.renames.append(PendingRename(old, new, is_dir, tuple(first)))
        self._structure.held.update((old, new))
        for name in self.renames[-1].first:
            self.removed.pop(name, None)
        for name in [name for name in self.removed if is_dir and is_below(name, old)]:
            self.removed[new + name[len(old) :]] = self.removed.pop(name)

    def recall(self, event: SeenEvent, first: Iterable[str]) -> None:
        """Takes in an event that a journal says was seen, and not carried out when it was written."""
        if event.kind is SeenKind.MOVED:
            self._queue(event.name, event.new, event.is_dir, first)
        elif event.kind is SeenKind.GONE:
            self.forget_removals()
        elif event.kind is SeenKind.MADE:
            self.removed.pop(event.name, None)
        else:
            self.removed[event.name] = Removal(_LAST, event.is_dir, 0.0)

    def end(self, now: float) -> None:
        """Makes everything due: the command has ended."""
        self.is_ending = True
        self.marks.hurry(now)

    # ---- what is to be done

    def actions(self, now: float, slots: int) -> list[Action]:
        """Returns what is to be done now, with at most so many files to be carried. Renames and removals are for one
        lane, which keeps their order."""
        found = list(self._structural(now))
        for name, mark in self.marks.take_due(now, self._is_blocked, slots):
            self._flying[name] = mark
            entry, intent = self.entries.get(name), self.intents.get(name)
            found.append(
                Action(
                    Deed.CARRY,
                    name,
                    entry=entry,
                    new_entry=intent,
                    is_written=mark.is_written,
                    is_open=mark.is_open and not self.is_ending,
                    is_last_try=self.is_ending and mark.tries >= MOST_TRIES - 1,
                    is_late=self.is_late,
                )
            )
        if not found and self.is_ending and self._is_carried():
            found = self._stamps()
        return found

    def _structural(self, now: float) -> Iterable[Action]:
        structure = self._structure
        if structure.flying or now < structure.not_before:
            return
        if self.renames:
            rename = self.renames[0]
            if not any(is_below(name, rename.old) or is_below(name, rename.new) for name in self._flying):
                structure.flying = 1
                yield self._move(rename)
            return
        for name, removal in self._due_removals(now):
            structure.flying += 1
            structure.erasing.add(name)
            entry, intent = self.entries.get(name), self.intents.get(name)
            yield Action(
                Deed.ERASE,
                name,
                is_dir=removal.is_dir,
                entry=entry,
                new_entry=intent,
                is_late=self.is_late,
            )

    def _move(self, rename: PendingRename) -> Action:
        return Action(
            Deed.MOVE,
            rename.old,
            rename.new,
            rename.is_dir,
            self.entries.get(rename.old),
            self.entries.get(rename.new),
            is_late=self.is_late,
            first=tuple((name, self.entries[name].there.inode) for name in rename.first if name in self.entries),
        )

    def _due_removals(self, now: float) -> list[tuple[str, Removal]]:
        is_quiet = self.is_ending or now - self._structure.removed_at >= HOLD_S
        first = next(iter(self.removed.values()), None)
        if first is None or not (is_quiet or now - first.seen_at >= MOST_HOLD_S):
            return []
        waiting = [seq for seq in (self.marks.oldest_waiting(), self._oldest_flying()) if seq is not None]
        bound = min(waiting, default=None)
        due: list[tuple[str, Removal]] = []
        for name, removal in self.removed.items():
            if len(due) == MOST_ERASES or not (is_quiet or now - removal.seen_at >= MOST_HOLD_S):
                break
            if name in self._flying or (bound is not None and removal.seq > bound):
                break  # those that follow may be of the directories above
            due.append((name, removal))
        if not due:
            self._structure.not_before = now + BLOCKED_S
        return due

    def _oldest_flying(self) -> int | None:
        return min((mark.seq for mark in self._flying.values() if not mark.is_open), default=None)

    def _is_blocked(self, name: str) -> bool:
        """Tells whether a name waits: for its own last action, for a rename, or for its directory to be made."""
        held, parent = self._structure.held, name.rpartition("/")[0]
        if name in self._structure.erasing:
            return True
        if parent and parent not in self.entries and (parent in self._flying or parent in self.marks.by_name):
            return True
        return name in self._flying or bool(held and any(above in held for above in ancestors(name)))

    def _is_carried(self) -> bool:
        return not (self.marks.by_name or self.removed or self.renames or self._flying or self._structure.flying)

    def _stamps(self) -> list[Action]:
        """Returns directories to give their modes and times, of the deepest that are left: one that is read-only then
        can be entered no more."""
        deepest = max((name.count("/") for name in self._stamping), default=0)
        names = [name for name in self._stamping if name.count("/") == deepest][:MOST_ERASES]
        for name in names:
            self._stamping.discard(name)
            self._flying[name] = Mark(0, 0.0)
        return [Action(Deed.STAMP, name, is_dir=True) for name in names]

    # ---- what was done

    def take(self, result: ActionResult, now: float) -> list[SeenEvent]:
        """Takes the result of an action in. Returns the renames that follow from it, for a later drain to know."""
        match result.deed:
            case Deed.CARRY:
                return self._carried(result, now)
            case Deed.MOVE:
                self._moved(result, now)
            case Deed.ERASE:
                self._erased(result, now)
            case Deed.STAMP:
                self._flying.pop(result.name, None)
        return []

    def _carried(self, result: ActionResult, now: float) -> list[SeenEvent]:
        name, findings = result.name, self.findings
        mark = self._flying.pop(name, None) or Mark(0, now)
        if result.ending is Ending.MISPLACED:
            return self._follow(result, mark, now)
        if result.entry is not None:
            self.intents.pop(name, None)
        if result.ending is not Ending.ABSENT:
            findings.failed.pop(name, None)
        if result.ending is Ending.DONE:
            findings.beside.pop(name, None)
        if not self.is_ending:
            self.marks.rest(name, now, result.took_s)
        if result.entry is not None:
            self.entries[name] = result.entry
            self._touch(name)
            if result.entry.kind is EntryKind.DIRECTORY:
                self._stamping.add(name)
        if result.ending is Ending.BESIDE:
            findings.beside[name] = result.text
        elif result.ending is Ending.SKIPPED:
            findings.skipped[name] = result.text
        elif result.ending in {Ending.CHANGED, Ending.FAILED, Ending.HELD}:
            self._try_again(result, mark, now)
        return []

    def _try_again(self, result: ActionResult, mark: Mark, now: float) -> None:
        """Puts a name back that was not carried; a try does not count while the command runs and others go first."""
        is_held = result.ending is Ending.HELD
        if is_held and not self.is_ending:
            mark.tries = 0
        if not is_held and self.is_ending and mark.tries + 1 >= MOST_TRIES and not self.removed:
            self.findings.failed[result.name] = result.text
        else:
            self.marks.retry(result.name, mark, now, result.text)

    def _follow(self, result: ActionResult, mark: Mark, now: float) -> list[SeenEvent]:
        """Has an entry of the start renamed in the target to where the local link to it is: nobody saw the rename, or
        it was misread. It waits for the renames that were seen, which may be of the same entry."""
        name, entry = result.name, result.entry
        if self.renames:
            mark.tries = 0
            self.marks.retry(name, mark, now, "")
            return []
        where = None if entry is None else self._name_of(entry)
        if where is None or where == name:
            return []
        self._misplaced[name] += 1
        if self._misplaced[name] > MOST_TRIES:
            self.findings.kept[where] = f"the local directory has it as {name}"
            return []
        renames = [(name, result.text)] if result.text and name in self.entries else []
        renames.append((where, name))
        self._exists_again(name)
        for old, new in renames:
            self._queue(old, new, False, ())
        return [SeenEvent(SeenKind.MOVED, old, new) for old, new in renames]

    def _name_of(self, shown: TargetEntry) -> str | None:
        """Returns the name that an entry of the start has in the target: mostly the one to which the link leads."""
        inode = shown.there.inode
        near = self.entries.get(shown.shown_as)
        if near is not None and near.kind is EntryKind.EARLIER and near.there.inode == inode:
            return shown.shown_as
        known = self.entries.items()
        return next((name for name, e in known if e.kind is EntryKind.EARLIER and e.there.inode == inode), None)

    def _moved(self, result: ActionResult, now: float) -> None:
        structure = self._structure
        structure.flying = 0
        rename = self.renames[0] if self.renames else None
        if rename is None or rename.old != result.name:
            return
        if result.ending is Ending.FAILED and not structure.gives_up(now, is_ending=self.is_ending):
            return
        self.renames.popleft()
        structure.release(rename.old, rename.new)
        if result.ending is Ending.DONE:
            self.findings.kept.pop(rename.old, None)
            for name in rename.first:
                self.entries.pop(name, None)
            self._rename_entries(rename)
            if result.entry is not None and rename.new in self.entries:
                self.entries[rename.new] = result.entry
        elif result.ending is Ending.CHANGED and rename.old in self.entries:
            self.removed[rename.old] = Removal(self.marks.next_seq(), False, now)
        elif result.ending in {Ending.KEPT, Ending.FAILED}:
            self.findings.kept[rename.old] = result.text
        if result.ending is not Ending.DONE:
            self.marks.add(rename.new, now)
        self._touch(rename.old)
        self._touch(rename.new)

    def _rename_entries(self, rename: PendingRename) -> None:
        old, new = rename.old, rename.new
        self.entries.pop(new, None)
        names = [name for name in self.entries if is_below(name, old)] if rename.is_dir else [old]
        for name in names:
            if name in self.entries:
                self.entries[new + name[len(old) :]] = self.entries.pop(name)
        if rename.is_dir:
            stamping = self._stamping
            self._stamping = {new + name[len(old) :] if is_below(name, old) else name for name in stamping}

    def _erased(self, result: ActionResult, now: float) -> None:
        structure = self._structure
        structure.flying = max(0, structure.flying - 1)
        structure.erasing.discard(result.name)
        removal = self.removed.get(result.name)
        has_more = result.errno == errno.ENOTEMPTY and sum(is_below(name, result.name) for name in self.removed) > 1
        if removal is not None and (result.ending is Ending.FAILED or has_more):
            removal.tries += 1
            if not self.is_ending or removal.tries < MOST_TRIES:
                structure.not_before = now if self.is_ending else now + 1.0
                return
        self.removed.pop(result.name, None)
        if result.ending in {Ending.DONE, Ending.ABSENT}:
            self.entries.pop(result.name, None)
            self._stamping.discard(result.name)
            self._touch(result.name)
        elif result.text:
            self.findings.kept[result.name] = result.text

    def _touch(self, name: str) -> None:
        directory = name.rpartition("/")[0]
        if directory:
            self._stamping.add(directory)

    # ---- how things stand

    def is_settled(self) -> bool:
        """Tells whether there is nothing left to do."""
        return self._is_carried() and not (self.is_ending and self._stamping)

    def wake_at(self) -> float | None:
        """Returns the time at which something will be due; None if only events and results can change that."""
        times = [self.marks.next_due()]
        if self.removed and not self._structure.flying:
            first = next(iter(self.removed.values())).seen_at
            times.append(min(self._structure.removed_at + HOLD_S, first + MOST_HOLD_S))
        if self._structure.not_before and (self.renames or self.removed):
            times.append(self._structure.not_before)
        return min((time for time in times if time is not None), default=None)

    def undrained(self) -> list[Leftover]:
        """Returns the names that are not in the target as they are in the watched directory, and why."""
        why = dict(self.findings.failed)
        for name, mark in (*self.marks.by_name.items(), *self._flying.items()):
            why.setdefault(name, mark.why or "there was no time left")
        return [Leftover(name, reason) for name, reason in sorted(why.items())]


@dataclass
class _Structure:
    """The lane of renames and removals."""

    flying: int = 0
    removed_at: float = 0.0
    not_before: float = 0.0
    tries: int = 0
    held: Counter[str] = field(default_factory=Counter)
    """The names of the renames that wait."""
    erasing: set[str] = field(default_factory=set)
    """The names that are being removed."""

    def release(self, *names: str) -> None:
        """Frees the names of a rename that was carried out."""
        self.held -= Counter(names)

    def gives_up(self, now: float, *, is_ending: bool) -> bool:
        """Notes a rename that failed. Tells whether it is not tried again."""
        self.tries += 1
        self.not_before = now + min(60.0, 2.0 ** min(self.tries, 6))
        if self.tries < MOST_TRIES or not is_ending:
            return False
        self.tries, self.not_before = 0, 0.0
        return True
