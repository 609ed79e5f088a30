"""What one node wrote is shown on the others as links: removed, renamed and written to as the files, and never in the
place of anything local."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from draining import Running, start, tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcstage import inotify
from hpcstage.inotify import EventQueue
from hpcstage.outputs import namequeue, told
from hpcstage.outputs.claims import claims_of, settle
from hpcstage.outputs.facts import News
from hpcstage.outputs.late import drain_late
from hpcstage.outputs.told import Told, ToldPaths

__all__ = ["start"]
Nodes = tuple[Running, Running]


@pytest.fixture
def results(tmp_path: Path) -> Path:
    made = tmp_path / "results"
    made.mkdir()
    (made / "old").write_text("old")
    return made


@pytest.fixture
def nodes(start: Callable[..., Running], results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr(told, "LOOK_S", 0.02)
    monkeypatch.setattr(told, "LOOK_PER_NODE_S", 0.0)
    monkeypatch.setattr(namequeue, "HOLD_S", 0.1)
    a, b = tmp_path / "a.told", tmp_path / "b.told"
    return start(results, node="a", told=ToldPaths(a, (b,))), start(results, node="b", told=ToldPaths(b, (a,)))


def both_until(nodes: Nodes, condition: Callable[[], object]) -> None:
    def turned() -> object:
        nodes[1].turn(0.005)
        return condition()

    nodes[0].until(turned)


def both_end(nodes: Nodes) -> dict[str, dict[str, str]]:
    """What the end of a run does. Returns where the files are that did not get their names."""
    for node in nodes:
        node.end()
    reports = {host: node.drain.report() for host, node in zip("ab", nodes, strict=True)}
    for host, report in reports.items():
        assert report.undrained == [], f"{host}: {report}"
    names = sorted({name for report in reports.values() for name in report.findings.beside})
    claims = {host: claims_of(node.place, names) for host, node in zip("ab", nodes, strict=True)}
    return settle(os.fspath(nodes[0].target), claims)


def shown(nodes: Nodes, name: str, text: str) -> Path:
    """Writes a file on the first node; returns the link to it on the second."""
    write(nodes[0].out / name, text)
    link = nodes[1].out / name
    both_until(nodes, lambda: link.is_symlink() and link.exists() and link.read_text() == text)
    both_until(nodes, lambda: nodes[1].drain.is_drained)
    return link


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    spare = path.with_name(f"{path.name}.new")
    spare.write_text(text)
    spare.rename(path)


def files(results: Path) -> dict[str, object]:
    return {name: what for name, (_, what, *_) in tree(results).items() if isinstance(what, bytes)}


def test_what_one_node_wrote_is_shown_on_the_other_and_not_drained(nodes: Nodes, results: Path) -> None:
    link = shown(nodes, "epoch1/model", "weights")
    assert os.readlink(link) == f"{results}/epoch1/model"
    assert link.lstat().st_nlink == 2, "it has an anchor"
    assert both_end(nodes) == {}
    assert files(results) == {"epoch1/model": b"weights", "old": b"old"}
    assert nodes[1].drain.report().files == 0


def test_a_local_name_is_never_taken(nodes: Nodes, results: Path) -> None:
    held = (nodes[1].out / "log").open("w")
    held.write("mine")
    shown(nodes, "first", "1")
    write(nodes[0].out / "log", "other")
    shown(nodes, "second", "2")
    assert not (nodes[1].out / "log").is_symlink()
    held.close()
    (beside,) = both_end(nodes)["log"].values()  # the two changes are too near each other to say whose
    found = files(results)
    assert {found.pop("log"), found.pop(beside)} == {b"mine", b"other"}
    assert found == {"first": b"1", "second": b"2", "old": b"old"}


def test_a_name_in_a_directory_that_is_a_link_is_not_shown(nodes: Nodes, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (nodes[1].out / "d").symlink_to(elsewhere)
    write(nodes[0].out / "d/file", "1")
    write(nodes[0].out / "last", "2")
    both_until(nodes, (nodes[1].out / "last").exists)
    assert os.listdir(elsewhere) == []


@pytest.mark.parametrize("name", ["file", "d/file"])
def test_a_removal_of_the_link_removes_the_file_for_good(nodes: Nodes, results: Path, name: str) -> None:
    link = shown(nodes, name, "1")
    link.unlink()
    both_until(nodes, lambda: not (results / name).exists())
    assert (nodes[0].out / name).read_text() == "1", "the node that wrote it has it still"
    assert both_end(nodes) == {}
    assert files(results) == {"old": b"old"}


def test_a_rename_of_the_link_renames_the_file_for_good(nodes: Nodes, results: Path) -> None:
    link = shown(nodes, "file", "1")
    link.rename(link.with_name("new"))
    both_until(nodes, lambda: (results / "new").exists() and not (results / "file").exists())
    both_until(nodes, (nodes[0].out / "new").is_symlink)
    assert both_end(nodes) == {}
    assert files(results) == {"new": b"1", "old": b"old"}


@pytest.mark.parametrize("name", ["old", "file"])
def test_a_link_goes_with_what_another_node_removed(nodes: Nodes, results: Path, name: str) -> None:
    link = shown(nodes, name, "1") if name != "old" else nodes[1].out / name
    (nodes[0].out / name).unlink()
    both_until(nodes, lambda: not os.path.lexists(link))
    assert not (results / name).exists()
    both_until(nodes, lambda: nodes[1].drain.is_drained)
    write(nodes[1].out / name, "mine")
    assert both_end(nodes) == {}
    assert (results / name).read_text() == "mine"


def test_the_link_follows_what_another_node_replaces(nodes: Nodes, results: Path) -> None:
    for text in ("1", "2", "3"):
        link = shown(nodes, "file", text)
    place = nodes[1].place
    both_until(nodes, lambda: (results / "file").stat().st_ino in _anchored(place.scratch))
    both_until(nodes, lambda: nodes[1].drain.is_drained)
    assert len(_anchored(place.scratch)) == 2, "one for each link"
    link.unlink()
    both_until(nodes, lambda: not (results / "file").exists())
    assert both_end(nodes) == {}
    assert files(results) == {"old": b"old"}


def _anchored(scratch: str) -> set[int]:
    return {int(name.partition(".")[0]) for name in os.listdir(Path(scratch).with_name("anchors"))}


@pytest.mark.parametrize("how", ["renamed over", "removed first"])
def test_what_takes_the_place_of_the_link_loses_nothing(nodes: Nodes, results: Path, how: str) -> None:
    link = shown(nodes, "file", "of a")
    if how == "removed first":
        link.unlink()
    write(link, "of b")
    (beside,) = both_end(nodes)["file"].values()
    assert {beside} | {"file", "old"} == files(results).keys()
    assert set(files(results).values()) == {b"of a", b"of b", b"old"}


def test_a_late_drain_does_not_replace_what_another_node_wrote(nodes: Nodes, results: Path) -> None:
    link = shown(nodes, "file", "of a")
    nodes[1].stop()
    write(link, "of b")
    report = drain_late(nodes[1].place, 60.0)
    assert report is not None
    assert report.findings.beside == {"file": "file.b"}
    nodes[0].end()
    assert files(results) == {"file": b"of a", "file.b": b"of b", "old": b"old"}


def test_what_was_shown_and_removed_is_not_shown_again_when_the_uploader_died(nodes: Nodes, results: Path) -> None:
    link = shown(nodes, "file", "1")
    link.unlink()
    both_until(nodes, lambda: not (results / "file").exists())
    os.kill(nodes[1].drain._process._pid, signal.SIGKILL)
    write(nodes[1].out / "mine", "2")
    both_until(nodes, (results / "mine").exists)
    shown(nodes, "last", "3")
    assert not os.path.lexists(link)


def test_what_is_written_through_the_link_loses_nothing(nodes: Nodes, results: Path) -> None:
    shown(nodes, "file", "of a").write_text("of b")
    both_end(nodes)
    assert files(results) == {"file": b"of b", "file.a": b"of a", "old": b"old"}


def test_a_time_that_is_changed_through_the_link_is_no_other_content(nodes: Nodes, results: Path) -> None:
    os.utime(shown(nodes, "file", "of a"), (1, 1))
    assert both_end(nodes) == {}
    assert files(results) == {"file": b"of a", "old": b"old"}


def test_a_wiped_directory_removes_nothing_of_the_others(nodes: Nodes, results: Path) -> None:
    for name in ("file", "d/file"):
        shown(nodes, name, name)
    shutil.rmtree(nodes[1].out)
    both_until(nodes, lambda: nodes[1].drain.report().is_gone)
    nodes[1].drain.end(0.0)
    nodes[1].stop()
    nodes[0].end()
    assert files(results) == {"file": b"file", "d/file": b"d/file", "old": b"old"}


def test_what_the_program_puts_in_the_place_of_a_link_that_goes_stays(nodes: Nodes, results: Path) -> None:
    link = shown(nodes, "file", "1")
    (nodes[0].out / "file").unlink()
    nodes[0].until(lambda: not (results / "file").exists())
    write(link, "mine")  # before this node hears of the removal
    both_until(nodes, lambda: nodes[1].drain.is_drained)
    assert link.read_text() == "mine"
    both_end(nodes)
    assert files(results) == {"file": b"mine", "old": b"old"}


NAMES = st.sampled_from(["x", "y", "d/x", "d/y"])
WAYS = st.sampled_from(["write", "write", "append", "remove", "rename", "turn"])
STEPS = st.lists(st.tuples(st.integers(0, 1), WAYS, NAMES, NAMES, st.integers(0, 6)), max_size=14)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_whatever_nodes_do_nothing_that_stays_is_lost(
    steps: list[tuple[int, str, str, str, int]],
    tmp_path_factory: pytest.TempPathFactory,
    local_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a node wrote last under a name is in the target, under whatever name, unless some node removed it."""
    monkeypatch.setattr(told, "LOOK_S", 0.01)
    monkeypatch.setattr(namequeue, "HOLD_S", 0.02)
    base = tmp_path_factory.mktemp("shown")
    results, local = base / "results", local_dir / base.name
    (results / "d").mkdir(parents=True)
    paths = [base / "a.told", base / "b.told"]
    a, b = (ToldPaths(paths[at], (paths[1 - at],)) for at in range(2))
    nodes = Running(local / "a", results, "a", told=a), Running(local / "b", results, "b", told=b)
    try:
        removed: set[bytes] = set()
        for number, (at, way, name, other, turns) in enumerate(steps):
            _do(nodes[at], way, name, other, f"{number} by {at};", removed)
            for _ in range(turns):
                for node in nodes:
                    node.turn(0.003)
        both_end(nodes)
        there = b"\n".join(what for what in files(results).values() if isinstance(what, bytes))
        for node in nodes:
            for name, what in files(node.out).items():
                assert isinstance(what, bytes)
                is_there = all(piece in there for piece in what.split(b";") if piece not in removed)
                assert is_there, f"{name} {what!r} is lost: {files(results)}"
        assert not [name for name in tree(results) if ".hpcstage" in name or ".exchanged" in name]
    finally:
        for node in nodes:
            node.stop()
        shutil.rmtree(local)


