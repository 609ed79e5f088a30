"""The ledger alone: events in, actions out, on a clock of the test's."""

from __future__ import annotations

import time

import pytest

from hpcstage.outputs.facts import (
    Action,
    ActionResult,
    Deed,
    Ending,
    EntryKind,
    Fingerprint,
    SeenEvent,
    SeenKind,
    TargetEntry,
)
from hpcstage.outputs.ledger import LEAST_FREED_BYTES, Ledger
from hpcstage.outputs.namequeue import HOLD_S, MOST_HOLD_S, MOST_TRIES
from hpcstage.outputs.outcomes import FREE_AGAIN_S

FILE = TargetEntry(EntryKind.FILE, Fingerprint(1, 10, 100), Fingerprint(2, 10, 100))
EARLIER = TargetEntry(EntryKind.EARLIER, Fingerprint(3, -1, 100), shown_as="old")


def told(actions: list[Action]) -> list[tuple[str, ...]]:
    return [(action.deed.value, action.name, *([action.new] if action.new else [])) for action in actions]


def done(ledger: Ledger, actions: list[Action], now: float, ending: Ending = Ending.DONE, text: str = "") -> None:
    for action in actions:
        entry = FILE if action.deed is Deed.CARRY and ending is Ending.DONE else None
        ledger.take(ActionResult(action.deed, action.name, ending, entry, text=text), now)


def test_a_closed_file_is_carried_once():
    ledger = Ledger()
    ledger.see(SeenEvent(SeenKind.MADE, "file"), 0.0)
    assert ledger.actions(0.1, 4) == []
    ledger.see(SeenEvent(SeenKind.CLOSED, "file"), 0.1)
    assert ledger.wake_at() == 0.15000000000000002
    actions = ledger.actions(0.2, 4)
    assert told(actions) == [("carry", "file")]
    assert ledger.actions(0.2, 4) == []
    done(ledger, actions, 0.3)
    assert ledger.is_settled()
    assert ledger.wake_at() is None


def test_a_name_that_changes_while_it_is_carried_is_carried_again_after_a_rest():
    ledger = Ledger()
    ledger.see(SeenEvent(SeenKind.CLOSED, "file"), 0.0)
    ledger.actions(0.1, 4)
    ledger.see(SeenEvent(SeenKind.CLOSED, "file"), 0.2)
    assert ledger.actions(0.3, 4) == []
    ledger.take(ActionResult(Deed.CARRY, "file", Ending.DONE, FILE, took_s=2.0), 2.1)
    assert told(ledger.actions(2.2, 4)) == [("carry", "file")]
    ledger.take(ActionResult(Deed.CARRY, "file", Ending.DONE, FILE, took_s=2.0), 4.2)
    ledger.see(SeenEvent(SeenKind.CLOSED, "file"), 4.3)
    assert ledger.actions(24.0, 4) == []
    assert told(ledger.actions(24.3, 4)) == [("carry", "file")]


def test_a_removal_waits_for_what_changed_before_and_for_quiet():
    ledger = Ledger({"old": FILE})
    ledger.see(SeenEvent(SeenKind.CLOSED, "new"), 0.0)
    assert ledger.see(SeenEvent(SeenKind.REMOVED, "old"), 0.1) is not None
    actions = ledger.actions(HOLD_S + 1, 4)
    assert told(actions) == [("carry", "new")]
    assert ledger.actions(HOLD_S + 2, 4) == []
    done(ledger, actions, HOLD_S + 2)
    assert told(ledger.actions(HOLD_S + 2.1, 4)) == [("erase", "old")]


def test_a_removal_does_not_wait_for_a_file_that_cannot_be_carried():
    ledger = Ledger({"old": FILE})
    ledger.see(SeenEvent(SeenKind.CLOSED, "new"), 0.0)
    done(ledger, ledger.actions(0.1, 4), 0.1, Ending.FAILED, "No space left on device")
    ledger.see(SeenEvent(SeenKind.REMOVED, "old"), 0.2)
    assert ("erase", "old") in told(ledger.actions(0.3 + HOLD_S, 4))
    assert [(left.name, left.why) for left in ledger.undrained()] == [("new", "No space left on device")]


