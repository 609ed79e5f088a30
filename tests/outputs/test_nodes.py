"""Drains of several nodes to one target: nothing of any node is lost or overwritten, the last change gets a name."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from draining import Running, start, tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcstage.outputs import ledger
from hpcstage.outputs.claims import claims_of, settle
from hpcstage.outputs.journal import Charter
from hpcstage.outputs.late import drain_late
from hpcstage.outputs.target import Target

__all__ = ["start"]
Start = Callable[..., Running]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    made = tmp_path / "results"
    made.mkdir()
    return made


def write(running: Running, name: str, text: str) -> None:
    path = running.out / name
    path.parent.mkdir(parents=True, exist_ok=True)
    spare = path.with_name(f"{path.name}.new")
    spare.write_text(text)
    spare.rename(path)


def settled(nodes: dict[str, Running], target: Path) -> dict[str, dict[str, str]]:
    """What the end of a run does: conflicts are named, claimed and settled."""
    reports = [node.drain.report() for node in nodes.values()]
    names = sorted({name for report in reports for name in report.findings.beside})
    return settle(os.fspath(target), {host: claims_of(node.place, names) for host, node in nodes.items()})


@pytest.mark.parametrize("last", ["a", "b"])
def test_the_last_change_gets_the_name_and_the_other_is_kept(start: Start, results: Path, last: str) -> None:
    nodes = {"a": start(node="a"), "b": start(node="b")}
    for host in ("a", "b"):
        write(nodes[host], "both", host)
        nodes[host].settle()
    write(nodes[last], "both", f"{last} again")
    nodes[last].settle()
    assert (results / "both").read_text() == ("a again" if last == "a" else "a"), "who came first has it meanwhile"
    for node in nodes.values():
        node.end()
    other = "b" if last == "a" else "a"
    assert settled(nodes, results) == {"both": {other: f"both.{other}"}}
    assert tree(results).keys() == {"both", f"both.{other}"}
    assert (results / "both").read_text() == f"{last} again"
    assert (results / f"both.{other}").read_text() == other


@pytest.mark.parametrize("last", ["freed", "written through the link", "other"])
def test_a_file_in_whose_place_a_link_stands_counts_with_its_last_change(
    start: Start, results: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    monkeypatch.setattr(ledger, "LEAST_FREED_BYTES", 0)
    nodes = {"a": start(node="a"), "b": start(node="b")}

    def write_b() -> None:
        write(nodes["b"], "both", "b")
        nodes["b"].settle()

    if last == "freed":
        nodes["b"].drain.work(0.0)
        (results / "both").write_text("others'")  # b lands beside it, and a takes the name once that is gone
        write_b()
        (results / "both").unlink()
    write(nodes["a"], "both", "a")
    nodes["a"].settle()
    nodes["a"].drain.give_way(1 << 40, time.monotonic())
    nodes["a"].settle()
    assert (nodes["a"].out / "both").is_symlink()
    if last != "freed":
        write_b()
    if last == "written through the link":
        (nodes["a"].out / "both").write_text("a again")
    for node in nodes.values():
        node.end()
    winner, other = ("b", "a") if last == "other" else ("a", "b")
    assert settled(nodes, results) == {"both": {other: f"both.{other}"}}
    assert (results / "both").read_text() == ("a again" if "link" in last else winner)
    assert (results / f"both.{other}").read_text() == other


def test_a_name_of_a_node_that_says_nothing_stays(start: Start, results: Path) -> None:
    lost, other = start(node="a"), start(node="b")
    write(lost, "both", "a")
    lost.settle()
    write(other, "both", "b")
    other.settle()
    lost.stop()
    shutil.rmtree(lost.out)
    other.end()
    assert settle(os.fspath(results), {"b": claims_of(other.place, ["both"])}) == {"both": {"b": "both.b"}}
    assert (results / "both").read_text() == "a"
    assert (results / "both.b").read_text() == "b"


def test_what_another_node_took_the_place_of_is_there_in_the_end(start: Start, results: Path) -> None:
    """Two nodes replace at the same time what was there at the start: the step of one is not seen by the other."""
    (results / "config").write_text("old")
    node = start(node="a")
    write(node, "config", "of a")
    node.settle()
    assert (results / "config").read_text() == "of a"
    (results / "spare").write_text("of b")
    (results / "spare").rename(results / "config")
    node.end()
    assert (results / "config").read_text() == "of b"
    assert (results / "config.a").read_text() == "of a"


def test_what_another_node_wrote_into_a_file_is_not_overwritten(start: Start, results: Path) -> None:
    """It may have a link to a file of that name, which this node took the place of."""
    node = start(node="a")
    write(node, "log", "a")
    node.settle()
    with (results / "log").open("a") as file:
        file.write(" and b")
    with (node.out / "log").open("a") as file:
        file.write(" again")
    node.end()
    assert (results / "log").read_text() == "a and b"
    assert (results / "log.a").read_text() == "a again"


def test_a_name_is_given_to_one_only(results: Path) -> None:
    inode = results.stat().st_ino
    targets = [Target(Charter("run-1", os.fspath(results), inode, 0, "host", node)) for node in ("a", "b")]
    temporaries = [target.temporary("name") for target in targets]
    assert len(set(temporaries)) == 2
    for temporary in temporaries:
        (results / temporary).write_text(temporary)
    given_to = [target.give_name(one, "name", is_new=True) for target, one in zip(targets, temporaries, strict=True)]
    assert given_to == [True, False]
    assert (results / "name").read_text() == temporaries[0]


def test_a_lost_node_removes_nothing_and_drains_late_beside_what_others_wrote(start: Start, results: Path) -> None:
    (results / "old").write_text("old")
    lost, other = start(node="a"), start(node="b")
    write(lost, "mine", "a")
    lost.settle()
    write(lost, "both", "a")
    lost.stop()
    write(other, "both", "b")
    other.end()
    assert tree(results).keys() == {"old", "mine", "both"}
    report = drain_late(lost.place, 10.0)
    assert report is not None
    assert report.undrained == []
    assert (results / "both").read_text() == "b"
    assert (results / "both.a").read_text() == "a"


def test_a_removal_on_one_node_takes_nothing_that_another_wrote(start: Start, results: Path) -> None:
    (results / "old").mkdir()
    (results / "old/state").write_text("old")
    one, other = start(node="a"), start(node="b")
    write(other, "old/new", "b")
    other.settle()
    shutil.rmtree(one.out / "old")
    one.end()
    other.end()
    assert tree(results).keys() == {"old", "old/new"}


@pytest.mark.parametrize("how", ["removed", "renamed", "alone"])
def test_what_lies_beside_goes_with_its_name(start: Start, results: Path, how: str) -> None:
    one, other = start(node="a"), start(node="b")
    for node, text in ((one, "a"), (other, "b")):
        write(node, "same", text)
        node.settle()
    assert tree(results).keys() == {"same", "same.b"}
    if how == "removed":
        (other.out / "same").unlink()
    elif how == "renamed":
        (other.out / "same").rename(other.out / "mine")
    else:
        (one.out / "same").unlink()
    for node in (one, other):
        node.turn(0.0)
        node.end()
    assert (results / "same").read_text() == ("b" if how == "alone" else "a")
    assert tree(results).keys() == ({"same", "mine"} if how == "renamed" else {"same"})
    assert other.drain.report().findings.beside == {}


NAMES = st.sampled_from(["x", "y", "d/x", "d/y"])
STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["write", "append", "remove", "turn"]), NAMES), max_size=8
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_whatever_nodes_do_each_file_is_in_the_target(
    steps: list[tuple[int, str, str]], tmp_path_factory: pytest.TempPathFactory, local_dir: Path
) -> None:
    base = tmp_path_factory.mktemp("shared")
    results, local = base / "results", local_dir / base.name
    (results / "d").mkdir(parents=True)
    (results / "x").write_text("at the start")
    (results / "d/y").write_text("at the start")
    nodes = {host: Running(local / host, results, host) for host in ("a", "b")}
    try:
        _do(steps, list(nodes.values()))
        for node in nodes.values():
            node.end()
        settled(nodes, results)
        for host, node in nodes.items():
            for name, entry in tree(node.out).items():
                path = node.out / name
                if path.is_file() and not path.is_symlink():
                    found = {tree(results).get(place) for place in (name, f"{name}.{host}")}
                    assert entry in found, f"{name} of {host}: {sorted(tree(results))}"
        assert not [name for name in tree(results) if ".hpcstage" in name]
    finally:
        for node in nodes.values():
            node.stop()
        shutil.rmtree(local)


def _do(steps: list[tuple[int, str, str]], nodes: list[Running]) -> None:
    for number, (at, what, name) in enumerate(steps):
        path = nodes[at].out / name
        if what == "write":
            write(nodes[at], name, f"{at} {number}")
        elif what == "append" and path.exists() and not path.is_symlink():
            with path.open("a") as file:
                file.write(f" and {number}")
        elif what == "remove":
            path.unlink(missing_ok=True)
        elif what == "turn":
            for _ in range(5):
                nodes[at].turn(0.02)