def _do(node: Running, way: str, name: str, other: str, text: str, removed: set[bytes]) -> None:
    path = node.out / name
    try:
        if way == "write":
            if path.exists() and not path.is_symlink():
                removed.update(path.read_bytes().split(b";"))
            write(path, text)
        elif way == "append":
            with path.open("a") as file:
                file.write(text)
        elif way == "remove":
            gone = path.read_bytes().split(b";")
            path.unlink()
            removed.update(gone)
        elif way == "rename":
            replaced = (node.out / other).read_bytes().split(b";") if (node.out / other).exists() else []
            path.rename(node.out / other)
            removed.update(replaced if name != other else [])
    except FileNotFoundError:
        pass


def test_a_node_opens_the_files_of_those_only_that_said_something(tmp_path: Path) -> None:
    """The others are a thousand: what nobody said costs one look at a directory."""
    paths = [tmp_path / f"{number}.told" for number in range(50)]
    nodes = [Told(ToldPaths(path, tuple(one for one in paths if one != path))) for path in paths]
    for number, node in enumerate(nodes[1:]):
        node.tell([News(f"file-{number}", 1, 2, True)])
    assert len(nodes[0].look()) == 49
    queue = EventQueue()
    try:
        queue.add(os.fsencode(tmp_path), inotify.OPEN)
        assert nodes[0].look() == []
        assert not nodes[0].is_taken("file-1", 1, 2)
        nodes[7].tell([News("file-1", 1, 2, False)])
        assert nodes[0].is_taken("file-1", 1, 2)
        seen = {name for data in iter(queue.read, b"") for _, _, _, name in inotify.events(data) if name}
        assert seen == {b"7.told"}
        again = Told(nodes[7]._paths, is_again=True)
        again.tell([News("more", 1, 2, True)])
        assert [one.name for one in nodes[0].look()] == ["file-1", "more"]
    finally:
        queue.close()
