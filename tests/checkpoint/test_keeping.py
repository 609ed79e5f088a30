"""The keeper of checkpoints: what it restores, saves and drains, and the plain files that it leaves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import wait_for

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.keeping import facts
from hpcstage.checkpoint.keeping.facts import CheckpointCharter, CheckpointPlace, KeepingReport
from hpcstage.checkpoint.keeping.late import drain_late
from hpcstage.checkpoint.keeping.plain import damaged, described, drain_generation, names_in
from hpcstage.checkpoint.keeping.process import KeeperProcess

SIZE_BYTES = 200_000


class Kept:
    """A directory with its keeper, and the target."""

    def __init__(self, base: Path, target: Path, earlier: tuple[Path, ...] = ()) -> None:
        base.mkdir()
        target.mkdir(exist_ok=True)
        self.target = target
        self.place = CheckpointPlace(base)
        self.place.tree.mkdir()
        bases = tuple(map(os.fspath, earlier))
        self.charter = CheckpointCharter("run", os.fspath(target), target.stat().st_ino, None, bases)
        self.charter.save(self.place)
        self.keeper = KeeperProcess(self.place)
        self.until(lambda: self.keeper.is_ready or self.keeper.is_drained, "the start")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits as the daemon's loop does."""

        def turn() -> bool:
            self.keeper.work(0.0)
            return condition()

        wait_for(turn, 20, what)

    def save(self, name: str, content: bytes | None = None) -> None:
        """Completes a checkpoint, as careful programs do."""
        made = self.place.tree / ".new"
        made.write_bytes(os.urandom(SIZE_BYTES) if content is None else content)
        made.rename(self.place.tree / name)

    def end(self, *, is_orderly: bool = True) -> KeepingReport:
        """Ends the run, and returns what became of it."""
        self.keeper.end(0.0, is_orderly=is_orderly)
        self.until(lambda: self.keeper.is_drained, "the end")
        report = self.keeper.report()
        assert report is not None
        return report

    def drained(self) -> list[str]:
        return names_in(self.target)


