"""Takes in what was done in the target: notes it, and decides what is tried again. It is pure."""

from __future__ import annotations

import errno

from hpcstage.outputs.facts import ActionResult, Deed, Ending, SeenEvent, SeenKind
from hpcstage.outputs.marks import Mark
from hpcstage.outputs.namequeue import MOST_TRIES
from hpcstage.outputs.state import DrainState

FREE_AGAIN_S = 30.0
"""A file that could not be freed is left alone for so long."""


class Outcomes:
    """Owns the meaning of results."""

    def __init__(self, state: DrainState) -> None:
        self._state = state

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
                self._state.flying.pop(result.name, None)
            case Deed.FREE:
                self._freed(result, now)
            case Deed.SHOW | Deed.HIDE:
                self._shown(result)
        return []

    def _carried(self, result: ActionResult, now: float) -> list[SeenEvent]:
        state, name = self._state, result.name
        findings = state.findings
        mark = state.flying.pop(name, None) or Mark(0, now)
        if result.ending is Ending.MISPLACED:
            return self._follow(result, mark, now)
        if result.ending is not Ending.ABSENT:
            findings.failed.pop(name, None)
        if not state.is_ending:
            state.marks.rest(name, now, result.took_s)
        where = result.text if result.ending is Ending.BESIDE else name
        if result.entry is not None:
            state.known.put(where, result.entry)
        match result.ending:
            case Ending.DONE:
                self._remove_beside(name, now)
            case Ending.BESIDE:
                findings.beside[name] = where
                state.queue.exists_again(where)
            case Ending.SKIPPED:
                findings.skipped[name] = result.text
            case Ending.CHANGED | Ending.FAILED | Ending.HELD:
                self._try_again(result, mark, now)
        return []

    def _remove_beside(self, name: str, now: float) -> None:
        """Has what lay beside a name removed, which has the name now."""
        state = self._state
        beside = state.findings.beside.pop(name, None)
        if beside is not None:
            state.queue.remove(beside, state.marks.next_seq(), now, is_dir=False)

    def _try_again(self, result: ActionResult, mark: Mark, now: float) -> None:
        """Puts a name back that was not carried; a try does not count where others go first, while the command runs or
        something else is left to do."""
        state = self._state
        is_held = result.ending is Ending.HELD
        if is_held and (not state.is_ending or state.is_anything_else_left()):
            mark.tries = 0
        if not is_held and state.is_ending and mark.tries + 1 >= MOST_TRIES and not state.queue.removed:
            state.findings.failed[result.name] = result.text
        else:
            state.marks.retry(result.name, mark, now, result.text)

    def _follow(self, result: ActionResult, mark: Mark, now: float) -> list[SeenEvent]:
        """Has an entry of the start renamed in the target to where the local link to it is: nobody saw the rename, or
        it was misread. It waits for the renames that were seen, which may be of the same entry."""
        state, name, entry = self._state, result.name, result.entry
        if state.queue.renames:
            mark.tries = 0
            state.marks.retry(name, mark, now, "")
            return []
        where = None if entry is None else state.known.name_of_earlier(entry)
        if where is None or where == name:
            return []
        state.misplaced[name] += 1
        if state.misplaced[name] > MOST_TRIES:
            state.findings.kept[where] = f"the local directory has it as {name}"
            return []
        renames = [(name, result.text)] if result.text and name in state.known.entries else []
        renames.append((where, name))
        state.queue.exists_again(name)
        for old, new in renames:
            state.queue.rename(old, new, is_dir=False, first=())
        return [SeenEvent(SeenKind.MOVED, old, new) for old, new in renames]

    def _moved(self, result: ActionResult, now: float) -> None:
        state = self._state
        rename = state.queue.moved(result, now, is_ending=state.is_ending)
        if rename is None:
            return
        if result.ending is Ending.DONE:
            state.findings.kept.pop(rename.old, None)
            state.findings.failed.pop(rename.old, None)
            state.known.renamed(rename, result.entry)
        else:
            state.marks.add(rename.new, now)
        if result.ending is Ending.CHANGED and rename.old in state.known.entries:
            state.queue.remove(rename.old, state.marks.next_seq(), now, is_dir=False)
        elif result.ending is Ending.FAILED:
            state.findings.failed[rename.old] = f"it was renamed to {rename.new}: {result.text}"
        elif result.ending is Ending.KEPT:
            state.findings.kept[rename.old] = result.text
        state.known.touch(rename.old)
        state.known.touch(rename.new)

    def _freed(self, result: ActionResult, now: float) -> None:
        state, name = self._state, result.name
        state.freeing.discard(name)
        if result.entry is not None:
            state.known.put(name, result.entry)
        else:
            state.unfreeable[name] = now + FREE_AGAIN_S
        if result.ending is Ending.CHANGED:
            state.known.entries.pop(name, None)
            state.marks.add(name, now, is_written=True)

    def _shown(self, result: ActionResult) -> None:
        state, name = self._state, result.name
        state.flying.pop(name, None)
        state.showing.discard(name)
        if result.ending is not Ending.DONE:
            return
        if result.deed is Deed.HIDE:
            state.known.entries.pop(name, None)
        elif result.entry is not None:
            state.shown += name not in state.known.entries
            state.known.entries[name] = result.entry

    def _erased(self, result: ActionResult, now: float) -> None:
        state, name = self._state, result.name
        is_full = result.errno == errno.ENOTEMPTY
        has_more = is_full and len(state.queue.removed.below(name)) > 1
        if not state.queue.erased(result, now, has_more=has_more, is_ending=state.is_ending):
            return
        if result.ending in {Ending.DONE, Ending.ABSENT}:
            state.known.removed(name)
            state.findings.failed.pop(name, None)
            beside = state.findings.beside
            for other in [other for other, where in beside.items() if where == name]:
                del beside[other]
        elif result.ending is Ending.FAILED:
            state.findings.failed[name] = f"it was removed: {result.text}"
        elif result.text:
            state.findings.kept[name] = result.text