def test_removals_that_never_end_are_carried_out_in_the_end():
    ledger = Ledger({f"file{number}": FILE for number in range(700)})
    for number in range(700):
        ledger.see(SeenEvent(SeenKind.REMOVED, f"file{number}"), float(number))
        if number < MOST_HOLD_S:
            assert ledger.actions(float(number), 4) == []
    assert ("erase", "file0") in told(ledger.actions(699.0, 4))


def test_when_the_directory_has_gone_nothing_more_is_done():
    ledger = Ledger({"old": FILE, "d": FILE})
    ledger.see(SeenEvent(SeenKind.REMOVED, "old"), 0.0)
    ledger.see(SeenEvent(SeenKind.MOVED, "d", "e"), 0.0)
    ledger.see(SeenEvent(SeenKind.GONE), 0.1)
    ledger.end(0.1)
    assert ledger.actions(1000.0, 4) == []
    assert ledger.is_settled()


def test_a_removal_of_what_the_target_does_not_have_is_nothing():
    ledger = Ledger()
    ledger.see(SeenEvent(SeenKind.CLOSED, "file"), 0.0)
    assert ledger.see(SeenEvent(SeenKind.REMOVED, "file"), 0.1) is None
    assert ledger.is_settled()


def test_renames_keep_their_order_and_hold_back_what_they_concern():
    ledger = Ledger({"d": FILE, "d/a": FILE})
    ledger.see(SeenEvent(SeenKind.MOVED, "d", "e", is_dir=True), 0.0)
    ledger.see(SeenEvent(SeenKind.MOVED, "e/a", "f"), 0.0)
    ledger.see(SeenEvent(SeenKind.CLOSED, "e/b"), 0.0)
    ledger.see(SeenEvent(SeenKind.CLOSED, "g"), 0.0)
    actions = ledger.actions(1.0, 4)
    assert told(actions) == [("move", "d", "e"), ("carry", "g")]
    done(ledger, actions, 1.0)
    assert set(ledger.entries) == {"e", "e/a", "g"}
    actions = ledger.actions(1.1, 4)
    assert told(actions)[0] == ("move", "e/a", "f")
    assert ("carry", "f") not in told(actions)
    done(ledger, actions, 1.1)
    assert told(ledger.actions(1.2, 4)) == [("carry", "f")]


def test_a_file_that_may_not_be_renamed_is_copied_and_its_old_name_removed():
    ledger = Ledger({"tmp": FILE, "best": FILE})
    ledger.see(SeenEvent(SeenKind.MOVED, "tmp", "best"), 0.0)
    done(ledger, ledger.actions(1.0, 4), 1.0, Ending.CHANGED)
    actions = ledger.actions(1.1, 4)
    assert told(actions) == [("carry", "best")]
    done(ledger, actions, 1.2)
    assert told(ledger.actions(2.0 + HOLD_S, 4)) == [("erase", "tmp")]


def test_what_was_removed_where_a_directory_is_renamed_to_is_removed_before():
    ledger = Ledger({"d": FILE, "e": FILE, "e/x": FILE})
    ledger.see(SeenEvent(SeenKind.REMOVED, "e/x"), 0.0)
    ledger.see(SeenEvent(SeenKind.REMOVED, "e", is_dir=True), 0.0)
    ledger.see(SeenEvent(SeenKind.MOVED, "d", "e", is_dir=True), 0.0)
    (move,) = ledger.actions(0.0, 0)
    assert move.first == (("e/x", FILE.there.inode), ("e", FILE.there.inode))
    assert ledger.removed == {}


def test_only_a_file_is_removed_when_it_is_moved_out_of_the_directory():
    ledger = Ledger({"file": FILE, "earlier": EARLIER, "d": FILE})
    ledger.see(SeenEvent(SeenKind.MOVED_AWAY, "file"), 0.0)
    ledger.see(SeenEvent(SeenKind.MOVED_AWAY, "earlier"), 0.0)
    ledger.see(SeenEvent(SeenKind.MOVED_AWAY, "d", is_dir=True), 0.0)
    assert list(ledger.removed) == ["file"]
    assert set(ledger.findings.kept) == {"earlier", "d"}