@pytest.fixture
def make(local_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def begin(name: str = "run", earlier: tuple[Path, ...] = ()) -> Kept:
        made.append(Kept(local_dir / name, tmp_path / "target", earlier))
        return made[-1]

    yield begin
    for one in made:
        one.keeper.close()


Make = Callable[..., Kept]


def test_each_complete_entry_is_drained_while_the_command_runs(make: Make) -> None:
    kept = make()
    kept.save("step1")
    kept.until(lambda: kept.drained() == ["step1"], "the drain")
    kept.save("step2")
    kept.until(lambda: kept.drained() == ["step1", "step2"], "the drain")
    report = kept.end()
    assert [row.kind for row in report.saved][:1] == ["full"]
    assert report.saved_count == len(report.saved) >= 2
    opened = described(kept.target)
    assert opened is not None
    assert damaged(kept.target, opened) == {}


def test_names_that_are_not_utf8_and_directories_and_links(make: Make) -> None:
    kept = make()
    tree = kept.place.tree
    (tree / ".dcp").mkdir()
    (tree / ".dcp" / os.fsdecode(b"\xff0.distcp")).write_bytes(os.urandom(SIZE_BYTES))
    (tree / ".dcp/empty").mkdir()
    (tree / ".dcp").rename(tree / "dcp")
    (tree / "last").symlink_to("dcp")
    report = kept.end()
    assert report.undrained == ()
    assert sorted(os.listdir(kept.target / "dcp")) == ["empty", os.fsdecode(b"\xff0.distcp")]
    assert (kept.target / "last").readlink() == Path("dcp")
    opened = described(kept.target)
    assert opened is not None
    assert damaged(kept.target, opened) == {}


def test_the_next_run_has_the_state_and_its_numbers_grow(make: Make) -> None:
    first = make("first")
    first.save("step1")
    numbers = [row.number for row in first.end().saved]
    second = make("second")
    assert names_in(second.place.tree) == ["step1"]
    second.save("step2")
    report = second.end()
    assert "1 of 1 verified" in report.restored
    assert min(row.number for row in report.saved) > max(numbers)
    assert second.drained() == ["step1", "step2"]


def test_a_run_that_saves_nothing_drains_nothing(make: Make) -> None:
    first = make("first")
    first.save("step1")
    first.end()
    before = (first.target / "step1").stat()
    report = make("second").end()
    assert (report.saved_count, report.files) == (0, 0)
    assert (first.target / "step1").stat().st_ctime_ns == before.st_ctime_ns


def test_a_drained_file_that_was_damaged_is_not_shown(make: Make) -> None:
    first = make("first")
    first.save("step1")
    first.save("step2")
    first.end()
    times = (first.target / "step1").stat()
    with (first.target / "step1").open("r+b") as file:
        file.write(b"other")
    os.utime(first.target / "step1", ns=(times.st_atime_ns, times.st_mtime_ns))
    second = make("second")
    assert names_in(second.place.tree) == ["step2"]
    (line,) = second.end().refused
    assert "step1" in line
    assert "step1" in second.drained(), "it is not removed either"


def test_a_newer_file_of_somebody_else_keeps_its_name(make: Make) -> None:
    kept = make()
    other = kept.target / "step1"
    other.write_text("other")
    later_ns = time.time_ns() + 10**12
    os.utime(other, ns=(later_ns, later_ns))
    kept.save("step1", b"ours")
    report = kept.end()
    assert other.read_text() == "other"
    assert (kept.target / "step1.run").read_bytes() == b"ours"
    assert report.findings["beside"] == {"step1": "step1.run"}


def test_an_older_state_takes_the_place_of_what_this_run_drained(make: Make) -> None:
    kept = make()
    kept.save("last", b"new")
    kept.until(lambda: kept.drained() == ["last"], "the drain")
    made = kept.place.tree / ".new"
    made.write_bytes(b"rolled back")
    os.utime(made, (1, 1))
    made.rename(kept.place.tree / "last")
    kept.end()
    assert kept.drained() == ["last"]
    assert (kept.target / "last").read_bytes() == b"rolled back"


def test_what_is_written_again_keeps_its_drained_copy(make: Make) -> None:
    kept = make()
    kept.save("last", b"whole")
    kept.until(lambda: kept.drained() == ["last"], "the drain")
    with (kept.place.tree / "last").open("r+b") as file:
        file.write(b"torn")
        file.flush()
        kept.save("step1")
        kept.until(lambda: "step1" in kept.drained(), "the drain")
        assert (kept.target / "last").read_bytes() == b"whole"
    kept.end(is_orderly=False)
    assert (kept.target / "last").read_bytes() == b"whole"
    assert (kept.target / "last.run").read_bytes() == b"torne"


def test_a_target_that_is_gone_leaves_all_named(make: Make, tmp_path: Path) -> None:
    kept = make()
    kept.target.rename(tmp_path / "away")
    kept.save("step1")
    report = kept.end()
    assert [one.name for one in report.undrained] == ["step1"]
    (tmp_path / "away").rename(kept.target)
    late = drain_late(kept.place, kept.charter)
    assert (late.undrained, kept.drained()) == ((), ["step1"])


def test_a_local_directory_that_is_wiped_removes_nothing(make: Make) -> None:
    kept = make()
    kept.save("step1")
    kept.until(lambda: kept.drained() == ["step1"], "the drain")
    (kept.place.tree / "step1").unlink()
    kept.place.tree.rmdir()
    report = kept.end()
    assert report.is_gone
    assert kept.drained() == ["step1"]


def test_a_killed_keeper_leaves_what_a_late_drain_takes(make: Make) -> None:
    kept = make()
    kept.save("step1")
    kept.until((kept.place.store / "00000001/manifest.json").exists, "the generation")
    kept.keeper.close()
    assert kept.keeper.report() is None
    kept.save("step2")
    late = drain_late(kept.place, kept.charter)
    assert (late.undrained, late.unclosed) == ((), ("step2.run",))
    assert kept.drained() == ["step1", "step2.run"]


def test_a_state_that_does_not_fit_is_not_kept(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/step1").write_bytes(bytes(1000))
    monkeypatch.setattr(facts, "ROOM_SHARE", 0.0)
    kept = make()
    assert not kept.keeper.is_ready
    assert "the local disk has room for 0 B" in kept.keeper.why_not


def test_the_newest_generation_of_a_killed_run_is_taken_if_it_verifies(make: Make, local_dir: Path) -> None:
    first = make("first")
    first.save("step1")
    first.end()
    killed = local_dir / "killed"
    (killed / "tree").mkdir(parents=True)
    (killed / "tree/step2").write_bytes(os.urandom(SIZE_BYTES))
    with GenerationStore(CheckpointPlace(killed).store) as store:
        store.commit(FileTree(killed / "tree"))
    second = make("second", (killed,))
    assert names_in(second.place.tree) == ["step2"]
    second.end()
    assert second.drained() == ["step2"]
    data = CheckpointPlace(killed).store / "00000001/data"
    data.write_bytes(bytes(SIZE_BYTES))
    with GenerationStore(CheckpointPlace(killed).store) as store:
        os.utime(killed / "tree/step2")
        store.commit(FileTree(killed / "tree"))
    assert names_in(make("third", (killed,)).place.tree) == ["step2"], "a full generation after the damaged one"


def test_drains_that_come_late_never_go_back(local_dir: Path, tmp_path: Path) -> None:
    tree, target = local_dir / "tree", tmp_path / "target"
    tree.mkdir()
    target.mkdir()
    (tree / "step1").write_bytes(b"1")
    with GenerationStore(local_dir / "store") as store:
        store.commit(FileTree(tree))
        (tree / "step1").rename(tree / "step2")
        store.commit(FileTree(tree))
        with store.source() as source:
            assert drain_generation(source, 2, target, "run", tree).files == 1
            assert drain_generation(source, 1, target, "run", tree).files == 0
    assert names_in(target) == ["step2"]
