"""DIR holds what a plain directory with the same history holds, whatever was killed at whatever step."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from uploadworld import SLOW, check, entries, helds, histories, world

from hpcstage.upload import ending
from hpcstage.upload.uploading import Uploader


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "THREADS", 1)


@SLOW
@given(held=helds, history=histories)
def test_after_a_normal_end_it_is_the_plain_directory(
    held: dict[str, bytes], history: list[tuple[object, ...]]
) -> None:
    with world(held, []) as made:
        made.do(history)
        check(made, made.end(), is_late=False)


@SLOW
@given(held=helds, history=histories, kills=st.lists(st.integers(0, 30), min_size=1, max_size=4))
def test_after_a_kill_nothing_is_lost(
    held: dict[str, bytes], history: list[tuple[object, ...]], kills: list[int]
) -> None:
    with world(held, kills) as made:
        made.do(history)
        report = made.end()
        check(made, report, is_late=True)
        before = entries(made.target)
        again = made.late()
        is_settled = not report.left and not report.beside  # a name that was taken may be free by now
        assert not is_settled or entries(made.target) == before, "another late pass changes nothing"
        check(made, again, is_late=True)


@pytest.mark.parametrize("step", range(8))
def test_what_lay_in_dir_before_that_was_noted_is_known(step: int) -> None:
    with world({}, [step]) as made:
        made.do([("write", "a", b"one"), ("upload", "a"), ("remove", "a")])
        check(made, made.late(), is_late=True)


@pytest.mark.parametrize("step", range(14))
def test_what_lay_beside_before_that_was_noted_lies_there_once(step: int) -> None:
    with world({"a": b"", "b": b"", "d/a": b""}, [step]) as made:
        made.do([("exchange", "a", "d")])
        check(made, made.end(), is_late=True)


def test_what_is_seen_through_a_link_only_is_not_there() -> None:
    with world({"a": b"", "e/a": b""}, []) as made:  # the link to `a` of DIR leads to a directory in the end
        made.do([("remove", "e/a"), ("write", "e/a", b""), ("exchange", "a", "e")])
        check(made, made.end(), is_late=False)
    with world({}, []) as made:
        made.do([("mkdir", "d"), ("write", "d/a", b"one"), ("upload", "d/a"), ("rename", "d", "e"), ("link", "d", "e")])
        check(made, made.end(), is_late=False)


def test_what_dir_held_keeps_its_mode_where_a_directory_has_the_name() -> None:
    with world({"a": b"held"}, []) as made:
        made.do([("remove", "a"), ("mkdir", "a"), ("chmod", "a", 0o755), ("write", "a/b", b"one")])
        assert {one.name for one in made.end().left} == {"a", "a/b"}
        assert entries(made.target) == {"a": (0o644, b"held")}


def test_what_lost_its_directory_before_that_was_forced_to_the_disk_is_brought_again() -> None:
    with world({}, []) as made:
        made.do([("mkdir", "d"), ("write", "d/a", b"one"), ("write", "b", b"two")])
        made.uploader.bring("d/a")
        made.uploader.bring("b")
        shutil.rmtree(made.target / "d")
        assert list(made.uploader.settle()) == ["d/a"]
        assert set(made.manifest.puts) == {"b"}
        made.uploader = Uploader(made.place, made.manifest)  # it knows nothing of the directory
        check(made, made.end(), is_late=False)
