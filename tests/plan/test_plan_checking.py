"""What `--data` and `--order` name in vain, or mean otherwise than it is written: refused, or understood."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcstage.errors import UsageError
from hpcstage.plan.dataset import arguments, datasets
from hpcstage.plan.dataset.datasets import Datasets, resolve


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("d/a.jpg", "d/b.jpg", "d/sub/c.jpg", "d/#odd", "d/blank ", "~tilde", "home/h.jpg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path.resolve()


def listed(tree: Path, *lines: str | bytes, name: str = "list.txt") -> str:
    (tree / name).write_bytes(b"".join(os.fsencode(line) + b"\n" for line in lines))
    return f"@{name}"


def taken(resolved: Datasets, tree: Path) -> list[str]:
    return [os.fsdecode(path).removeprefix(f"{tree}/") for path in resolved.lists[0].paths]


def refused(tree: Path, *arguments: str, order: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(arguments, tree, order=order)
    assert caught.value.remedy
    return caught.value.line()


@pytest.mark.parametrize("argument", ["d/*.png", "d/**/*.png", "d/[x]*", "*/sub/d*"])
def test_a_pattern_without_a_match(tree: Path, argument: str):
    assert f"--data {argument} matches no file" in refused(tree, argument)


@pytest.mark.parametrize("argument", ["d/*.jpg", "d/**/c.jpg", "d/s*", "*/sub/c*"])
def test_a_pattern_with_a_match(tree: Path, argument: str):
    assert resolve([argument], tree).all


def test_a_directory_of_directories_that_hold_nothing(tree: Path):
    (tree / "empty" / "below").mkdir(parents=True)
    (tree / "empty" / "link").symlink_to("nothing")
    assert "--data empty holds no file" in refused(tree, "empty")
    (tree / "empty" / "below" / "x").touch()
    assert resolve(["empty"], tree).all


def test_what_takes_long_to_look_at_is_left_to_the_scan(tree: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(arguments, "LOOKED_ENTRIES", 3)
    for number in range(5):
        (tree / "many" / str(number)).mkdir(parents=True)
    assert resolve(["many"], tree).all
    assert resolve(["many/*.jpg"], tree).all


@pytest.mark.parametrize("label", [" 0", "\t17", ", 3", " 0 0.5", ";x"])
def test_a_list_with_labels(tree: Path, label: str):
    given = listed(tree, "# path label", "", "d/a.jpg", f"d/b.jpg{label}")
    line = refused(tree, given)
    assert "the list @list.txt, line 4" in line
    assert str(tree / "d/b.jpg") in line
    assert "one path per line" in line


def test_a_list_of_a_directory_with_labels(tree: Path):
    assert "line 1" in refused(tree, "d", listed(tree, "d/a.jpg 0", "d/b.jpg 1"))


def test_a_list_with_a_pattern(tree: Path):
    line = refused(tree, listed(tree, "d/a.jpg", "d/*.jpg"))
    assert "line 2" in line
    assert f"--data '{tree}/d/*.jpg'" in line


def test_labels_and_patterns_far_down(tree: Path):
    assert "line 501" in refused(tree, listed(tree, *["d/a.jpg"] * 500, "d/b.jpg 1", *["d/a.jpg"] * 500))


def test_what_looks_odd_and_is_there_is_taken(tree: Path):
    for name in ("d/a.jpg 0", "d/*.jpg", "d/a,b"):
        (tree / name).touch()
    assert taken(resolve([listed(tree, "d/a.jpg 0", "d/*.jpg", "d/a,b")], tree), tree) == [
        "d/a.jpg 0",
        "d/*.jpg",
        "d/a,b",
    ]


def test_a_list_of_nothing_that_is_there(tree: Path):
    line = refused(tree, listed(tree, "", "e/a.jpg", "/nowhere/b.jpg"))
    assert "of the 2 entries of the list @list.txt none is there" in line
    assert f"line 2: {tree}/e/a.jpg" in line


def test_nothing_in_a_line_has_another_meaning(tree: Path):
    lines = ["d/#odd", "", "~tilde", "d/blank ", "d/a.jpg"]
    resolved = resolve([listed(tree, *lines)], tree)
    assert taken(resolved, tree) == ["d/#odd", "~tilde", "d/blank ", "d/a.jpg"]
    assert [resolved.lists[0].line_of(index) for index in range(4)] == [1, 3, 4, 5]
    (tree / "list.txt").write_bytes(b"d/a.jpg\0d/#odd\0d/blank \0")
    assert taken(resolve(["@list.txt"], tree), tree) == ["d/a.jpg", "d/#odd", "d/blank "]


@pytest.mark.parametrize(
    "missing", ["/nowhere/at/all.jpg", "/nowhere", "zzz/missing.jpg", "missing.jpg", "0.jpg", "$HOME/x", "<binary>"]
)
@pytest.mark.parametrize("first", [True, False])
def test_a_missing_entry_does_not_make_the_dataset_larger(tree: Path, missing: str, first: bool):
    good = ["d/sub/c.jpg", "d/sub/../a.jpg"]
    resolved = resolve([listed(tree, *([missing, *good] if first else [*good, missing]))], tree)
    assert [os.fsdecode(d.root) for d in resolved.all] == [f"{tree}/d"]
    assert len(resolved.lists[0].paths) == 3


def test_an_order_that_is_not_there(tree: Path):
    for order in ("randm", "/nowhere/x", "d"):
        line = refused(tree, "d", order=order)
        assert f"the list {order} of --order" in line
        assert "auto|manifest|given|trace|sampler" in line


def test_an_order_is_checked_like_a_list(tree: Path):
    listed(tree, "d/a.jpg", "d/b.jpg 7")
    assert "the list list.txt of --order, line 2" in refused(tree, "d", order="list.txt")


def test_an_order_is_read_once(tree: Path):
    reading, writing = os.pipe()
    os.write(writing, b"d/b.jpg\nd/a.jpg\n")
    os.close(writing)
    resolved = resolve(["d"], tree, order=f"/dev/fd/{reading}")
    os.close(reading)
    resolved.save(tree / "saved")
    loaded = Datasets.load(tree / "saved")
    assert loaded == resolved
    assert [os.fsdecode(path) for item in loaded.ordering for path in item.paths] == [
        f"{tree}/d/b.jpg",
        f"{tree}/d/a.jpg",
    ]


def test_a_dataset_that_vanished_is_not_taken_to_be_local():
    lost = datasets.Dataset("0-x", datasets.DatasetKind.DIRECTORY, b"/nowhere", (), ("/nowhere",))
    assert datasets.already_local([lost], 1) == {}
