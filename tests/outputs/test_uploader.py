"""The uploader alone, told to do what the local links or the target contradict: it replaces and removes nothing
then."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from crashing import Crash

from hpcstage.outputs import links
from hpcstage.outputs.facts import Action, ActionResult, Deed, Ending, EntryKind, Fingerprint, TargetEntry
from hpcstage.outputs.journal import Journal
from hpcstage.outputs.prepare import OutputPlace, prepare
from hpcstage.outputs.uploader import Uploader


class Carried:
    """A prepared directory, its target, and a uploader that is told what to do by the test."""

    def __init__(self, local: Path, target: Path) -> None:
        place = OutputPlace(local / "out")
        prepared = prepare(place, target, "run-1")
        self.target, self.out, self.entries = target, Path(place.root), prepared.entries
        self.journal = Journal.open(place.journal)
        self.beside = ""
        self.start_again = lambda: self._start(Uploader(place.root, place.scratch, prepared.charter, self.journal))
        self.start_again()

    def _start(self, uploader: Uploader) -> None:
        self.uploader = uploader
        uploader.take_over(())

    def spares(self) -> list[str]:
        """The links that have not taken their places, and their anchors."""
        anchors = (name for name in os.listdir(self.out.parent / "anchors") if name.endswith(".spare"))
        return [*os.listdir(self.out.parent / "scratch"), *anchors]

    def do(self, deed: Deed, name: str, new: str = "", **facts: object) -> ActionResult:
        """Does an action with what is known of the names, as the ledger hands it out."""
        told = {"entry": self.entries.get(name), "new_entry": self.entries.get(new), **facts}
        result = self.uploader.do(Action.from_json(Action(deed, name, new, **told).to_json()))
        if result.entry is not None and result.ending is Ending.DONE:
            self.entries[new or name] = result.entry
        return result


def fill(target: Path) -> Path:
    for name in "ab":
        (target / name).write_text(f"earlier {name}")
    os.link(target / "a", target / "a2")
    return target


@pytest.fixture
def carried(local_dir: Path, tmp_path: Path) -> Iterator[Carried]:
    target = tmp_path / "results"
    target.mkdir()
    made = Carried(local_dir, fill(target))
    yield made
    made.journal.close()


@pytest.mark.parametrize("is_linked", [False, True])
def test_the_inode_of_a_link_that_was_replaced_stands_for_nothing(carried, is_linked):
    """It is free, and the next link of the program may get it; unless the link has another name."""
    former, inode = (carried.out / "b").lstat(), (carried.target / "b").stat().st_ino
    assert carried.uploader._links.inode_shown_by(former) == inode
    if is_linked:
        os.link(carried.out / "b", carried.out / "second", follow_symlinks=False)
    (carried.out / "b").rename(carried.out / "c")
    assert carried.do(Deed.MOVE, "b", "c").ending is Ending.DONE
    assert carried.uploader._links.inode_shown_by(former) == (inode if is_linked else None)
    assert carried.uploader._links.inode_shown_by((carried.out / "c").lstat()) == inode


@pytest.mark.parametrize("is_known", [True, False])
def test_a_file_waits_for_the_rename_of_what_has_its_name(carried, is_known):
    (carried.out / "b").rename(carried.out / "c")
    (carried.out / "b").write_text("new")
    known = {} if is_known else {"entry": None}
    assert carried.do(Deed.CARRY, "b", **known).ending is Ending.HELD
    assert (carried.target / "b").read_text() == "earlier b"
    result = carried.do(Deed.CARRY, "b", is_last_try=True, **known)
    assert (result.ending, result.text) == (Ending.BESIDE, "b.run-1")
    assert (carried.target / "b").read_text() == "earlier b"
    assert (carried.target / "b.run-1").read_text() == "new"
    assert sorted(os.listdir(carried.target)) == ["a", "a2", "b", "b.run-1"]


@pytest.mark.parametrize("what", ["directory", "link"])
def test_nothing_takes_the_place_of_what_is_still_shown(carried, what):
    (carried.out / "b").rename(carried.out / "c")
    (carried.out / "b").mkdir() if what == "directory" else (carried.out / "b").symlink_to("nowhere")
    assert carried.do(Deed.CARRY, "b").ending is Ending.HELD
    carried.do(Deed.CARRY, "b", is_last_try=True)
    assert (carried.target / "b").read_text() == "earlier b"


def test_what_is_shown_by_no_link_any_more_is_replaced_and_removed(carried):
    (carried.out / "b").unlink()
    (carried.out / "b").write_text("new")
    assert carried.do(Deed.CARRY, "b").ending is Ending.DONE
    assert (carried.target / "b").read_text() == "new"
    (carried.out / "a").unlink()
    assert carried.do(Deed.ERASE, "a").ending is Ending.DONE
    assert (carried.out / "a2").read_text() == "earlier a"


def test_a_link_under_another_name_keeps_a_file_from_being_removed(carried):
    (carried.out / "b").rename(carried.out / "c")
    assert carried.do(Deed.ERASE, "b").ending is Ending.KEPT
    result = carried.do(Deed.CARRY, "c")
    assert (result.ending, result.entry.shown_as) == (Ending.MISPLACED, "b")
    assert carried.do(Deed.MOVE, "b", "c").ending is Ending.DONE
    assert os.readlink(carried.out / "c") == os.fspath(carried.target / "c")
    (carried.out / "c").rename(carried.out / "d")
    (carried.out / "c").write_text("new")
    assert carried.do(Deed.CARRY, "c").ending is Ending.HELD


def test_the_names_of_a_hard_link_are_told_apart(carried):
    (carried.out / "a2").rename(carried.out / "c")
    assert carried.do(Deed.ERASE, "a2").ending is Ending.KEPT
    assert carried.do(Deed.MOVE, "a2", "c").ending is Ending.DONE
    (carried.out / "a").unlink()
    assert carried.do(Deed.ERASE, "a").ending is Ending.DONE
    assert sorted(os.listdir(carried.target)) == ["b", "c"]


def test_a_rename_onto_what_is_still_shown_is_not_done(carried):
    assert carried.do(Deed.MOVE, "a", "b").ending is Ending.HELD
    (carried.out / "new").write_text("new")
    assert carried.do(Deed.CARRY, "new").ending is Ending.DONE
    assert carried.do(Deed.MOVE, "new", "b").ending is Ending.CHANGED
    assert (carried.target / "b").read_text() == "earlier b"


def test_what_others_put_there_is_neither_renamed_nor_removed(carried):
    (carried.out / "new").write_text("new")
    carried.do(Deed.CARRY, "new")
    (carried.target / "other").write_text("of others")
    (carried.target / "other").rename(carried.target / "new")
    (carried.out / "new").rename(carried.out / "newer")
    assert carried.do(Deed.MOVE, "new", "newer").ending is Ending.CHANGED
    assert carried.do(Deed.ERASE, "new").ending is Ending.KEPT
    assert (carried.target / "new").read_text() == "of others"
    (carried.target / "newer").write_text("of others, too")
    (carried.out / "b").rename(carried.out / "newer")
    assert carried.do(Deed.MOVE, "b", "newer").ending is Ending.KEPT
    assert (carried.target / "newer").read_text() == "of others, too"


def test_links_below_a_directory_follow_its_rename_at_once(carried):
    (carried.out / "d").mkdir()
    carried.do(Deed.CARRY, "d")
    (carried.out / "b").rename(carried.out / "d/b")
    assert carried.do(Deed.MOVE, "b", "d/b").ending is Ending.DONE
    (carried.out / "d").rename(carried.out / "e")
    assert carried.do(Deed.MOVE, "d", "e", is_dir=True).ending is Ending.DONE
    assert os.readlink(carried.out / "e/b") == os.fspath(carried.target / "e/b")
    assert (carried.out / "e/b").read_text() == "earlier b"


def test_links_follow_a_rename_after_which_its_process_was_killed(carried):
    (carried.out / "d").mkdir()
    carried.do(Deed.CARRY, "d")
    (carried.out / "b").rename(carried.out / "d/b")
    carried.do(Deed.MOVE, "b", "d/b")
    for name, new in (("d", "e"), ("a", "c")):
        (carried.out / name).rename(carried.out / new)
        (carried.target / name).rename(carried.target / new)
        assert carried.do(Deed.MOVE, name, new, is_dir=name == "d").ending is Ending.DONE
    assert ((carried.out / "e/b").read_text(), (carried.out / "c").read_text()) == ("earlier b", "earlier a")


@pytest.mark.parametrize(("name", "new"), [("a", "c"), ("b", "c"), ("d", "e")])
def test_a_rename_that_is_killed_at_any_step_is_finished(local_dir, tmp_path, name, new):
    for steps in itertools.count(1):
        crash, target = Crash(), tmp_path / f"{steps}"
        (target / "d").mkdir(parents=True)
        (target / "d/f").write_text("earlier f")
        carried = Carried(local_dir / f"{steps}", fill(target))
        (carried.out / name).rename(carried.out / new)
        crash.after(steps)
        crash.of(lambda carried=carried: carried.do(Deed.MOVE, name, new, is_dir=name == "d"))
        carried.start_again()
        assert carried.do(Deed.MOVE, name, new, is_dir=name == "d").ending is Ending.DONE
        assert sorted(os.listdir(target)) == sorted({"a", "a2", "b", "d"} - {name} | {new}), steps
        assert carried.spares() == [], steps
        shown = "e/f" if name == "d" else new
        assert os.readlink(carried.out / shown) == os.fspath(target / shown), steps
        (carried.out / shown).unlink()
        entry = TargetEntry(EntryKind.EARLIER, Fingerprint((target / shown).lstat().st_ino, -1, 0))
        assert carried.do(Deed.ERASE, shown, entry=entry).ending is Ending.DONE, "nothing shows it any more"
        carried.journal.close()
        if not crash.has_happened:
            break
    assert steps > 8


def test_what_the_program_put_in_the_place_of_a_link_comes_back(carried, monkeypatch):
    real = links.exchange_names

    def killed(spare, local):
        os.unlink(local)
        Path(local).write_text("new")
        real(spare, local)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(links, "exchange_names", killed)
    (carried.out / "b").rename(carried.out / "c")
    Crash().of(lambda: carried.do(Deed.MOVE, "b", "c"))
    monkeypatch.undo()
    assert (carried.out / "c").is_symlink()
    carried.start_again()
    assert (carried.out / "c").read_text() == "new"
    assert carried.spares() == []


def test_what_a_killed_rename_left_goes_where_the_rename_is_refused(carried):
    left = carried.target / carried.uploader._target.temporary("c")
    (carried.out / "a").rename(carried.out / "c")
    os.link(carried.target / "a", left)
    (carried.target / "a").write_text("changed by others")
    os.utime(carried.target / "a", (2e9, 2e9))
    assert carried.do(Deed.MOVE, "a", "c", is_late=True).ending is Ending.KEPT
    assert not left.exists()


def test_new_directories_keep_the_group_of_the_target(carried):
    os.chmod(carried.target, 0o2770)
    for name in ("d", "d/e"):
        (carried.out / name).mkdir(0o750)
        carried.do(Deed.CARRY, name)
        carried.do(Deed.STAMP, name, is_dir=True)
        assert stat.S_IMODE((carried.target / name).stat().st_mode) == 0o2750


@pytest.mark.parametrize("leads_to", ["m", "d"])
def test_a_removal_below_what_is_a_link_now(carried, leads_to):
    for name in ("d", "m"):
        (carried.out / name).mkdir()
        (carried.out / name / "x").write_text(name)
        for one in (name, f"{name}/x"):
            carried.do(Deed.CARRY, one)
    shutil.rmtree(carried.out / "d")
    (carried.out / "d").symlink_to(leads_to)
    assert carried.do(Deed.ERASE, "d/x").ending is Ending.DONE
    assert os.listdir(carried.target / "d") == []
    assert (carried.target / "m/x").read_text() == "m"


def test_a_file_of_others_keeps_its_name(carried):
    (carried.out / "new").write_text("new")
    (carried.target / "new").write_text("of others")
    for _ in range(2):
        result = carried.do(Deed.CARRY, "new", beside=carried.beside)
        assert (result.ending, result.text) == (Ending.BESIDE, "new.run-1")
        carried.beside = result.text
    assert carried.do(Deed.CARRY, "new").text == "new.run-1.1"
    assert (carried.target / "new").read_text() == "of others"


def test_what_a_process_wrote_before_it_died_is_known(carried):
    (carried.out / "new").write_text("new")
    assert carried.do(Deed.CARRY, "new").ending is Ending.DONE
    (carried.out / "new").write_text("newer")
    assert carried.do(Deed.CARRY, "new", entry=None).ending is Ending.BESIDE
    carried.uploader.take_over({"new"})
    assert carried.do(Deed.CARRY, "new", entry=None).ending is Ending.DONE
    assert (carried.target / "new").read_text() == "newer"


def test_what_is_removed_before_a_directory_is_renamed_is_what_was_there(carried):
    for name in ("d", "e"):
        (carried.out / name).mkdir()
        carried.do(Deed.CARRY, name)
    for name in ("e/mine", "e/theirs"):
        (carried.out / name).write_text("new")
        carried.do(Deed.CARRY, name)
    first = tuple((name, carried.entries[name].there.inode) for name in ("e/mine", "e/theirs", "e"))
    (carried.target / "theirs").write_text("of others")
    (carried.target / "theirs").rename(carried.target / "e/theirs")
    assert carried.do(Deed.MOVE, "d", "e", is_dir=True, first=first).ending is Ending.KEPT
    assert os.listdir(carried.target / "e") == ["theirs"]


def test_a_link_of_the_programs_to_what_was_there_is_carried_as_a_link(carried):
    os.link(carried.out / "b", carried.out / "second", follow_symlinks=False)
    (carried.out / "own").symlink_to(carried.target / "b")
    for name in ("second", "own"):
        assert carried.do(Deed.CARRY, name).ending is Ending.DONE
        assert os.readlink(carried.target / name) == "b"


def test_actions_and_results_pass_through_the_pipe():
    entry = TargetEntry(EntryKind.FILE, Fingerprint(1, 2, 3), Fingerprint(4, 5, 6), 7, 0o640, "x", appending=True)
    action = Action(Deed.MOVE, "a", "b", True, entry, None, True, True, True, True, "c", (("b", 3),))
    assert Action.from_json(action.to_json()) == action
    result = ActionResult(Deed.CARRY, "a", Ending.MISPLACED, entry, 5, "text", 6, 7.0)
    assert ActionResult.from_json(result.to_json()) == result
