"""Arguments to datasets: roots, spellings, overlaps, lists, and errors that name argument and fix."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstage.errors import UsageError
from hpcstage.plan.dataset.datasets import Datasets, already_local, common_directories, resolve
from hpcstage.plan.dataset.pathlist import parse_list
from hpcstage.plan.dataset.roots import Roots, is_below, tidy
from hpcstage.plan.types import DatasetKind


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("train/a/1.bin", "train/a/2.bin", "train/b/3.bin", "labels.txt", "other/x.bin"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path.resolve()


def roots(resolved: Datasets) -> list[str]:
    return [os.fsdecode(d.root) for d in resolved.all]


def write_list(path: Path, *entries: str | bytes, end: bytes = b"\n") -> str:
    path.write_bytes(b"".join(os.fsencode(e) + end for e in entries))
    return f"@{path}"


def test_directory_relative_and_through_a_link(tree: Path):
    (tree / "link").symlink_to("train")
    resolved = resolve(["link"], tree)
    (dataset,) = resolved.all
    assert dataset.root == os.fsencode(tree / "train")
    assert dataset.aliases == (os.fsencode(tree / "link"),)
    assert (dataset.kind, dataset.name, dataset.arguments) == (DatasetKind.DIRECTORY, "0-train", ("link",))


@pytest.mark.parametrize("spelling", ["train/", "./train", "train/a/..", "other/../train//"])
def test_spellings_of_one_directory_have_one_root(tree: Path, spelling: str):
    (dataset,) = resolve([spelling], tree).all
    assert dataset.root == os.fsencode(tree / "train")
    assert dataset.aliases == ()


def test_dotdot_behind_a_link_follows_the_link(tree: Path):
    (tree / "other" / "deep").symlink_to(tree / "train" / "a")
    (dataset,) = resolve(["other/deep/../b"], tree).all
    assert dataset.root == os.fsencode(tree / "train/b")


def test_the_same_directory_twice_is_one_dataset_with_both_spellings(tree: Path):
    (tree / "link").symlink_to("train")
    (dataset,) = resolve(["train", "link"], tree).all
    assert dataset.arguments == ("train", "link")
    assert dataset.aliases == (os.fsencode(tree / "link"),)


@pytest.mark.parametrize("arguments", [["train", "train/a"], ["train/a", "train"]])
def test_overlap_names_both_and_the_fix(tree: Path, arguments: list[str]):
    with pytest.raises(UsageError) as caught:
        resolve(arguments, tree)
    assert "datasets train and train/a overlap" in caught.value.what
    assert "leave out --data train/a" in caught.value.remedy


def test_neighbours_with_a_common_prefix_do_not_overlap(tree: Path):
    (tree / "train2").mkdir()
    (tree / "train2" / "x").touch()
    assert len(resolve(["train", "train2"], tree).all) == 2


def test_single_file_and_glob_share_a_root(tree: Path):
    resolved = resolve(["train/a/1.bin", "train/*/2.bin"], tree)
    assert roots(resolved) == [str(tree / "train")]
    assert resolved.all[0].kind is DatasetKind.FILES
    assert resolved.named[0].files == [b"a/1.bin"]
    assert resolved.named[0].globs == [(b"", b"*/2.bin")]


def test_a_name_that_looks_like_a_glob_is_a_file_if_it_exists(tree: Path):
    (tree / "a[1].bin").write_text("x")
    assert resolve(["a[1].bin"], tree).named[0].files == [b"a[1].bin"]


def test_file_like_arguments_inside_a_directory_join_it(tree: Path):
    listed = write_list(tree / "order.txt", "train/b/3.bin", "train/a/1.bin")
    resolved = resolve(["train", "train/a/1.bin", "train/*/2.bin", listed], tree)
    assert roots(resolved) == [str(tree / "train")]
    assert resolved.all[0].kind is DatasetKind.DIRECTORY
    assert resolved.named == {}
    assert listed in resolved.all[0].arguments
    assert [p.paths for p in resolved.lists] == [[os.fsencode(tree / x) for x in ("train/b/3.bin", "train/a/1.bin")]]


def test_a_file_above_a_directory_makes_them_one_dataset(tree: Path):
    resolved = resolve(["train", "labels.txt"], tree)
    assert roots(resolved) == [str(tree)]
    assert resolved.all[0].kind is DatasetKind.FILES
    assert resolved.named[0].directories == [b"train"]
    assert resolved.named[0].files == [b"labels.txt"]


def test_a_spelling_that_is_no_name_of_the_root_is_none_of_its_aliases(tree: Path):
    """The shim follows links, so its files are served all the same."""
    (tree / "short").symlink_to("train")
    resolved = resolve(["short", "labels.txt"], tree)
    assert roots(resolved) == [str(tree)]
    assert resolved.all[0].aliases == ()


def test_list_entries_through_a_link_are_found_below_the_root(tree: Path):
    (tree / "link").symlink_to("train")
    listed = write_list(tree / "order.txt", "link/a/1.bin", "link/b/3.bin")
    resolved = resolve([listed], tree)
    assert roots(resolved) == [str(tree / "train")]
    assert resolved.all[0].aliases == (os.fsencode(tree / "link"),)
    assert Roots(resolved.all).locate(resolved.lists[0].paths[0]) == (0, b"a/1.bin")


def test_list_over_two_places_with_nothing_in_common(tree: Path, local_dir: Path):
    (local_dir / "y.bin").write_text("y")
    (local_dir / "z.bin").write_text("z")
    listed = write_list(tree / "l", tree / "other/x.bin", local_dir / "y.bin", local_dir / "z.bin")
    assert sorted(roots(resolve([listed], tree))) == sorted([str(tree / "other"), str(local_dir)])


def test_nul_separated_list_holds_newlines(tree: Path):
    odd = b"train/a/new\nline \xff"
    listed = write_list(tree / "l", odd, "train/a/1.bin", end=b"\0")
    paths = resolve([listed], tree).lists[0].paths
    assert paths == [os.fsencode(tree) + b"/" + odd, os.fsencode(tree / "train/a/1.bin")]


def test_lists_skip_blank_lines_and_understand_windows_ends(tree: Path):
    base = os.fsencode(tree)
    assert paths_of(b"\n\na\n\nb\n", base) == [base + b"/a", base + b"/b"]
    assert paths_of(b"a\r\nb\r\n", base) == [base + b"/a", base + b"/b"]
    assert paths_of(b"./a//b\n../x\n", b"/p/q") == [b"/p/q/a/b", b"/p/x"]
    assert paths_of(b" a b \n", b"/p") == [b"/p/ a b "]


def paths_of(data: bytes, cwd: bytes) -> list[bytes]:
    return parse_list("@l", data, cwd).paths


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("missing", "--data missing does not exist"),
        ("@missing", "cannot read the list @missing: No such file"),
        ("@empty", "the list @empty names no file"),
        ("@long", "line 3"),
        ("nowhere/*.bin", "there is no directory"),
        ("/dev/null", "neither a file nor a directory"),
        ("", "--data is empty"),
    ],
)
def test_bad_arguments_are_named(tree: Path, argument: str, words: str):
    (tree / "empty").write_text("\n\n")
    (tree / "long").write_bytes(b"a\nb\n" + b"c" * 5000 + b"\n")
    with pytest.raises(UsageError) as caught:
        resolve([argument], tree)
    assert words in caught.value.line()
    assert caught.value.remedy
    assert caught.value.exit_code == 2


def test_no_dataset(tree: Path):
    with pytest.raises(UsageError, match="no dataset"):
        resolve([], tree)


def test_dataset_on_the_local_disk_is_told(tree: Path):
    found, device = resolve(["train"], tree).all, os.stat(tree).st_dev
    assert [problem.id for problem in already_local(found, device).values()] == ["already-local"]
    assert already_local(found, device + 1) == {}


def test_some_of_the_datasets_keep_what_is_named_of_them(tree: Path):
    listed = write_list(tree / "l", "train/a/1.bin", "other/x.bin")
    order = write_list(tree / "order", "other/x.bin", "train/b/3.bin", "train/a/1.bin")
    found = resolve(["train", "other/*", listed], tree, order=order.removeprefix("@"))
    train, rest = found.all
    assert (train.root, rest.root) == (os.fsencode(tree / "train"), os.fsencode(tree / "other"))
    lone = found.only([train])
    assert (lone.all, lone.named) == ([train], {})
    assert lone.lists[0].paths == [os.fsencode(tree / "train/a/1.bin")]
    assert lone.order is not None
    assert lone.order.paths == [os.fsencode(tree / name) for name in ("train/b/3.bin", "train/a/1.bin")]
    lone = found.only([rest])
    assert lone.named == {0: found.named[1]}
    assert lone.lists[0].paths == [os.fsencode(tree / "other/x.bin")]
    assert found.only(found.all) == found


def test_saved_and_loaded_again(tree: Path):
    listed = write_list(tree / "l", "other/x.bin", b"train/odd \xff\n.bin", end=b"\0")
    resolved = resolve(["train", "labels.txt", "oth*/x*", listed], tree)
    resolved.save(tree / "resolved")
    loaded = Datasets.load(tree / "resolved")
    assert (loaded.all, loaded.lists, loaded.named) == (
        resolved.all, resolved.lists, resolved.named
    )  # fmt: skip
    assert (tree / "resolved").stat().st_mode & 0o777 == 0o600


def test_foreign_file_is_not_loaded(tree: Path):
    (tree / "resolved").write_bytes(b"something else")
    with pytest.raises(UsageError):
        Datasets.load(tree / "resolved")


def test_a_million_entries_in_seconds(tmp_path: Path):
    """Of which a few are looked at."""
    listed, base = tmp_path / "big", os.fsencode(tmp_path)
    for number in (0, 300, 999):
        path = tmp_path / f"n{number:05d}" / f"n{number:05d}_{number}.jpg"
        path.parent.mkdir()
        path.touch()
    listed.write_bytes(b"\n".join(b"%s/n%05d/n%05d_%d.jpg" % (base, i % 1000, i % 1000, i) for i in range(1_000_000)))
    (dataset,) = resolve([f"@{listed}"], tmp_path).all
    assert dataset.root == base


NAMES = st.binary(min_size=1, max_size=4).filter(lambda n: b"/" not in n and b"\0" not in n and n not in (b".", b".."))
PATHS = st.lists(NAMES, min_size=1, max_size=4).map(lambda parts: b"/" + b"/".join(parts))


@given(st.lists(PATHS, min_size=1, max_size=12))
def test_common_directories_hold_all_paths(paths: list[bytes]):
    found = common_directories(paths)
    for path in paths:
        assert any(is_below(path, directory) and path != directory for directory in found)
    assert all(not is_below(a, b) for a in found for b in found if a != b)


@given(PATHS, st.lists(st.sampled_from([b"/", b"/./", b"//"]), min_size=4, max_size=4))
def test_tidy_undoes_needless_slashes_and_dots(path: bytes, joints: list[bytes]):
    parts = path[1:].split(b"/")
    messy = b"".join(joint + part for joint, part in zip(joints, parts, strict=False))
    assert tidy(messy) == path
    assert tidy(messy + b"/") == path
