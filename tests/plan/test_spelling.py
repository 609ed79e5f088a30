"""Paths of tables and lists that lead below a dataset through symbolic links."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcstage.plan.dataset import spelling
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan


@pytest.fixture
def spelt(tmp_path: Path) -> spelling.Spelling:
    """For a dataset of one file, a link to it, one to its directory, and a file elsewhere."""
    (tmp_path / "data/sub").mkdir(parents=True)
    (tmp_path / "data/sub/file").write_text("x")
    (tmp_path / "elsewhere").write_text("x")
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "inner").symlink_to("link/sub")
    (tmp_path / "one").symlink_to("inner/file")
    (tmp_path / "loop").symlink_to("loop")
    return spelling.Spelling(scan(resolve([os.fspath(tmp_path / "data")], tmp_path)).manifest)


@pytest.mark.parametrize("name", ["data/sub/file", "link/sub/file", "inner/file", "one", "link//sub/./file"])
def test_names_of_a_file(spelt: spelling.Spelling, tmp_path: Path, name: str) -> None:
    assert spelt(os.fsencode(tmp_path / name)) == os.fsencode(tmp_path / "data/sub/file")


@pytest.mark.parametrize("name", ["elsewhere", "loop/file", "nothing/at/all", "\0", "x" * 300])
def test_what_is_no_name_of_a_file_stays(spelt: spelling.Spelling, tmp_path: Path, name: str) -> None:
    path = os.fsencode(tmp_path) + b"/" + os.fsencode(name)
    assert spelt(path) == path
    assert spelt(os.fsencode(name)) == os.fsencode(name)


def test_few_questions_to_the_file_system(
    spelt: spelling.Spelling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    real = os.path.realpath
    monkeypatch.setattr(os.path, "realpath", lambda path: asked.append(path) or real(path))
    for index in range(5000):
        spelt(os.fsencode(tmp_path) + b"/link/sub/%d" % index)
        spelt(os.fsencode(tmp_path) + b"/other/%d" % index)
    assert len(asked) <= spelling.MOST_FILES + 2
