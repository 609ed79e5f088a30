"""The checkpoint agent: what it restores, saves and drains, and the plain files that it leaves."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import wait_for

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.entries import mark_of
from hpcstage.checkpoint.generations.manifest import GenerationManifest
from hpcstage.checkpoint.generations.restoring import times_of
from hpcstage.checkpoint.generations.state import FileTree, StateChanged
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.generations.terms import CommitTerms
from hpcstage.checkpoint.job.gathering import SHARES
from hpcstage.checkpoint.job.known import known_generations, newest_manifest, note_generations
from hpcstage.checkpoint.job.late import drain_late
from hpcstage.checkpoint.job.ledger import JobEntry, JobGeneration
from hpcstage.checkpoint.job.place import ALONE, CheckpointCharter, CheckpointPlace, CheckpointReport, DrainTerms
from hpcstage.checkpoint.job.plain import copy_entries, damaged, described, shown_in
from hpcstage.checkpoint.process import CheckpointAgentProcess
from hpcstage.owner import OWNER, Owner

SIZE_BYTES = 200_000


class Kept:
    """A directory with its keeper, and the target."""

    def __init__(
        self,
        base: Path,
        target: Path,
        earlier: tuple[Path, ...] = (),
        every: int | None = None,
        terms: DrainTerms | None = None,
    ) -> None:
        base.mkdir()
        target.mkdir(exist_ok=True)
        self.target = target
        self.place = CheckpointPlace(base)
        self.place.tree.mkdir()
        bases = tuple(map(os.fspath, earlier))
        self.charter = CheckpointCharter(base.name, os.fspath(target), target.stat().st_ino, every, bases)
        self.charter.save(self.place)
        self.terms = terms or DrainTerms()
        self.agent = CheckpointAgentProcess(self.place, self.terms, base)
        self.until(lambda: self.agent.is_ready or self.agent.is_drained, "the start")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits as the daemon's loop does."""

        def turn() -> bool:
            self.agent.work(0.0)
            return condition()

        wait_for(turn, 120, what)

    def save(self, name: str, content: bytes | None = None) -> None:
        """Completes a checkpoint, as careful programs do."""
        made = self.place.tree / ".new"
        made.write_bytes(os.urandom(SIZE_BYTES) if content is None else content)
        made.rename(self.place.tree / name)

    def end(self, *, is_orderly: bool = True) -> CheckpointReport:
        """Ends the run, and returns what became of it."""
        self.agent.end(0.0, is_orderly=is_orderly)
        self.until(lambda: self.agent.is_drained, "the end")
        report = self.agent.report()
        assert report is not None
        return report

    def drained(self) -> list[str]:
        return shown_in(self.target)