def test_a_failure_is_tried_again_later_and_given_up_at_the_end():
    ledger = Ledger()
    ledger.see(SeenEvent(SeenKind.CLOSED, "file"), 0.0)
    now, gaps = 1.0, []
    for _ in range(8):
        actions = ledger.actions(now, 4)
        done(ledger, actions, now, Ending.FAILED, "Read-only file system")
        gaps.append((ledger.wake_at() or now) - now)
        now = ledger.wake_at() or now
    assert gaps == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    ledger.end(now)
    done(ledger, ledger.actions(now, 4), now, Ending.FAILED, "Read-only file system")
    assert ledger.is_settled()
    assert ledger.findings.failed == {"file": "Read-only file system"}


def test_a_rename_is_not_given_up_while_the_command_runs():
    ledger = Ledger({"old": EARLIER})
    ledger.see(SeenEvent(SeenKind.MOVED, "old", "new"), 0.0)
    ledger.see(SeenEvent(SeenKind.CLOSED, "old"), 0.0)
    now = 1.0
    for _ in range(3 * MOST_TRIES):
        actions = ledger.actions(now, 4)
        assert told(actions) == [("move", "old", "new")]
        done(ledger, actions, now, Ending.FAILED, "Read-only file system")
        now += 61
    ledger.end(now)
    done(ledger, ledger.actions(now, 4), now, Ending.FAILED, "Read-only file system")
    assert ledger.findings.failed == {"old": "it was renamed to new: Read-only file system"}
    assert ("carry", "old") in told(ledger.actions(now + 1, 4))


def test_the_end_waits_for_one_rename_that_fails_and_not_for_each():
    ledger = Ledger({f"old{n}": EARLIER for n in range(20)})
    for number in range(20):
        ledger.see(SeenEvent(SeenKind.MOVED, f"old{number}", f"new{number}"), 0.0)
    ledger.command_ended()
    ledger.end(1.0)
    now, results = 1.0, []
    while not ledger.is_settled():
        actions = ledger.actions(now, 4)
        results += told(actions)
        done(ledger, actions, now, Ending.FAILED, "Read-only file system")
        now = max(now, ledger.wake_at() or now)
    assert now < 30.0, "it was 288"
    assert len([one for one in results if one[0] == "move"]) == MOST_TRIES + 19
    assert {one.name for one in ledger.undrained()} >= {f"old{n}" for n in range(20)}


def test_what_was_seen_and_could_not_be_carried_out_in_time_is_named():
    ledger = Ledger({"old": EARLIER, "file": FILE})
    ledger.see(SeenEvent(SeenKind.MOVED, "old", "new"), 0.0)
    ledger.see(SeenEvent(SeenKind.REMOVED, "file"), 0.0)
    assert [one.name for one in ledger.undrained()] == ["new"]
    ledger.command_ended()
    assert [(one.name, one.why) for one in ledger.undrained()] == [
        ("file", "it was removed: there was no time left"),
        ("new", "there was no time left"),
        ("old", "it was renamed to new: there was no time left"),
    ]


def test_a_name_is_not_carried_while_it_is_removed():
    ledger = Ledger({"file": FILE})
    ledger.see(SeenEvent(SeenKind.REMOVED, "file"), 0.0)
    erase = ledger.actions(HOLD_S + 1, 4)
    assert told(erase) == [("erase", "file")]
    ledger.see(SeenEvent(SeenKind.CLOSED, "file"), HOLD_S + 1)
    assert ledger.actions(HOLD_S + 2, 4) == []
    done(ledger, erase, HOLD_S + 3)
    assert told(ledger.actions(HOLD_S + 4, 4)) == [("carry", "file")]


def misplaced(name: str, aside: str = "") -> ActionResult:
    shown = TargetEntry(EntryKind.EARLIER, EARLIER.there, shown_as="old")
    return ActionResult(Deed.CARRY, name, Ending.MISPLACED, shown, text=aside)


