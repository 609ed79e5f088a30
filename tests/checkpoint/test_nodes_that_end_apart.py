"""The end of nodes that are not connected: each brings its share, and the last one gives the whole its names."""

from __future__ import annotations

import fcntl
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.entries import mark_of
from hpcstage.checkpoint.generations.files import LOCK, GenerationId
from hpcstage.checkpoint.generations.reading import GenerationReader, LocalSource
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.job.gathering import SHARES, Gathering, Superseded, opened_whole
from hpcstage.checkpoint.job.holdings import RunStores
from hpcstage.checkpoint.job.known import note_generations, note_pending
from hpcstage.checkpoint.job.late import drain_late, end_alone
from hpcstage.checkpoint.job.ledger import JobEntry, JobGeneration
from hpcstage.checkpoint.job.place import CheckpointCharter, CheckpointPlace
from hpcstage.checkpoint.job.plain import checkpoints_in, described
from hpcstage.upload.target import Target

NODES = ("n0", "n1")


@dataclass
class Node:
    """A node with a disk that no other node can read."""

    place: CheckpointPlace
    charter: CheckpointCharter
    known: JobGeneration | None = None

    def saves(self, number: int) -> dict[str, str]:
        """Commits a generation that has one more step; returns its entries with their marks."""
        name = f"step{number}"
        (self.place.tree / name).mkdir()
        (self.place.tree / name / self.charter.node).write_text(f"{number} on {self.charter.node}")
        names = sorted(os.listdir(self.place.tree))
        with GenerationStore(self.place.store) as store:
            store.commit(FileTree(self.place.tree, names), GenerationId(number, f"{number:032x}"))
        return {name: mark_of(self.place.tree, name) for name in names}

    def knows(self, generation: JobGeneration) -> None:
        self.known = generation
        note_generations(self.place, [generation])

    def ends(self) -> bool:
        """Ends apart from the other one; tells whether all of its entries are in the target."""
        return not end_alone(self.place, self.charter, self.known).missing


@pytest.fixture
def target(tmp_path: Path) -> Path:
    made = tmp_path / "target"
    made.mkdir()
    return made


def made_nodes(tmp_path: Path, target: Path, run_id: str = "r") -> list[Node]:
    nodes = []
    for name in NODES:
        place = CheckpointPlace(tmp_path / run_id / name / "place" / "out")
        place.tree.mkdir(parents=True)
        place.shares.mkdir()
        charter = CheckpointCharter(run_id, os.fspath(target), target.stat().st_ino, node=name, nodes=NODES)
        charter.save(place)
        nodes.append(Node(place, charter))
    return nodes


@pytest.fixture
def nodes(tmp_path: Path, target: Path) -> list[Node]:
    return made_nodes(tmp_path, target)


def generation(number: int, shares: dict[str, dict[str, str]], created_ns: int | None = None) -> JobGeneration:
    """A generation of these nodes, by what each saved."""
    names = {name for share in shares.values() for name in share}
    entries = {
        name: JobEntry(number, {node: share[name] for node, share in shares.items() if name in share}) for name in names
    }
    return JobGeneration(number, f"{number:032x}", created_ns or number, tuple(shares), entries)


def saved(nodes: list[Node], number: int) -> JobGeneration:
    """A generation that all nodes committed, and of which they do not know that of each other."""
    made = generation(number, {node.charter.node: node.saves(number) for node in nodes})
    for node in nodes:
        note_pending(node.place, made)
    return made


def known(nodes: list[Node], number: int) -> JobGeneration:
    """A generation that all nodes know to be one of all."""
    made = saved(nodes, number)
    for node in nodes:
        node.knows(made)
    return made


