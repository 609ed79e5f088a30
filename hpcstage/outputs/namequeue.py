"""Keeps the renames and removals that were seen and are not carried out, in their order. It is pure.

The renames are a queue: each is carried out in the order in which it was seen, and what concerns a name of a rename
that waits, waits with it. Removals go when no rename waits, HOLD_S after the last removal, so that a directory that is
being wiped from outside is known as such before.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from hpcstage.outputs.facts import ActionResult, Ending, ancestors, is_below
from hpcstage.outputs.marks import BLOCKED_S
from hpcstage.outputs.names import Names

HOLD_S = 5.0
MOST_HOLD_S = 600.0
"""A program that never stops removing files has them removed after this time."""
MOST_ERASES = 32
MOST_TRIES = 4
"""At the end of a run, what failed so often is given up."""
AFTER_ALL = 1 << 62
"""The number of a removal from a journal: everything else goes before it."""
_RETRY_S, _MOST_RETRY_S = 2.0, 60.0


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


class NameQueue:
    """Owns what waits, and how much of it is under way: one rename, or some removals."""

    def __init__(self) -> None:
        self.removed = Names[Removal]()
        self.renames: deque[PendingRename] = deque()
        self.not_before = 0.0
        """Nothing is carried out before this time."""
        self._is_renaming = False
        self._erasing: set[str] = set()
        self._held: Counter[str] = Counter()
        """The names of the renames that wait."""
        self._removed_at = 0.0
        self._tries = 0
        self._is_hopeless = False
        """Whether the last rename was given up: the next ones are tried once, or the end would wait for each."""

    def __bool__(self) -> bool:
        return bool(self.removed or self.renames or self._is_renaming or self._erasing)

    # ---- what was seen

    def remove(self, name: str, seq: int, now: float, *, is_dir: bool) -> None:
        """Takes in that a name was removed."""
        self.removed[name] = Removal(seq, is_dir, now)
        self._removed_at = now

    def exists_again(self, name: str) -> bool:
        """Forgets the removal of a name that was seen to be there. Returns whether there was one."""
        return self.removed.pop(name, None) is not None

    def rename(self, old: str, new: str, *, is_dir: bool, first: Iterable[str] | None = None) -> PendingRename:
        """Queues a rename, before which the names in its place were removed. Other removals are renamed with it."""
        removed = self._removed_below(new) if first is None else first
        rename = PendingRename(old, new, is_dir, tuple(removed))
        self.renames.append(rename)
        self._held.update((old, new))
        for name in rename.first:
            self.removed.pop(name, None)
        for name in self._removed_below(old) if is_dir else ():
            self.removed[new + name[len(old) :]] = self.removed.pop(name)
        return rename

    def _removed_below(self, name: str) -> list[str]:
        """Returns the removed names at or below a name in the order in which they go."""
        return sorted(self.removed.below(name), key=lambda one: self.removed[one].seq)

    def clear(self) -> None:
        """Forgets all."""
        self.removed.clear()
        self.renames.clear()
        self._held.clear()

    # ---- what is to be done

    def is_held(self, name: str) -> bool:
        """Tells whether a name waits for a rename or a removal."""
        if name in self._erasing:
            return True
        return bool(self._held) and any(above in self._held for above in ancestors(name))

    def rename_to_do(self, now: float, flying: Collection[str]) -> PendingRename | None:
        """Returns the next rename, which is under way then, once nothing that it concerns is."""
        if self._is_busy(now) or not self.renames:
            return None
        rename = self.renames[0]
        if any(is_below(name, rename.old) or is_below(name, rename.new) for name in flying):
            return None
        self._is_renaming = True
        return rename

    def removals_to_do(
        self, now: float, flying: Collection[str], oldest: Callable[[], int], *, is_ending: bool
    ) -> list[tuple[str, Removal]]:
        """Returns the next removals, which are under way then: those that are older than the oldest that waits."""
        if self._is_busy(now) or self.renames or not self._is_removal_due(now, is_ending=is_ending):
            return []
        before = oldest()
        due: list[tuple[str, Removal]] = []
        for name, removal in self.removed.items():
            is_enough = len(due) == MOST_ERASES or not (self._is_quiet(now, is_ending) or _is_old(removal, now))
            if is_enough or name in flying or removal.seq > before:
                break  # those that follow may be of the directories above
            due.append((name, removal))
        if not due:
            self.not_before = now + BLOCKED_S
        self._erasing.update(name for name, _ in due)
        return due

    def _is_removal_due(self, now: float, *, is_ending: bool) -> bool:
        first = next(iter(self.removed.values()), None)
        return first is not None and (self._is_quiet(now, is_ending) or _is_old(first, now))

    def _is_quiet(self, now: float, is_ending: bool) -> bool:
        return is_ending or now - self._removed_at >= HOLD_S

    def _is_busy(self, now: float) -> bool:
        return self._is_renaming or bool(self._erasing) or now < self.not_before

    def wake_at(self) -> float | None:
        """Returns the time at which something will be due; None if only events and results can change that."""
        times = []
        if self.removed and not (self._is_renaming or self._erasing):
            first = next(iter(self.removed.values())).seen_at
            times.append(min(self._removed_at + HOLD_S, first + MOST_HOLD_S))
        if self.not_before and (self.renames or self.removed):
            times.append(self.not_before)
        return min(times, default=None)

    # ---- what was done

    def moved(self, result: ActionResult, now: float, *, is_ending: bool) -> PendingRename | None:
        """Takes the result of a rename in. Returns the rename unless it is tried again."""
        self._is_renaming = False
        rename = self.renames[0] if self.renames else None
        if rename is None or rename.old != result.name:
            return None
        if result.ending is Ending.FAILED:
            self._tries += 1
            if self._tries < (1 if self._is_hopeless else MOST_TRIES) or not is_ending:
                self.not_before = now + min(_MOST_RETRY_S, _RETRY_S ** min(self._tries, 6))
                return None
        self._is_hopeless = result.ending is Ending.FAILED
        self._tries, self.not_before = 0, 0.0
        self.renames.popleft()
        self._held -= Counter((rename.old, rename.new))
        return rename

    def erased(self, result: ActionResult, now: float, *, has_more: bool, is_ending: bool) -> bool:
        """Takes the result of a removal in. Returns whether it is tried no more. `has_more` tells that the directory
        holds names whose removal waits."""
        self._erasing.discard(result.name)
        removal = self.removed.get(result.name)
        if removal is not None and (result.ending is Ending.FAILED or has_more):
            removal.tries += 1
            if not is_ending or removal.tries < MOST_TRIES:
                self.not_before = now if is_ending else now + 1.0
                return False
        self.removed.pop(result.name, None)
        return True


def _is_old(removal: Removal, now: float) -> bool:
    return now - removal.seen_at >= MOST_HOLD_S