@pytest.fixture
def make(local_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []

    def begin(name: str = "run", *earlier: Path, every: int | None = None, terms: DrainTerms | None = None) -> Kept:
        made.append(Kept(local_dir / name, tmp_path / "target", earlier, every, terms))
        return made[-1]

    yield begin
    for one in made:
        one.agent.close()


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


def test_a_run_that_saves_nothing_drains_nothing(make: Make) -> None:
    first = make("first")
    first.save("step1")
    first.end()
    before = (first.target / "step1").stat()
    report = make("second").end()
    assert (report.saved_count, report.bytes_carried) == (0, 0)
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
    assert shown_in(second.place.tree) == ["step2"]
    (line,) = second.end().refused
    assert "step1" in line
    assert "step1" in second.drained(), "it is not removed either"
    third = make("third")
    assert shown_in(third.place.tree) == ["step2"]
    third.save("step1")
    third.end()
    assert shown_in(make("fourth").place.tree) == ["step1", "step2"], "a new one of the name"


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


@pytest.mark.parametrize("torn", [b"torn", b"torn, but", b"whole, and more of it"])
def test_a_torn_version_goes_when_a_newer_one_is_there(make: Make, torn: bytes) -> None:
    """One that is larger than the whole one may be a log that has grown: it stays."""
    kept = make()
    kept.save("last", b"whole one")
    kept.until(lambda: kept.drained() == ["last"], "the drain")
    with (kept.place.tree / "last").open("wb") as file:
        file.write(torn)
        file.flush()
        kept.end(is_orderly=False)
    assert kept.drained() == ["last", "last.run"]
    assert (kept.target / "last.run").read_bytes() == torn
    second = make("second")
    second.save("step2")
    second.until(lambda: "step2" in second.drained(), "the drain")
    assert "last.run" in second.drained(), "nothing newer has its name"
    second.save("last", b"newer one")
    second.end()
    assert ("last.run" in second.drained()) == (len(torn) > len(b"whole one"))


def test_a_run_that_was_taken_for_dead_changes_nothing(make: Make) -> None:
    kept = make()
    kept.save("step1")
    kept.until(lambda: kept.drained() == ["step1"], "the drain")
    (kept.target / OWNER).write_bytes(Owner("run another on host", "boot net", "12ab").data())
    kept.save("step2")
    report = kept.end()
    assert kept.drained() == ["step1"]
    assert {(one.name, one.why) for one in report.undrained} >= {
        ("step2", f"{kept.target}: it is in use by run another on host")
    }


def test_a_local_directory_that_is_wiped_removes_nothing(make: Make) -> None:
    kept = make()
    kept.save("step1")
    kept.until(lambda: kept.drained() == ["step1"], "the drain")
    (kept.place.tree / "step1").unlink()
    kept.place.tree.rmdir()
    report = kept.end()
    assert report.is_gone
    assert kept.drained() == ["step1"]


def test_a_killed_agent_leaves_what_a_late_drain_takes(make: Make) -> None:
    kept = make()
    kept.save("step1")
    kept.until((kept.place.store / "00000001/manifest.json").exists, "the generation")
    kept.agent.close()
    assert kept.agent.report() is None
    (kept.place.tree / "last").write_bytes(b"nobody knows whether that is all")
    late = drain_late(kept.place, kept.charter)
    assert (late.undrained, late.unclosed) == ((), ("last.run",))
    assert kept.drained() == ["last.run", "step1"]


def test_a_state_that_does_not_fit_is_not_kept(make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target/step1").write_bytes(bytes(1000))
    monkeypatch.setattr("hpcstage.checkpoint.job.place.ROOM_SHARE", 0.0)
    kept = make()
    assert not kept.agent.is_ready
    assert "the local disk has room for 0 B" in kept.agent.why_not


def test_the_newest_generation_of_a_killed_run_is_taken_if_it_verifies(make: Make, local_dir: Path) -> None:
    first = make("first")
    first.save("step1")
    first.end()
    killed = killed_run(local_dir, first.target, ["step2"])
    second = make("second", killed.base)
    assert shown_in(second.place.tree) == ["step2"]
    second.end()
    assert second.drained() == ["step1", "step2"], "the killed run never had step1, which stays"
    (killed.store / "00000001/data").write_bytes(bytes(SIZE_BYTES))
    save_in(killed, ["step2"])
    assert shown_in(make("third", killed.base).place.tree) == ["step2"], "a full generation after the damaged one"


def test_a_damaged_block_that_the_copy_to_the_target_finds_makes_the_next_one_full(make: Make) -> None:
    kept = make(every=2)
    kept.save("step1")
    kept.until(lambda: "step1" in names_of(kept.place), "the generation")
    data, before_ns = kept.place.store / "00000001/data", kept.target.stat().st_mtime_ns
    data.write_bytes(data.read_bytes()[::-1])
    kept.save("step2")
    kept.until(lambda: kept.target.stat().st_mtime_ns != before_ns and not staged(kept.target), "a copy that failed")
    assert kept.drained() == []
    for step in (3, 4, 5):
        kept.save(f"step{step}")
        kept.until(lambda step=step: f"step{step}" in names_of(kept.place), "the generation")
    report = kept.end()
    assert report.undrained == ()
    assert "full" in [row.kind for row in report.saved[2:]]
    assert kept.drained() == [f"step{step}" for step in range(1, 6)]


def staged(target: Path) -> list[str]:
    return [name for name in os.listdir(target) if name.startswith(SHARES)]


def killed_run(
    local_dir: Path, target: Path, *generations: Collection[str], terms: CommitTerms | None = None
) -> CheckpointPlace:
    """A place whose run was killed after it had saved states of these names; all files that are newer are torn."""
    place = CheckpointPlace(local_dir / "killed")
    place.tree.mkdir(parents=True)
    place.shares.mkdir()
    target.mkdir(exist_ok=True)
    CheckpointCharter("killed", os.fspath(target), target.stat().st_ino).save(place)
    for names in generations:
        save_in(place, names, terms)
    return place


def save_in(place: CheckpointPlace, names: Collection[str], terms: CommitTerms | None = None) -> GenerationManifest:
    """Saves new contents of some entries, as a run on one node does while it writes the others again."""
    for name in names:
        (place.tree / name).write_bytes(os.urandom(SIZE_BYTES))
    with GenerationStore(place.store) as store:
        made = store.commit(FileTree(place.tree, sorted(names)), terms=terms).manifest
    known = known_generations(place)
    older = {name: JobEntry(one.number, {ALONE: ""}) for one in known for name in one.own}
    own = {name: JobEntry(made.number, {ALONE: mark_of(place.tree, name)}) for name in names}
    generation = JobGeneration(made.number, made.attempt, made.created_ns, (ALONE,), older | own)
    note_generations(place, [*known, generation])
    return made


def names_of(place: CheckpointPlace) -> set[str]:
    """Returns what the newest generation has."""
    known = known_generations(place)
    return set(known[-1].names) if known else set()


def test_what_another_run_did_not_go_on_from_is_put_beside_its_state(
    make: Make, local_dir: Path, tmp_path: Path
) -> None:
    killed = killed_run(local_dir, tmp_path / "target", ["step1"])
    other = make()
    other.save("step2")
    other.end()
    drain_late(killed, CheckpointCharter.load(killed))
    assert other.drained() == ["step1.killed", "step2"]
    assert shown_in(make("next").place.tree) == ["step2"], "nobody takes it for a checkpoint"


def test_what_another_run_went_on_from_is_not_put_beside_its_state(make: Make, local_dir: Path, tmp_path: Path) -> None:
    killed = killed_run(local_dir, tmp_path / "target", ["step1"])
    other = make("other", killed.base)
    (other.place.tree / "step1").unlink()
    other.save("step2")
    other.end()
    drain_late(killed, CheckpointCharter.load(killed))
    assert other.drained() == ["step2"]


def test_what_was_being_written_again_before_anything_was_saved_is_not_given_up(make: Make) -> None:
    """What the killed run left has it whole, and nobody else; the first generation takes a while."""
    first, content = make("first", every=1000), os.urandom(SIZE_BYTES)
    first.save("large", os.urandom(64 << 20))
    first.save("step1", content)
    first.until(lambda: set(names_of(first.place)) == {"large", "step1"}, "the generation")
    first.agent.close()
    second = make("second", first.place.base)
    with (second.place.tree / "step1").open("r+b") as file:
        file.write(b"half")
        file.flush()
        second.until(lambda: "large" in second.drained(), "the drain")
        second.end(is_orderly=False)
    drain_late(first.place, replace(first.charter, run_id="first"))
    assert content in [path.read_bytes() for path in second.target.iterdir() if path.is_file()]


def test_what_was_copied_before_the_kill_is_not_put_beside_what_goes_on_from_it(
    make: Make, local_dir: Path, tmp_path: Path
) -> None:
    killed = killed_run(local_dir, tmp_path / "target", ["last"])
    charter = CheckpointCharter.load(killed)
    drain_late(killed, charter)
    other = make("other", killed.base)
    assert shown_in(other.place.tree) == ["last"]
    other.save("last")
    other.end()
    drain_late(killed, charter)
    assert other.drained() == ["last"], "and not the one before as last.killed"


@pytest.mark.parametrize("is_late", [False, True])
def test_a_checkpoint_that_was_being_written_again_is_taken_from_where_it_is_whole(
    make: Make, local_dir: Path, tmp_path: Path, is_late: bool
) -> None:
    killed = killed_run(local_dir, tmp_path / "target", ["last"], ["log"])
    whole = (killed.tree / "last").read_bytes()
    (killed.tree / "last").write_bytes(b"torn")
    if is_late:
        drain_late(killed, CheckpointCharter.load(killed))
        assert (tmp_path / "target/last").read_bytes() == whole
        assert (tmp_path / "target/last.killed").read_bytes() == b"torn"
    second = make("second", killed.base)
    assert shown_in(second.place.tree) == ["last", "log"]
    assert (second.place.tree / "last").read_bytes() == whole


def test_the_generation_that_has_it_whole_stays(make: Make) -> None:
    kept = make(every=1000)
    kept.save("last", b"whole")
    kept.until(lambda: "last" in names_of(kept.place), "the generation")
    with (kept.place.tree / "last").open("r+b") as file:
        file.write(b"torn")
        file.flush()
        for step in range(4):
            kept.save(f"step{step}")
            kept.until(lambda name=f"step{step}": name in names_of(kept.place), "the generation")
        kept.end(is_orderly=False)
    assert (kept.target / "last").read_bytes() == b"whole"
    assert (kept.target / "last.run").read_bytes() == b"torne"


def test_a_link_into_the_directory_leads_into_every_copy(make: Make) -> None:
    first = make("first")
    first.save("step1")
    (first.place.tree / "latest").symlink_to(first.place.tree / "step1")
    report = first.end()
    assert (report.undrained, report.unclosed) == ((), ())
    assert (first.target / "latest").readlink() == Path("step1")
    second = make("second")
    assert (second.place.tree / "latest").read_bytes() == (first.target / "step1").read_bytes()
    assert second.end().saved_count == 0


def test_hidden_entries_are_complete_after_an_orderly_end(make: Make) -> None:
    first = make("first")
    first.save("__0_0.distcp")
    (first.place.tree / ".metadata").write_bytes(b"of the others")
    first.end()
    assert (first.target / ".metadata").read_bytes() == b"of the others"
    second = make("second")
    assert (second.place.tree / ".metadata").read_bytes() == b"of the others"
    (second.place.tree / ".half").write_bytes(b"x")
    report = second.end(is_orderly=False)
    assert (report.unclosed, report.undrained) == ((), ())
    assert {".metadata"} == {name for name in os.listdir(second.target) if name.startswith(".m") or name == ".half"}


def test_what_has_no_room_for_a_generation_is_copied_as_it_is(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcstage.checkpoint.job.place.ROOM_SHARE", 0.0)
    kept = make()
    kept.save("step1", b"one")
    kept.until(lambda: kept.drained() == ["step1"], "the copy")
    kept.save("step2", b"two")
    report = kept.end()
    assert (report.undrained, report.unclosed, report.saved) == ((), (), ())
    assert [(kept.target / name).read_bytes() for name in kept.drained()] == [b"one", b"two"]
    (line,) = report.refused
    assert "copied as it is: a generation needs" in line


def test_a_checkpoint_that_the_program_never_had_is_not_removed(make: Make, local_dir: Path, tmp_path: Path) -> None:
    """A late drain of another run brought it, after this one had begun."""
    kept = make()
    kept.save("step1")
    kept.until(lambda: described(kept.target) is not None, "the end of the drain")
    other = killed_run(local_dir, tmp_path / "target", ["step1", "step9"])
    drain_late(other, CheckpointCharter.load(other))
    assert kept.drained() == ["step1", "step9"]
    (kept.place.tree / "step1").unlink()
    kept.save("step2")
    kept.end()
    assert kept.drained() == ["step2", "step9"]


def test_a_clock_that_goes_after_the_one_before_it_does_not_matter(make: Make, local_dir: Path, tmp_path: Path) -> None:
    target, terms = tmp_path / "target", CommitTerms(after_ns=time.time_ns() + 10**15)
    killed = killed_run(local_dir, target, ["step1"], terms=terms)
    drain_late(killed, CheckpointCharter.load(killed))
    before = newest_manifest(killed.base)
    assert before is not None
    kept = make()
    kept.save("step2")
    report = kept.end()
    opened = described(target)
    assert opened is not None
    assert opened.manifest.number == report.drained_number == 2
    assert opened.manifest.created_ns > before.created_ns
    assert kept.drained() == ["step1", "step2"]


def test_all_is_complete_where_the_agent_died_and_the_command_ended_well(make: Make) -> None:
    kept = make()
    kept.agent.close()
    (kept.place.tree / "step1").write_bytes(b"one")
    report = drain_late(kept.place, kept.charter, is_orderly=True)
    assert (report.undrained, report.unclosed) == ((), ())
    assert kept.drained() == ["step1"]


def test_all_is_drained_when_the_jobs_time_ends(make: Make) -> None:
    kept = make(every=1000, terms=DrainTerms(hurry_unix_s=time.time() + 1.0))
    kept.save("step1")
    kept.until(lambda: kept.drained() == ["step1"], "the drain")
    assert time.time() >= (kept.terms.hurry_unix_s or 0)
    kept.save("step2")
    kept.until(lambda: kept.drained() == ["step1", "step2"], "the drain")


@pytest.mark.root
@pytest.mark.parametrize(("before", "after"), [("size=100k", "size=4m"), ("ro", "rw")])
def test_a_target_that_cannot_take_it_leaves_all_named(make: Make, tmp_path: Path, before: str, after: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", target], check=False).returncode:
        pytest.skip("needs the privilege to mount")
    try:
        kept = make()
        subprocess.run(["mount", "-o", f"remount,{before}", target], check=True)
        kept.save("step1")
        report = kept.end()
        assert [one.name for one in report.undrained] == ["step1"]
        assert not [name for name in os.listdir(target) if name.startswith((".hpcstage-making", ".hpcstage-shares"))]
        subprocess.run(["mount", "-o", f"remount,{after}", target], check=True)
        late = drain_late(kept.place, kept.charter)
        assert (late.undrained, late.unclosed, kept.drained()) == ((), (), ["step1"])
    finally:
        kept.agent.close()
        subprocess.run(["umount", "-l", target], check=True)


def test_a_copy_of_what_changes_meanwhile_is_refused(local_dir: Path, tmp_path: Path) -> None:
    (local_dir / "last").write_bytes(b"new")

    def write_again(_: int) -> None:
        (local_dir / "last").write_bytes(b"torn")

    with pytest.raises(StateChanged, match="last changed"):
        copy_entries(local_dir, ["last"], tmp_path, write_again)


def test_the_last_ones_are_kept_as_the_program_keeps_them(make: Make) -> None:
    kept = make()
    for step in range(6):
        kept.save(f"step{step}")
        kept.until(lambda name=f"step{step}": name in kept.drained(), "the drain")
        if step > 1:
            (kept.place.tree / f"step{step - 2}").unlink()
    kept.end()
    assert kept.drained() == ["step4", "step5"]


def test_the_newest_that_the_program_removed_goes_when_a_newer_one_has_come(make: Make) -> None:
    kept = make()
    for step in range(2):
        kept.save(f"step{step}")
        kept.until(lambda name=f"step{step}": name in kept.drained(), "the drain")
    (kept.place.tree / "step1").unlink()
    kept.until(lambda: newest_names(kept.place) == {"step0"}, "the generation")
    kept.save("step2")
    kept.until(lambda: "step2" in kept.drained(), "the drain")
    kept.end()
    assert kept.drained() == ["step0", "step2"]


def newest_names(place: CheckpointPlace) -> set[str]:
    made = newest_manifest(place.base)
    return set() if made is None else set(times_of(made))


@pytest.mark.parametrize("is_orderly", [True, False])
def test_a_link_is_complete_when_its_goal_is(make: Make, is_orderly: bool) -> None:
    kept = make()
    kept.save("step1")
    kept.until(lambda: "step1" in kept.drained(), "the drain")
    (kept.place.tree / "latest").symlink_to("step1")
    kept.until(lambda: "latest" in kept.drained(), "the drain")
    with (kept.place.tree / "step2").open("wb") as file:
        file.write(b"half")
        file.flush()
        (kept.place.tree / ".link").symlink_to("step2")
        (kept.place.tree / ".link").rename(kept.place.tree / "latest")
        kept.save("step3")
        kept.until(lambda: "step3" in kept.drained(), "the drain")
        assert (kept.target / "latest").readlink() == Path("step1")
        if is_orderly:
            file.close()
        kept.end(is_orderly=is_orderly)
    assert (kept.target / "latest").readlink() == Path("step2" if is_orderly else "step1")
