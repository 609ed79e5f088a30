"""The judge of what is in a directory of output files after a kill: it passes what was promised, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.outputtrees import Said, entries, left_by_command, unkept

CLEAN = """hpcstage: copying the output files that run 20261124-223000-0badcafe left in /local/x
hpcstage: {name} of run 20261124-223000-0badcafe is {beside} in /dir/results: that had been changed since
"""
STAYS = "hpcstage: {name} of run 20261124-223000-0badcafe stays in /dir/results, under that name: {why}\n"


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What the command left, as a plain directory has it."""
    root = tmp_path / "left"
    (root / "d").mkdir(parents=True)
    (root / "a").write_text("new")
    (root / "d/b").write_text("below")
    for name in ("empty", "empty too"):
        (root / name).touch()
    (root / "link").symlink_to("a")
    return root


@pytest.fixture
def there(left: Path, tmp_path: Path) -> Path:
    """DIR, which is the same."""
    root = tmp_path / "there"
    root.mkdir()
    for name, (kind, what, _) in sorted(entries(left).items()):
        if kind == "link":
            (root / name).symlink_to(what)
        elif kind == "directory":
            (root / name).mkdir()
        else:
            (root / name).write_bytes((left / name).read_bytes())
    return root


def judged(there: Path, left: Path, said: Said | None = None) -> list[str]:
    return unkept(entries(there), entries(left), said or Said())


def test_the_same_passes(there: Path, left: Path) -> None:
    assert judged(there, left) == []


@pytest.mark.parametrize("name", ["a", "d/b", "empty", "link"])
def test_what_is_gone_is_lost(there: Path, left: Path, name: str) -> None:
    (there / name).unlink()
    (said,) = judged(there, left)
    assert said.startswith(f"{name} is lost")


def test_an_older_content_under_the_name_is_a_loss(there: Path, left: Path) -> None:
    (there / "a").write_text("old")
    assert len(judged(there, left)) == 1
    (there / "former").write_text("new")
    assert len(judged(there, left)) == 2, "that it lies somewhere is not enough"


def test_another_mode_is_a_difference(there: Path, left: Path) -> None:
    (there / "a").chmod(0o600)
    assert len(judged(there, left)) == 1


BESIDE = {"name": "a", "why": "a.run-1", "fate": "beside"}


def test_what_lies_beside_has_to_be_named(there: Path, left: Path) -> None:
    (there / "a").rename(there / "a.run-1")
    (there / "a").write_text("of others")
    assert len(judged(there, left)) == 2
    assert judged(there, left, Said.of(CLEAN.format(name="a", beside="a.run-1"), None)) == []
    assert judged(there, left, Said.of("", {"drains": {"out": {"names": [BESIDE]}}})) == []
    assert judged(there, left, Said.of(CLEAN.format(name="d/b", beside="a.run-1"), None)) != []
    (there / "a.run-1").write_text("old")
    assert judged(there, left, Said.of(CLEAN.format(name="a", beside="a.run-1"), None)) != []


def test_what_is_there_without_a_word_is_a_difference(there: Path, left: Path) -> None:
    (there / "old").mkdir()
    (there / "old/file").touch()
    assert len(judged(there, left)) == 2
    assert judged(there, left, Said.of(STAYS.format(name="old", why="it was removed"), None)) == []
    said = Said.of(STAYS.format(name="old/file", why="it was removed"), None)
    assert judged(there, left, said) == [], "the directory above it goes without saying"
    (there / "old/other").mkdir()
    assert len(judged(there, left, said)) == 1


def test_what_was_said_and_is_not_so_is_a_difference(there: Path, left: Path) -> None:
    assert len(judged(there, left, Said.of(STAYS.format(name="old", why="it was removed"), None))) == 1
    assert len(judged(there, left, Said.of(CLEAN.format(name="a", beside="a.run-1"), None))) == 1


def test_what_was_under_way_is_as_the_local_directory_has_it(there: Path, left: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    (local / "d").mkdir(parents=True)
    (local / "a").write_text("half")
    (local / "d/b").symlink_to(there / "d/b")
    under_way = left_by_command(left, local, there, ["a", "d", "gone"])
    assert under_way["d/b"] == entries(left)["d/b"], "what DIR has"
    assert "gone" not in under_way
    assert len(unkept(entries(there), under_way, Said())) == 1
    (there / "a").write_text("half")
    assert unkept(entries(there), under_way, Said()) == []
