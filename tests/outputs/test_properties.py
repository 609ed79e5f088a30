"""Random file operations on a plain directory and on a watched one: the same tree comes of them; and after a kill at
any of them no closed file is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from crashing import LATE_S, Crash, account, crash_of_uploaders, drain_late_until
from draining import Running, tree
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from hpcstage.outputs import freeing, journal, ledger, marks, namequeue, outcomes, seen
from hpcstage.outputs.anchors import Anchors, anchors_beside
from hpcstage.outputs.drain import DrainReport
from hpcstage.outputs.facts import is_below
from hpcstage.outputs.late import drain_late
from hpcstage.outputs.target import TEMPORARY
from hpcstage.renaming import exchange_names

NAMES = ("a", "b", "d", "e")
NAME = st.sampled_from(NAMES)
PATH = st.one_of(NAME, st.tuples(NAME, NAME).map("/".join))
SIZE = st.sampled_from((0, 1, 5_000, 70_000))
MODE = st.sampled_from((0o600, 0o644, 0o755, 0o700))


def create(root: Path, path: str, size: int) -> None:
    (root / path).write_bytes(_content(path, size))


def append(root: Path, path: str, size: int) -> None:
    with (root / path).open("ab") as file:
        file.write(_content(path, size))


def overwrite(root: Path, path: str, size: int) -> None:
    with (root / path).open("r+b") as file:
        file.write(_content("over", size))


def replace(root: Path, path: str, size: int) -> None:
    temporary = root / f"{path}.tmp"
    temporary.write_bytes(_content("new", size))
    temporary.replace(root / path)


def truncate(root: Path, path: str, size: int) -> None:
    os.truncate(root / path, size)


def chmod(root: Path, path: str, mode: int) -> None:
    if not (root / path).is_dir() or mode & 0o100:
        (root / path).chmod(mode)


def make_directory(root: Path, path: str) -> None:
    (root / path).mkdir()


def remove(root: Path, path: str) -> None:
    (root / path).unlink()


def remove_directory(root: Path, path: str) -> None:
    (root / path).rmdir()


def remove_tree(root: Path, path: str) -> None:
    if (root / path).is_dir() and not (root / path).is_symlink():
        shutil.rmtree(root / path)


def symlink(root: Path, path: str, other: str) -> None:
    (root / path).symlink_to(other)


def link(root: Path, path: str, other: str) -> None:
    os.link(root / path, root / other)


def rename(root: Path, path: str, other: str) -> None:
    (root / path).rename(root / other)


def exchange(root: Path, path: str, other: str) -> None:
    exchange_names(os.fspath(root / path), os.fspath(root / other))


def rotate(root: Path, path: str) -> None:
    """Rotates a log, as its program does when it starts."""
    for number in (2, 1):
        with contextlib.suppress(FileNotFoundError):
            (root / f"{path}.{number}").rename(root / f"{path}.{number + 1}")
    (root / path).rename(root / f"{path}.1")
    (root / path).write_bytes(_content("log", 100))


def put_away(root: Path, path: str, other: str) -> None:
    """Renames into a directory that was made just before, which has no watch yet."""
    (root / other).mkdir()
    (root / path).rename(root / other / "away")


OF_TWO_PATHS = frozenset({link, rename, exchange, put_away})
OPERATION = st.one_of(
    st.tuples(st.sampled_from((create, append, overwrite, replace, truncate)), PATH, SIZE),
    st.tuples(st.just(chmod), PATH, MODE),
    st.tuples(st.sampled_from((make_directory, remove, remove_directory, remove_tree, rotate)), PATH),
    st.tuples(st.just(symlink), PATH, NAME),
    st.tuples(st.sampled_from((link, rename, rename, exchange, put_away)), PATH, PATH),
)
QUICK = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
"""An example takes a quarter of a second: a failure is told as it was found."""
PAUSE = st.sampled_from((0, 0, 0, 1, 5))
"""How many turns the drain gets after an operation."""
FULL = st.none() | st.tuples(st.sampled_from((1, 3)), PAUSE)
"""After how many operations each time the local disk is full, and how many turns later comes the next one."""


def _content(seed: str, size: int) -> bytes:
    return (f"{seed}{size} " * (size // 3 + 1)).encode()[:size]


def apply(root: Path, operation: tuple) -> int | None:
    """Does an operation; returns the number of its error."""
    try:
        operation[0](root, *operation[1:])
    except OSError as error:
        return error.errno
    except shutil.Error:
        return -1
    return None


def start_with(target: Path) -> None:
    """What the target holds at the start."""
    (target / "d").mkdir(parents=True)
    (target / "d/a").write_bytes(_content("earlier", 5_000))
    (target / "b").write_bytes(_content("earlier", 100))
    (target / "e").symlink_to("d")


class Pair:
    """A plain directory and a watched one with the same beginning."""

    def __init__(self, local: Path, shared: Path) -> None:
        self.plain = shared / "plain"
        start_with(self.plain)
        start_with(shared / "results")
        self.running = Running(local, shared / "results")
        self.target = self.running.target
        self.theirs: set[bytes] = set()

    def write_theirs(self, path: str, number: int) -> None:
        """Others write a file to the target where nothing is."""
        place = self.target / path
        if place.parent.is_dir() and not os.path.lexists(place):
            self.theirs.add(b"theirs %d" % number)
            place.write_bytes(b"theirs %d" % number)

    def free(self, full: tuple[int, int] | None, number: int) -> None:
        """After some of the operations all is drained and the local disk is full: links take the place of files."""
        if full is None:
            return
        every, turns = full
        if number % every:
            return
        self.running.turn(0.0)
        self.running.until(self.is_settled)
        self.running.drain.give_way(1 << 40, time.monotonic())
        for _ in range(turns):
            self.running.turn(0.005)

    def is_settled(self) -> bool:
        """Whether all that was seen is carried out, but for directories that have the names of files of others, which
        are named at the end, and what is in them."""
        drain = self.running.drain
        left = drain.report().undrained
        kept = [one.name for one in left if "a file that this run did not make is in the way" in one.why]
        is_rest_done = all(any(is_below(one.name, name) for name in kept) for one in left)
        return drain.is_drained or (is_rest_done and bool(kept) and not drain._ledger.renames)

    def both(self, operation: tuple, turns: int) -> None:
        if operation[0] is link and (self.running.out / operation[1]).is_symlink():
            return  # a link to what was there at the start can be linked only as what it is
        paths = operation[1:] if operation[0] in OF_TWO_PATHS else operation[1:2]
        if not self._are_shown(paths):
            if not self.running.closed:
                self.running.until(lambda: self._are_shown(paths) or self.is_settled())
            if not self._are_shown(paths):
                return
        plain = apply(self.plain, operation)
        watched = apply(self.running.out, operation)
        assert watched == plain, operation
        for _ in range(turns):
            self.running.turn(0.005)

    def _are_shown(self, paths: tuple[str, ...]) -> bool:
        """Whether the links to what was there at the start, on the way to paths, lead to it. One below a directory
        that was just renamed in the target, and one of two that were exchanged, leads elsewhere for a moment; if all is
        killed in that moment, until the late drain."""
        anchors = Anchors(anchors_beside(self.running.place.scratch))
        for name in self._on_the_way(paths):
            one = self.running.out / name
            inode = anchors.inode_shown_by(one.lstat()) if one.is_symlink() else None
            if inode is not None and (not one.exists() or one.stat().st_ino != inode):
                return False
        return True

    def _on_the_way(self, paths: tuple[str, ...]) -> set[str]:
        """The names that lead to paths, through links of the program, too."""
        waiting, found = list(paths), set()
        while waiting:
            name = waiting.pop()
            if name not in found and name != ".":
                found.add(name)
                waiting.append(os.path.dirname(name) or ".")
                one = self.running.out / name
                if one.is_symlink() and not os.path.isabs(text := os.readlink(one)):
                    waiting.append(os.path.normpath(os.path.join(os.path.dirname(name), text)))
        return found

    @contextlib.contextmanager
    def accounted(self) -> Iterator[None]:
        """Whatever fails tells how things stood."""
        try:
            yield
        except Exception as error:
            told = account(self.running.place, plain=self.plain, target=self.target)
            raise AssertionError(f"{error!r}\n{told}") from error


@pytest.fixture
def pairs(local_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Pair]:
    monkeypatch.setattr(seen, "CLOSED_S", 0.0)
    monkeypatch.setattr(seen, "OPEN_S", 0.01)
    monkeypatch.setattr(marks, "REST_S", 0.0)
    monkeypatch.setattr(marks, "RETRY_S", 0.01)
    monkeypatch.setattr(namequeue, "HOLD_S", 0.02)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # takes as long as others write; a kill loses nothing without it
    monkeypatch.setattr(ledger, "LEAST_FREED_BYTES", 0)
    monkeypatch.setattr(outcomes, "FREE_AGAIN_S", 0.0)
    monkeypatch.setattr(freeing, "GRACE_S", 0.003)
    monkeypatch.setattr(journal, "LONG_BYTES", 6000)  # some operations
    numbers = itertools.count()

    def make() -> Pair:
        number = next(numbers)
        return Pair(local_dir / f"p{number}", tmp_path / f"p{number}")

    return make


@pytest.fixture
def crash(monkeypatch: pytest.MonkeyPatch) -> Crash:
    return crash_of_uploaders(monkeypatch)


A_LINK_TO_ONE_OF_TWO_THAT_ARE_EXCHANGED = [((exchange, "b", "d"), 1), ((exchange, "e/b", "d/b"), 1)]


@QUICK
@example(operations=A_LINK_TO_ONE_OF_TWO_THAT_ARE_EXCHANGED, full=None)
@given(operations=st.lists(st.tuples(OPERATION, PAUSE), max_size=25), full=FULL)
def test_a_watched_directory_leaves_the_tree_of_a_plain_one(pairs, operations, full):
    pair = pairs()
    try:
        for number, (operation, turns) in enumerate(operations):
            pair.both(operation, turns)
            pair.free(full, number)
        report = pair.running.end()
        assert (report.undrained, report.findings.kept, report.findings.beside) == ([], {}, {})
        assert tree(pair.target) == tree(pair.plain)
    finally:
        pair.running.stop()


STEPS = st.integers(1, 60)


A_DIRECTORY_UNDER_A_NAME_OF_THEIRS = {
    "operations": [((create, "b", 1), 1), ((make_directory, "a"), 5), ((create, "a/d", 1), 1), ((create, "b", 1), 0)],
    "theirs": {0: "a", 2: "c", 3: "d/b"},
}


@QUICK
@example(**A_DIRECTORY_UNDER_A_NAME_OF_THEIRS, kills={}, full=None, unwatched=[], last=1, late=[])
@given(
    operations=st.lists(st.tuples(OPERATION, PAUSE), max_size=20),
    kills=st.dictionaries(st.integers(0, 19), STEPS, max_size=3),
    full=FULL,
    theirs=st.dictionaries(st.integers(0, 25), st.sampled_from(("a", "c", "d/b", "d/c", "a/b")), max_size=3),
    unwatched=st.lists(OPERATION, max_size=6),
    last=st.just(0) | STEPS,
    late=st.lists(STEPS, max_size=2),
)
def test_no_closed_file_is_lost_when_all_is_killed(
    pairs, crash, operations, kills, full, theirs, unwatched, last, late
):
    pair = pairs()
    try:
        with pair.accounted():
            run_and_kill(pair, crash, operations, kills, full, theirs, last)
            for number, operation in enumerate(unwatched, 20):
                if number in theirs:
                    pair.write_theirs(theirs[number], number)
                pair.both(operation, 0)
            for steps in late:
                drain_late_until(pair.running.place, crash, steps)
            assert_same_after_compaction(pair.running.place.journal)
            report = drain_late(pair.running.place, LATE_S)
            assert report is not None
            assert_nothing_is_lost(pair, report)
            found = tree(pair.target)
            assert not any(name.rpartition("/")[2].startswith(TEMPORARY) for name in found)
            again = drain_late(pair.running.place, LATE_S)
            assert again is not None
            assert tree(pair.target) == found
    finally:
        pair.running.stop()


def assert_same_after_compaction(path: str) -> None:
    """A journal that was written anew says the same."""
    told = []
    for _ in range(2):
        recalled = journal.recall(path)
        assert recalled is not None
        told.append(list(recalled.facts()))
        made = journal.Journal.open(path)
        made.compact()
        made.close()
    assert told[0] == told[1]


def run_and_kill(
    pair: Pair,
    crash: Crash,
    operations: list[tuple[tuple, int]],
    kills: dict[int, int],
    full: tuple[int, int] | None,
    theirs: dict[int, str],
    last: int,
) -> None:
    """Does operations while uploaders are killed: those of `kills` so many steps after an operation. At the end all is
    killed, with a uploader that has so many steps left if it has more to do."""
    for number, (operation, turns) in enumerate(operations):
        if number in theirs:
            pair.running.turn(0.0)
            pair.running.until(pair.is_settled)
            pair.write_theirs(theirs[number], number)
        if number in kills:
            crash.after(kills[number])
        pair.both(operation, turns)
        pair.free(full, number)
    if last:
        crash.after(last)
        pair.running.turn(0.0)
        pair.running.until(lambda: crash.has_happened or pair.is_settled())
    pair.running.stop()


def assert_nothing_is_lost(pair: Pair, report: DrainReport) -> None:
    """The target has what the plain directory has, under its name or the one beside that the report tells, and nothing
    else that the report does not tell of."""
    found = tree(pair.target)
    told = {*report.findings.beside.values(), *report.findings.kept, *(one.name for one in report.undrained)}
    for name in found.keys() - tree(pair.plain).keys():
        is_told = any(is_below(name, one) for one in told) or found[name][1] in pair.theirs
        assert is_told, f"nobody said that {name} is there: {report}"
    contents = {what for _, what, *_ in found.values()}
    assert pair.theirs <= contents
    for name, (_, what, *_) in tree(pair.plain).items():
        if any(is_below(name, left.name) for left in report.undrained):
            continue  # what nobody saw and cannot be done is named
        names = [there for there in (name, report.findings.beside.get(name, "")) if there in found]
        if pair.theirs or report.findings.kept:
            assert names or what in contents, f"{name} is lost: {report}"
            assert not isinstance(what, bytes) or what in contents, f"{name} is lost: {report}"
            continue
        assert names, f"{name} is lost: {report}"
        if isinstance(what, bytes):
            there = [_content_through_links(pair.target / one) for one in names]
            assert what in there, f"{name} is another: {report}"


def _content_through_links(path: Path) -> bytes | None:
    """The content of a file; the new name of one at the start whose rename nobody saw leads to it."""
    try:
        return path.read_bytes()
    except OSError:
        return None


UNSEEN = {
    "a rename into a new directory": ((make_directory, "n"), (rename, "b", "n/b"), (create, "b", 10)),
    "a new directory over the name": ((make_directory, "n"), (rename, "b", "n/b"), (make_directory, "b")),
    "a link over the name": ((make_directory, "n"), (rename, "b", "n/b"), (symlink, "b", "n")),
    "a rename over the name": ((make_directory, "n"), (rename, "b", "n/b"), (create, "c", 10), (rename, "c", "b")),
    "an exchange, and one removed": ((exchange, "b", "d/a"), (remove, "b")),
    "an exchange, and one renamed": ((exchange, "b", "d/a"), (rename, "b", "c")),
    "an exchange, and the other renamed": ((exchange, "b", "d/a"), (rename, "d/a", "c")),
    "a rename and back": ((rename, "b", "c"), (rename, "c", "b"), (create, "c", 10)),
    "an exchange with a new file, renamed": ((exchange, "f", "b"), (rename, "f", "g")),
    "an exchange of directories": ((exchange, "d", "m"), (create, "d/x", 1), (create, "m/y", 1), (remove, "m/a")),
    "an exchange of directories, one renamed": ((exchange, "d", "m"), (rename, "d", "c"), (create, "m/y", 1)),
    "an exchange of directories, one removed": ((exchange, "d", "m"), (remove_tree, "d"), (create, "m/y", 1)),
    "a directory into a new one": ((make_directory, "n"), (rename, "d", "n/d"), (create, "n/d/x", 1)),
    "a directory into a new one, and another": ((make_directory, "n"), (rename, "d", "n/d"), (make_directory, "d")),
    "a directory renamed and back": ((rename, "d", "c"), (rename, "c", "d"), (make_directory, "c")),
    "a directory over a removed name": ((remove, "b"), (rename, "d", "b")),
    "a file over a removed directory": ((remove_tree, "d"), (rename, "f", "d")),
    "three directories in a ring": ((rename, "d", "t"), (rename, "m", "d"), (rename, "t", "m"), (create, "m/x", 1)),
    "a link to itself over a directory": ((remove_tree, "d"), (symlink, "d", "d")),
    "a link over a directory": ((create, "m/a", 3), (remove_tree, "d"), (symlink, "d", "m")),
    "three in a ring": ((rename, "b", "t"), (rename, "d/a", "b"), (rename, "f", "d/a"), (rename, "t", "f")),
    "log rotation": ((rename, "d/a", "d/a.1"), (rename, "b", "d/a"), (create, "b", 7), (rename, "d/a.1", "d/a.2")),
}


def test_a_directory_that_was_renamed_unseen_and_a_file_in_its_place(pairs):
    pair = pairs()
    try:
        pair.running.stop()
        pair.both((rotate, "d"), 0)
        for _ in range(2):
            report = drain_late(pair.running.place, LATE_S)
            assert report is not None
            assert (report.undrained, report.findings.kept, report.findings.beside) == ([], {}, {})
            assert tree(pair.target) == tree(pair.plain)
    finally:
        pair.running.stop()


@pytest.mark.parametrize("operations", UNSEEN.values(), ids=UNSEEN)
@pytest.mark.parametrize("is_late", [False, True])
def test_what_happens_between_two_looks(pairs, operations, is_late):
    pair = pairs()
    try:
        for operation in ((create, "f", 5_000), (make_directory, "m"), (create, "m/z", 5_000)):
            pair.both(operation, 0)
        pair.running.settle()
        for operation in operations:
            pair.both(operation, 0)
        if is_late:
            pair.running.stop()
            report = drain_late(pair.running.place, LATE_S)
            contents = {what for _, what, *_ in tree(pair.target).values()}
            assert report is not None
            assert {what for _, what, *_ in tree(pair.plain).values() if isinstance(what, bytes)} <= contents
        else:
            report = pair.running.end()
            assert tree(pair.target) == tree(pair.plain)
            assert (report.findings.kept, report.findings.beside) == ({}, {})
        assert report.undrained == []
        for path in pair.running.out.rglob("*"):
            assert path.exists() or path.name in "ed", f"{path} leads nowhere"
    finally:
        pair.running.stop()


def test_a_rename_that_was_seen_and_another_that_was_not(pairs):
    pair = pairs()
    try:
        pair.both((rename, "b", "c"), 0)
        pair.running.drain._ledger._state.queue.not_before = time.monotonic() + 100  # nothing is carried out
        pair.running.drain.work(time.monotonic())
        pair.running.stop()
        for operation in ((rename, "c", "x"), (create, "c", 10)):
            pair.both(operation, 0)
        report = drain_late(pair.running.place, LATE_S)
        assert report is not None
        assert (report.undrained, report.findings.kept, report.findings.beside) == ([], {}, {})
        assert tree(pair.target) == tree(pair.plain)
    finally:
        pair.running.stop()


def test_a_name_waits_for_all_that_a_late_drain_does(pairs):
    pair = pairs()
    try:
        pair.both((exchange, "e", "b"), 0)
        pair.running.turn(0.0)
        pair.running.until(lambda: len(pair.running.drain._ledger.renames) == 1)  # of an exchange's three
        pair.running.stop()
        pair.both((exchange, "d", "b"), 0)
        for _ in range(2):
            report = drain_late(pair.running.place, LATE_S)
            assert report is not None
            assert (report.undrained, report.findings.kept, report.findings.beside) == ([], {}, {})
            assert tree(pair.target) == tree(pair.plain)
    finally:
        pair.running.stop()


def test_what_landed_beside_is_carried_by_the_next_late_drain(pairs):
    pair = pairs()
    try:
        pair.both((create, "a", 10), 0)
        pair.running.settle()
        pair.running.stop()
        pair.both((create, "a", 20), 0)
        (pair.target / "a").write_text("edited on the login node")
        report = drain_late(pair.running.place, LATE_S)
        assert report is not None
        assert report.findings.beside == {"a": "a.run-1"}
        (pair.target / "a").unlink()
        pair.both((create, "a", 30), 0)
        report = drain_late(pair.running.place, LATE_S)
        assert report is not None
        assert report.findings.beside == {}
        assert (pair.target / "a").read_bytes() == _content("a", 30)
    finally:
        pair.running.stop()


def test_what_was_seen_is_finished_late(pairs):
    pair = pairs()
    try:
        for operation in ((create, "a", 5_000), (make_directory, "e2"), (create, "e2/b", 1)):
            pair.both(operation, 0)
        pair.running.settle()
        for operation in ((rename, "a", "c"), (remove, "b"), (rename, "d", "f"), (remove, "e2/b")):
            pair.both(operation, 0)
        pair.running.drain._ledger._state.queue.not_before = time.monotonic() + 100  # nothing is carried out
        pair.running.drain.work(time.monotonic())
        pair.running.stop()
        assert (pair.target / "b").exists()
        report = drain_late(pair.running.place, LATE_S)
        assert report is not None
        assert (report.undrained, report.findings.kept, report.findings.beside) == ([], {}, {})
        assert tree(pair.target) == tree(pair.plain)
    finally:
        pair.running.stop()


def test_what_was_renamed_unseen_is_not_overwritten(pairs):
    pair = pairs()
    try:
        pair.running.stop()
        for operation in ((rename, "b", "b.1"), (create, "b", 10)):
            pair.both(operation, 0)
        report = drain_late(pair.running.place, LATE_S)
        assert report is not None
        assert (report.undrained, report.findings.kept, report.findings.beside) == ([], {}, {})
        assert tree(pair.target) == tree(pair.plain)
    finally:
        pair.running.stop()


def test_a_file_that_others_changed_is_not_replaced_late(pairs):
    pair = pairs()
    try:
        pair.both((create, "a", 10), 0)
        pair.running.settle()
        pair.both((create, "a", 20), 0)
        pair.both((replace, "b", 30), 0)
        pair.running.stop()
        (pair.target / "a").write_text("edited on the login node")
        report = drain_late(pair.running.place, LATE_S)
        assert report is not None
        assert report.findings.beside == {"a": "a.run-1"}
        assert (pair.target / "a").read_text() == "edited on the login node"
        assert (pair.target / "a.run-1").read_bytes() == _content("a", 20)
        assert (pair.target / "b").read_bytes() == _content("new", 30)
    finally:
        pair.running.stop()


def test_a_journal_with_broken_lines_removes_nothing(pairs):
    pair = pairs()
    try:
        pair.both((create, "a", 10), 0)
        pair.running.settle()
        pair.running.stop()
        apply(pair.running.out, (remove, "a"))
        path = Path(pair.running.place.journal)
        journal = path.read_bytes()
        path.write_bytes(journal[:-20] + b"\xff" * 7)
        with path.open("ab") as file:
            file.write(b'\n999 1 ["saw","removed","a","",false,[]]\n')
        before = tree(pair.target)
        report = drain_late(pair.running.place, LATE_S)
        assert report is not None
        assert tree(pair.target) == before
        path.write_bytes(b"nothing of it\n")
        assert drain_late(pair.running.place, LATE_S) is None
    finally:
        pair.running.stop()
