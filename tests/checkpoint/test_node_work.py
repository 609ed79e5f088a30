"""What one node of a job does to its disk and to the target when it is ordered to."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.entries import mark_of
from hpcstage.checkpoint.generations.files import Files, GenerationId
from hpcstage.checkpoint.generations.state import FileTree, StateChanged
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.job.conclusions import after_save
from hpcstage.checkpoint.job.families import earlier_states
from hpcstage.checkpoint.job.known import note_generations
from hpcstage.checkpoint.job.late import drain_late
from hpcstage.checkpoint.job.ledger import (
    EntryState,
    JobEntry,
    JobGeneration,
    JobLedger,
    JobOrder,
    NodeReport,
    OrderKind,
)
from hpcstage.checkpoint.job.naming import name_entries
from hpcstage.checkpoint.job.pacing import MarkedTree, ProcessorShare
from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace
from hpcstage.checkpoint.job.talking import Talk
from hpcstage.checkpoint.job.work import NodeWork
from hpcstage.checkpoint.protection.groups import protect

NODE = "n0"


@dataclass
class Run:
    """One run of a job of one node that is alone."""

    place: CheckpointPlace
    charter: CheckpointCharter

    @property
    def marks(self) -> dict[str, str]:
        return {name: mark_of(self.place.tree, name) for name in sorted(os.listdir(self.place.tree))}

    def left(self, number: int) -> None:
        """Saves what lies in its directory, as all nodes know."""
        with GenerationStore(self.place.store) as store:
            store.commit(FileTree(self.place.tree), GenerationId(number, f"{number:032x}"))
        entries = {name: JobEntry(number, {NODE: mark}) for name, mark in self.marks.items()}
        note_generations(self.place, [JobGeneration(number, f"{number:032x}", number, (NODE,), entries)])

    def begun(self) -> NodeWork:
        """Puts the newest state of the runs before into its directory."""
        work = NodeWork(
            self.place, self.charter, 0, Talk(self.place.base, self.place.base, 0), ProcessorShare(1.0, lambda: True)
        )  # fmt: skip
        state = earlier_states({0: work.found()[0]})[0]
        done = work.done(JobOrder(1, 0, 0, OrderKind.BEGIN, {"key": state.key, "state": state.to_json()}))
        assert not done.error
        return work


MakeRun = Callable[..., Run]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    target = tmp_path / "target"
    target.mkdir()

    def make(run_id: str, *earlier: Path) -> Run:
        place = CheckpointPlace(tmp_path / run_id / "out")
        place.tree.mkdir(parents=True)
        place.shares.mkdir()
        bases = tuple(map(os.fspath, earlier))
        charter = CheckpointCharter(
            run_id, os.fspath(target), target.stat().st_ino, earlier=bases, node=NODE, nodes=(NODE,)
        )
        charter.save(place)
        return Run(place, charter)

    return make


def commit_of(reports: dict[str, NodeReport]) -> JobOrder:
    named = name_entries(reports, (), number=9, attempt=f"{9:032x}")
    body = {"generation": asdict(named), "after_ns": 0, "full_why": "it is the first"}
    return JobOrder(2, 0, 0, OrderKind.SAVE, body)


def test_what_is_written_again_before_anything_was_saved_stays_with_the_run_that_has_it_whole(
    make_run: MakeRun,
) -> None:
    first = make_run("first")
    for name in ("step1", "step2"):
        (first.place.tree / name).write_text(f"all of {name}")
    first.left(4)
    second = make_run("second", first.place.base)
    work = second.begun()
    (second.place.tree / "step1").write_text("half")
    entries = {name: EntryState(mark, name != "step1", name != "step1") for name, mark in second.marks.items()}
    reports = {NODE: NodeReport(entries=entries)}
    order = commit_of(reports)
    done = work.done(order)
    ledger = after_save(JobLedger(is_begun=True), order, {NODE: done}, reports, protect([NODE], None, {}))
    assert ledger.last is not None
    assert (ledger.last.names, ledger.last.lacking) == ({"step2"}, ("step1",))
    work.know(replace(ledger, drained=ledger.last.number))
    work.close()
    assert drain_late(first.place, first.charter).undrained == ()
    target = Path(first.charter.target)
    assert "all of step1" in [path.read_text() for path in target.iterdir() if path.is_file()]


def test_what_is_whole_in_an_older_generation_is_restored_though_a_part_of_another_entry_is_gone(
    make_run: MakeRun,
) -> None:
    first = make_run("first")
    for name in ("step1", "step2"):
        (first.place.tree / name).write_text(f"all of {name}")
    first.left(3)
    marks = first.marks
    (first.place.tree / "new").write_text("all of new")
    with GenerationStore(first.place.store) as store:
        store.commit(FileTree(first.place.tree, ["new"]), GenerationId(4, f"{4:032x}"))
    entries = {
        "step1": JobEntry(3, {NODE: marks["step1"], "lost": "m"}),
        "step2": JobEntry(3, {NODE: marks["step2"]}),
        "new": JobEntry(4, {NODE: first.marks["new"]}),
    }
    note_generations(first.place, [JobGeneration(4, f"{4:032x}", 4, (NODE,), entries)])
    second = make_run("second", first.place.base)
    second.begun().close()
    assert second.marks.keys() == {"step2", "new"}


def test_what_the_program_changed_since_it_was_told_is_not_saved(make_run: MakeRun) -> None:
    first = make_run("first")
    (first.place.tree / "step1").write_text("all of step1")
    first.left(4)
    second = make_run("second", first.place.base)
    work = second.begun()
    order = commit_of({NODE: NodeReport(entries={"step1": EntryState(second.marks["step1"])})})
    (second.place.tree / "step1").write_text("half")
    done = work.done(order)
    assert done.is_soon
    work.close()
    with GenerationStore(second.place.store) as store:
        assert store.numbers() == []


class WritesBefore(Files):
    """A program writes in the moment before the first system call of a scan."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def call(self, function, /, *arguments, **options):  # type: ignore[no-untyped-def]
        if self.path.read_text() != "half":
            self.path.write_text("half")
        return super().call(function, *arguments, **options)


def test_what_the_program_changes_before_it_is_found_is_not_found(tmp_path: Path) -> None:
    """The scan would take the half for what is to be saved, and would see no change afterwards."""
    path = tmp_path / "step1"
    path.write_text("all of it")
    marks = {"step1": mark_of(tmp_path, "step1")}
    MarkedTree(tmp_path, marks).scan(Files())
    with pytest.raises(StateChanged):
        MarkedTree(tmp_path, marks).scan(WritesBefore(path))