def test_the_targets_file_follows_the_local_link():
    ledger = Ledger({"old": EARLIER, "taken": EARLIER})
    ledger.see(SeenEvent(SeenKind.FOUND, "taken"), 0.0)
    ledger.actions(1.0, 4)
    followed = ledger.take(misplaced("taken", "aside"), 1.0)
    assert [(event.name, event.new) for event in followed] == [("taken", "aside"), ("old", "taken")]
    names = []
    while actions := ledger.actions(2.0, 0):
        names += told(actions)
        done(ledger, actions, 2.0)
    assert names == [("move", "taken", "aside"), ("move", "old", "taken")]


def test_a_link_that_cannot_be_followed_is_named():
    ledger = Ledger({"old": EARLIER})
    for _ in range(MOST_TRIES + 1):
        ledger.see(SeenEvent(SeenKind.FOUND, "new"), 0.0)
        ledger.actions(1.0, 4)
        ledger.take(misplaced("new"), 1.0)
        done(ledger, ledger.actions(1.0, 0), 1.0, Ending.HELD)
    assert ledger.findings.kept == {"old": "the local directory has it as new"}


def test_a_file_that_keeps_changing_is_carried_as_it_is_at_the_end():
    ledger = Ledger()
    ledger.see(SeenEvent(SeenKind.CLOSED, "file"), 0.0)
    ledger.end(0.0)
    now, tries = 0.0, []
    for _ in range(MOST_TRIES):
        actions = ledger.actions(now, 4)
        tries.append(actions[0].is_last_try)
        done(ledger, actions, now, Ending.CHANGED, "changed")
        now = ledger.wake_at() or now
    assert tries == [False, False, False, True]


def test_directories_get_their_times_last_and_the_deepest_first():
    ledger = Ledger()
    directory = TargetEntry(EntryKind.DIRECTORY, Fingerprint(1, -1, -1))
    ledger.see(SeenEvent(SeenKind.MADE, "d", is_dir=True), 0.0)
    ledger.see(SeenEvent(SeenKind.FOUND, "d/e", is_dir=True), 0.0)
    ledger.see(SeenEvent(SeenKind.CLOSED, "d/e/file"), 0.0)
    ledger.end(0.0)
    names = []
    now = 1.0
    while actions := ledger.actions(now, 4):
        now += 0.1
        names += told(actions)
        for action in actions:
            entry = None if action.deed is Deed.STAMP else FILE if "file" in action.name else directory
            ledger.take(ActionResult(action.deed, action.name, Ending.DONE, entry), now)
    assert names == [("carry", "d"), ("carry", "d/e"), ("carry", "d/e/file"), ("stamp", "d/e"), ("stamp", "d")]
    assert ledger.is_settled()


def test_a_name_that_waits_for_others_is_not_given_up_before_them():
    ledger = Ledger({"old": EARLIER}, is_late=True)
    ledger.recall(SeenEvent(SeenKind.MOVED, "old", "new"), ())
    ledger.see(SeenEvent(SeenKind.FOUND, "other"), 0.0)
    ledger.see(SeenEvent(SeenKind.FOUND, "held"), 0.0)
    (move, *carried) = ledger.actions(1.0, 4)
    assert told([move, *carried]) == [("move", "old", "new"), ("carry", "other"), ("carry", "held")]
    now, held = 1.0, carried[1]
    for _ in range(2 * MOST_TRIES):
        now += 100.0
        done(ledger, [held], now, Ending.HELD)
        (held,) = ledger.actions(now + 99.0, 4)
        assert not held.is_last_try
    done(ledger, [move, carried[0]], now)
    while not held.is_last_try:
        now += 100.0
        done(ledger, [held], now, Ending.HELD)
        (held,) = (one for one in ledger.actions(now + 99.0, 4) if one.name == "held")


# ---- space on the local disk


def of_size(size_bytes: int) -> TargetEntry:
    return TargetEntry(EntryKind.FILE, Fingerprint(1, size_bytes, 100), Fingerprint(2, size_bytes, 100))


