"""Takes in what was seen in the watched directory: marks names, and queues renames and removals. It is pure."""

from __future__ import annotations

from hpcstage.outputs.facts import EntryKind, SeenEvent, SeenKind, is_below
from hpcstage.outputs.marks import CLOSED_S, OPEN_S
from hpcstage.outputs.state import DrainState

REMOVED_AFTERWARDS = "was removed before it was drained"
_OF_THE_COMMAND = frozenset({SeenKind.WRITTEN, SeenKind.REMOVED, SeenKind.MOVED, SeenKind.MOVED_AWAY})
"""The events that are taken in in another way after the command's end."""


class Intake:
    """Owns the meaning of events."""

    def __init__(self, state: DrainState) -> None:
        self._state = state

    def see(self, event: SeenEvent, now: float) -> SeenEvent | None:
        """Takes an event in. Returns it if a later drain has to know it."""
        state, name = self._state, event.name
        if state.is_over and event.kind in _OF_THE_COMMAND:
            self._see_afterwards(event, now)
            return None
        match event.kind:
            case SeenKind.MADE:
                due = now if event.is_dir else now + OPEN_S
                state.marks.add(name, due, is_written=True, is_open=not event.is_dir)
                return event if state.queue.exists_again(name) else None
            case SeenKind.WRITTEN:
                is_news = name not in state.unclosed
                state.unclosed.add(name)
                state.marks.add(name, now + OPEN_S, is_written=True, is_open=True)
                return event if is_news else None
            case SeenKind.CLOSED:
                is_news = name in state.unclosed
                state.unclosed.discard(name)
                state.marks.add(name, now + CLOSED_S, is_written=True, is_open=False)
                return event if is_news else None
            case SeenKind.ATTRIBUTES | SeenKind.FOUND:
                state.marks.add(name, now + CLOSED_S)
                if event.kind is SeenKind.FOUND and state.queue.exists_again(name):
                    return SeenEvent(SeenKind.MADE, name)
            case SeenKind.REMOVED:
                return event if self._see_removed(event, now) else None
            case SeenKind.MOVED:
                return self._see_moved(event, now)
            case SeenKind.MOVED_AWAY:
                return event if self._see_moved_away(event, now) else None
            case SeenKind.GONE:
                if state.is_over:
                    self._see_lost("", is_dir=True)
                state.forget()
                return event
        return None

    def _see_removed(self, event: SeenEvent, now: float) -> bool:
        state, name = self._state, event.name
        state.marks.drop(name, is_dir=event.is_dir)
        state.unclosed.discard(name)
        self._drop_beside(name, now)
        if name not in state.known.entries and name not in state.flying and not state.queue.renames:
            return False
        state.queue.remove(name, state.marks.next_seq(), now, is_dir=event.is_dir)
        return True

    def _drop_beside(self, name: str, now: float) -> None:
        """Has what lies beside a name that is no more removed, too."""
        state = self._state
        beside = state.findings.beside.get(name)
        if beside is not None:
            state.queue.remove(beside, state.marks.next_seq(), now, is_dir=False)

    def _see_moved_away(self, event: SeenEvent, now: float) -> bool:
        """Takes in that a name was moved out of the watched directory. The content of a file is elsewhere now; what
        only the target has, and a directory, whose names were not seen to go one by one, stay there."""
        state, name = self._state, event.name
        entry = state.known.entries.get(name)
        if event.is_dir or (entry is not None and entry.kind is EntryKind.EARLIER):
            state.marks.drop(name, is_dir=event.is_dir)
            state.findings.kept[name] = "was moved out of the local directory"
            return False
        return self._see_removed(event, now)

    def _see_moved(self, event: SeenEvent, now: float) -> SeenEvent | None:
        state, old, new, is_dir = self._state, event.name, event.new, event.is_dir
        self._rename_marks(event)
        self._drop_beside(old, now)
        state.marks.add(new, now + CLOSED_S)
        if state.queue.renames or self._may_have(old, is_dir):
            state.queue.rename(old, new, is_dir=is_dir)
            return event
        return SeenEvent(SeenKind.MADE, new) if state.queue.exists_again(new) else None

    def _rename_marks(self, event: SeenEvent) -> None:
        state, old, new = self._state, event.name, event.new
        state.marks.drop(new, is_dir=event.is_dir)
        state.marks.rename(old, new, is_dir=event.is_dir)
        for name in [name for name in state.unclosed if is_below(name, old)]:
            state.unclosed.remove(name)
            state.unclosed.add(new + name[len(old) :])

    def _may_have(self, name: str, is_dir: bool) -> bool:
        """Tells whether the target has the name, or something below it, or may have it soon."""
        state = self._state
        if not is_dir:
            return name in state.known.entries or name in state.flying
        return state.known.has_below(name) or any(is_below(other, name) for other in state.flying)

    # ---- after the command's end

    def _see_afterwards(self, event: SeenEvent, now: float) -> None:
        """Takes in an event after the command's end: nothing is removed or renamed in the target for it."""
        state = self._state
        if event.kind is SeenKind.WRITTEN:
            state.unclosed.add(event.name)
        elif event.kind is SeenKind.MOVED:
            self._rename_marks(event)
            state.marks.add(event.new, now)
        else:
            self._see_lost(event.name, is_dir=event.is_dir)

    def _see_lost(self, name: str, *, is_dir: bool) -> None:
        """Names what was removed after the command's end and is not in the target."""
        state = self._state
        waiting, findings = (state.marks.by_name, state.flying), state.findings
        lost = state.marks.by_name.below(name) if is_dir else []
        lost += [other for other in state.flying if is_dir and is_below(other, name)]
        is_known = any(name in names for names in (state.known.entries, findings.skipped, findings.beside))
        if name and (not is_known or any(name in names for names in waiting)):
            lost.append(name)
        findings.failed.update(dict.fromkeys(lost, REMOVED_AFTERWARDS))
        state.marks.drop(name, is_dir=is_dir)