def shown(target: Path) -> list[str]:
    found = (os.fspath(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    return sorted(name for name in found if not name.startswith(".hpcstage-"))


def steps(*numbers: int) -> list[str]:
    return [f"step{number}/{node}" for number in numbers for node in NODES]


def waiting(target: Path) -> list[str]:
    return [name for name in os.listdir(target) if name.startswith(SHARES)]


def test_the_last_node_gives_the_whole_its_names(nodes: list[Node], target: Path) -> None:
    known(nodes, 4)
    assert not nodes[0].ends()
    assert shown(target) == []
    assert nodes[1].ends()
    assert shown(target) == steps(4)
    assert waiting(target) == []
    assert nodes[0].ends(), "as a later drain finds it"
    assert waiting(target) == []


@pytest.mark.parametrize("first", [0, 1])
def test_a_state_that_one_node_alone_knows_to_be_of_all_is_brought_by_all(
    nodes: list[Node], target: Path, first: int
) -> None:
    """The nodes lose each other before the other one hears that both have committed it."""
    known(nodes, 4)
    nodes[1].knows(saved(nodes, 5))
    assert not nodes[first].ends()
    assert nodes[1 - first].ends()
    assert shown(target) == steps(4, 5)
    assert waiting(target) == []
    for node in nodes:
        report = drain_late(node.place, node.charter)
        assert (report.undrained, report.unclosed) == ((), ())
    assert shown(target) == steps(4, 5), "none of it lies beside"


def test_what_the_program_removed_goes_with_the_share_that_is_brought_last(nodes: list[Node], target: Path) -> None:
    known(nodes, 4)
    assert [node.ends() for node in nodes] == [False, True]
    assert shown(target) == steps(4)
    (target / "of the user").write_text("stays")
    for node in nodes:
        shutil.rmtree(node.place.tree / "step4")
    known(nodes, 5)
    for node in nodes:
        drain_late(node.place, node.charter)
    assert shown(target) == ["of the user", *steps(5)]


def test_what_a_node_writes_again_is_not_taken_for_removed(nodes: list[Node], target: Path) -> None:
    known(nodes, 4)
    assert [node.ends() for node in nodes] == [False, True]
    made = {node.charter.node: node.saves(5) for node in nodes}
    shares = {name: {"step5": marks["step5"]} for name, marks in made.items()}
    for node in nodes:
        with GenerationStore(node.place.store) as store:
            store.commit(FileTree(node.place.tree, ["step5"]), GenerationId(6, f"{6:032x}"))
        node.knows(generation(6, shares))
    assert [node.ends() for node in nodes] == [False, True]
    assert shown(target) == steps(4, 5)


def test_a_state_that_not_all_nodes_have_is_none_and_its_parts_lie_beside(nodes: list[Node], target: Path) -> None:
    known(nodes, 4)
    made = generation(5, {"n0": nodes[0].saves(5), "n1": {"step4": "", "step5": ""}})
    note_pending(nodes[0].place, made)
    assert not nodes[0].ends()
    assert nodes[1].ends()
    assert shown(target) == steps(4)
    report = drain_late(nodes[0].place, nodes[0].charter)
    assert report.undrained == ()
    assert report.unclosed == ("step5.r.n0",)
    assert shown(target) == [*steps(4), "step5.r.n0/n0"]


def went_on(node: Node, number: int) -> None:
    """The other nodes bring a later state, which has what they had of this one."""
    made = generation(number, {node.charter.node: node.saves(number)}, 1 << 62)
    gathering = Gathering(Target(node.charter.run), "later")
    with LocalSource(node.place.store) as source:
        shares = RunStores({node.charter.node: source}).shares(made)
        for share in shares:
            gathering.put(share, share.names)
        gathering.give_names(opened_whole(shares), made, made.names, Superseded(node.place.tree))
    gathering.remove()


def test_a_node_from_which_the_others_went_on_has_nothing_to_bring(nodes: list[Node], target: Path) -> None:
    known(nodes, 4)
    went_on(nodes[1], 6)
    before = shown(target)
    assert nodes[0].ends()
    assert drain_late(nodes[0].place, nodes[0].charter).undrained == ()
    assert shown(target) == before
    assert waiting(target) == []


def test_a_state_from_which_another_run_did_not_go_on_lies_beside(
    nodes: list[Node], tmp_path: Path, target: Path
) -> None:
    known(nodes, 4)
    went_on(made_nodes(tmp_path, target, "other")[1], 6)
    assert not nodes[0].ends()
    assert nodes[1].ends()
    assert shown(target) == ["step4.r/n0", "step4.r/n1", "step6/n1"]


def test_who_waited_for_the_last_share_finds_all_of_it_there(nodes: list[Node], target: Path) -> None:
    made = known(nodes, 4)
    assert not nodes[0].ends()
    fd = os.open(target / waiting(target)[0] / LOCK, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(nodes[1].ends) for _ in range(2)]
        _until_waited_for(fd, len(ends))
        os.close(fd)
        assert [end.result() for end in ends] == [True, True]
    assert waiting(target) == []
    assert made.names == {"step4"}


def _until_waited_for(fd: int, count: int) -> None:
    """Until so many others wait for the lock."""
    inode = f":{os.fstat(fd).st_ino} "
    while sum("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines()) < count:
        pass


def test_what_nodes_wrote_differently_goes_with_what_the_program_removed(nodes: list[Node], target: Path) -> None:
    """The program knows NAME, and never NAME.NODE; others of that form stay."""
    for node in nodes:
        (node.place.tree / "last.pt").write_text(node.charter.node)
    known(nodes, 4)
    assert [node.ends() for node in nodes] == [False, True]
    (target / "last.pt.n2").write_text("of the user")
    (beside,) = set(shown(target)) & {"last.pt.n0", "last.pt.n1"}
    assert beside not in checkpoints_in(target)
    before = described(target)
    (nodes[0].place.tree / "last.pt").unlink()
    nodes[0].saves(5)
    with LocalSource(nodes[0].place.store) as source:
        now = GenerationReader(source).manifest(5)
    assert before is not None
    superseded = Superseded(nodes[0].place.tree, {"last.pt"})
    goes, stays = superseded.of(Target(nodes[0].charter.run), before.manifest, now)
    assert sorted(goes) == ["last.pt", beside]
    assert "last.pt.n2" not in stays