def test_the_largest_files_that_are_drained_are_freed_and_no_more_than_needed():
    sizes = {"small": LEAST_FREED_BYTES - 1, "a": 300_000, "b": 200_000, "c": 100_000, "log": 10**9, "new": 10**9}
    sizes |= {"gone": 10**9, "moved": 10**9}
    ledger = Ledger({**{name: of_size(size) for name, size in sizes.items()}, "old": EARLIER})
    ledger.see(SeenEvent(SeenKind.WRITTEN, "log"), 0.0)
    ledger.see(SeenEvent(SeenKind.CLOSED, "new"), 0.0)
    ledger.see(SeenEvent(SeenKind.REMOVED, "gone"), 0.0)
    ledger.see(SeenEvent(SeenKind.MOVED, "moved", "there"), 0.0)
    actions = ledger.files_to_free(400_000, 0.0)
    assert told(actions) == [("free", "a"), ("free", "b")]
    assert ledger.files_to_free(400_000, 0.0) == [], "these are under way"
    assert "a" not in {left.name for left in ledger.undrained()}, "it is in the target whatever becomes of it"
    ledger.take(ActionResult(Deed.FREE, "a", Ending.DONE, EARLIER), 1.0)
    ledger.take(ActionResult(Deed.FREE, "b", Ending.KEPT), 1.0)
    assert ledger.entries["a"] is EARLIER
    assert told(ledger.files_to_free(400_000, 1.0)) == [("free", "c")]
    ledger.take(ActionResult(Deed.FREE, "c", Ending.KEPT), 1.0)
    assert ledger.files_to_free(400_000, 1.0 + FREE_AGAIN_S / 2) == []
    assert told(ledger.files_to_free(1, 1.0 + FREE_AGAIN_S)) == [("free", "b")]


def test_what_concerns_a_file_that_is_being_freed_waits_for_it():
    ledger = Ledger({"file": of_size(10**6)})
    freed = ledger.files_to_free(1, 0.0)
    ledger.see(SeenEvent(SeenKind.CLOSED, "file"), 0.0)
    ledger.see(SeenEvent(SeenKind.MOVED, "file", "new"), 0.0)
    assert ledger.actions(1.0, 4) == []
    assert not ledger.is_settled()
    ledger.take(ActionResult(Deed.FREE, "file", Ending.DONE, EARLIER), 1.0)
    (move,) = [action for action in ledger.actions(1.0, 4) if action.deed is Deed.MOVE]
    assert (move.name, move.new, move.entry) == ("file", "new", EARLIER)
    assert freed


def test_nothing_is_freed_after_the_end_of_the_command():
    ledger = Ledger({"file": of_size(10**6)})
    ledger.command_ended()
    assert ledger.files_to_free(1, 0.0) == []


@pytest.mark.parametrize("how", ["removed", "renamed"])
def test_directories_go_quickly_while_many_files_wait(how):
    """What is said of one directory costs no look at all names: the daemon answers opens with the same thread."""
    entries = {f"there/{number}": FILE for number in range(20_000)}
    ledger = Ledger(dict(entries))
    for number in range(20_000):
        ledger.see(SeenEvent(SeenKind.CLOSED, f"waits/{number}"), 0.0)
    for number in range(2_000):
        ledger.see(SeenEvent(SeenKind.MADE, f"d{number}", is_dir=True), 0.0)
        ledger.see(SeenEvent(SeenKind.CLOSED, f"d{number}/file"), 0.0)
    began_s = time.thread_time()
    for number in range(2_000):
        if how == "removed":
            ledger.see(SeenEvent(SeenKind.REMOVED, f"d{number}/file"), 0.0)
            ledger.see(SeenEvent(SeenKind.REMOVED, f"d{number}", is_dir=True), 0.0)
        else:
            ledger.see(SeenEvent(SeenKind.MOVED, f"d{number}", f"e{number}", is_dir=True), 0.0)
    assert time.thread_time() - began_s < 2.0
    left = {f"e{number}{end}" for number in range(2_000) for end in ("", "/file")} if how == "renamed" else set()
    assert ledger.marks.by_name.keys() == {f"waits/{number}" for number in range(20_000)} | left
