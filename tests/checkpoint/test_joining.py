"""Shares of several nodes as one tree: what is alike is one, what is not has the name of the last writer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("xxhash", reason="needs the extra `checkpoint`")
pytest.importorskip("numpy", reason="needs the extra `checkpoint`")

from hpcstage.checkpoint.generations.reading import LocalSource
from hpcstage.checkpoint.generations.state import FileTree
from hpcstage.checkpoint.generations.store import GenerationStore
from hpcstage.checkpoint.job.families import FoundStore, earlier_states
from hpcstage.checkpoint.job.gathering import Gathering, Share, Superseded, opened_whole, restore_whole
from hpcstage.checkpoint.job.ledger import JobEntry, JobGeneration
from hpcstage.checkpoint.job.plain import damaged, described
from hpcstage.upload.facts import Run
from hpcstage.upload.target import Target


def saved(base: Path, node: str, files: dict[str, tuple[str, int]]) -> Share:
    """The share of a node: by path content and time."""
    tree = base / node / "tree"
    for name, (content, seconds) in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(content)
        os.utime(tree / name, (seconds, seconds))
    with GenerationStore(base / node / "store") as store:
        store.commit(FileTree(tree))
    names = frozenset(name.partition("/")[0] for name in files)
    return Share(node, 1, LocalSource(base / node / "store"), names)


def contents(directory: Path) -> dict[str, str]:
    found = (path for path in directory.rglob("*") if path.is_file() and ".hpcstage" not in os.fspath(path))
    return {os.fspath(path.relative_to(directory)): path.read_text() for path in found}


@pytest.fixture
def shares(tmp_path: Path) -> list[Share]:
    one = saved(tmp_path, "n0", {"s/0": ("a", 10), "s/same": ("x", 10), "s/other": ("old", 10), "last": ("n0", 20)})
    two = saved(tmp_path, "n1", {"s/1": ("b", 11), "s/same": ("x", 11), "s/other": ("new", 11), "last": ("n1", 19)})
    return [one, two]


WHOLE = {
    "s/0": "a", "s/1": "b", "s/same": "x", "s/other": "new", "s/other.n0": "old", "last": "n0", "last.n1": "n1",
}  # fmt: skip


def test_shares_are_one_tree_in_the_target_that_can_be_verified(tmp_path: Path, shares: list[Share]) -> None:
    target = tmp_path / "target"
    target.mkdir()
    gathering = Gathering(Target(Run("run", os.fspath(target), target.stat().st_ino, 0, "host")), "one")
    for share in shares:
        gathering.put(share, share.names)
        assert gathering.has(share.node, 1)
    whole = opened_whole(shares)
    nodes = tuple(share.node for share in shares)
    entries = {name: JobEntry(1, dict.fromkeys(nodes, "")) for share in shares for name in share.names}
    generation = JobGeneration(1, "0" * 32, 5, nodes, entries)
    placed = gathering.give_names(whole, generation, generation.names, Superseded(tmp_path))
    gathering.remove()
    assert contents(target) == WHOLE
    assert placed.beside == {"s/other": "s/other.n0", "last": "last.n1"}
    opened = described(target)
    assert opened is not None
    assert damaged(target, opened) == {}
    assert (target / "s" / "same").stat().st_mtime == 11
    (target / "s" / "1").write_text("c")
    assert set(damaged(target, opened)) == {"s"}


def test_a_node_finds_its_own_version(tmp_path: Path, shares: list[Share]) -> None:
    (tmp_path / "base" / "tree").mkdir(parents=True)
    restore_whole(opened_whole(shares, "n0"), tmp_path / "base" / "tree")
    found = contents(tmp_path / "base" / "tree")
    assert found["s/other"] == "old"
    assert found["s/other.n1"] == "new"
    assert sorted(os.listdir(tmp_path / "base" / "tree")) == ["last", "last.n1", "s"]


def test_a_share_that_was_cut_off_is_not_there(tmp_path: Path, shares: list[Share]) -> None:
    target = tmp_path / "target"
    target.mkdir()
    gathering = Gathering(Target(Run("run", os.fspath(target), target.stat().st_ino, 0, "host")), "one")
    gathering.path.mkdir()
    gathering.of("n0", 1).mkdir(parents=True)
    assert not gathering.has("n0", 1)
    gathering.put(shares[0], shares[0].names)
    assert gathering.has("n0", 1)


def test_parts_of_older_entries_are_those_of_the_older_generation() -> None:
    entries = {"old": JobEntry(3, {"n0": "a", "n1": "b"}), "new": JobEntry(5, {"n0": "c"})}
    generation = JobGeneration(5, "0" * 32, 1, ("n0", "n2"), entries)
    assert generation.own.keys() == {"new"}
    assert generation.numbers == {3, 5}
    assert generation.parts == [
        (5, "n0", frozenset({"new"})),
        (3, "n0", frozenset({"old"})),
        (3, "n1", frozenset({"old"})),
    ]


def test_states_of_a_family_are_known_by_any_of_its_nodes() -> None:
    first, second = (JobGeneration(n, f"{n:032x}", n, ("a", "b")) for n in (1, 2))
    found = {0: [FoundStore("r", "a", "ka", (first,))], 1: [FoundStore("r", "b", "kb", (first, second))]}
    states = earlier_states(found)
    assert [state.generation.number for state in states] == [2, 1]
    assert states[0].stores.keys() == {"a", "b"}
    assert earlier_states({0: found[1]})[0].missing == ("a",)
