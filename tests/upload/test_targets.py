"""Targets that have no hard links, lose replies or fail: DIR is exact, or each difference is named and comes later."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sharedos import LOST, SharedOs
from uploadworld import SLOW, World, check, helds, histories, world

from hpcstage.upload import copying, ending, target, uploading
from hpcstage.upload.ending import Ended

TAKEN = "a file has the name of the directory"
"""What DIR held is not replaced by a directory: that is so on all targets."""
REFUSED = {errno.EROFS, errno.EDQUOT}
"""Errors of calls that change something."""


@contextmanager
def on(made: World, failing: Callable[[str], int]) -> Iterator[None]:
    """Has DIR's file system fail."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (copying, ending, target, uploading):
            patch.setattr(module, "os", SharedOs(os.fspath(made.target), failing))
        patch.setattr(ending, "THREADS", 1)
        yield


def done(made: World, history: list[tuple[object, ...]], failing: Callable[[str], int]) -> Ended:
    """Does a history and ends it, while DIR's file system fails."""
    with on(made, failing):
        for operation in history:
            try:
                made.do([operation])
            except OSError:  # the exact pass tries it again
                assert operation[0] == "upload"
        return made.end()


def failed(report: Ended) -> dict[str, str]:
    return {one.name: one.why for one in report.left if one.why != TAKEN}


def planned(plan: dict[int, int]) -> Callable[[str], int]:
    """Has the calls of these numbers fail."""
    count = iter(range(1 << 30))
    return lambda _: plan.get(next(count), 0)


@SLOW
@given(held=helds, history=histories)
def test_it_is_exact_without_hard_links(held: dict[str, bytes], history: list[tuple[object, ...]]) -> None:
    with world(held, []) as made:
        report = done(made, history, lambda name: errno.EPERM if name == "link" else 0)
        assert not failed(report)
        check(made, report, is_late=False)


HISTORY = [
    ("write", "a", b"one"),
    ("write", "d/b", b"two"),
    ("link", "e", "a"),
    *[("upload", name) for name in ("a", "d/b", "e")],
    ("save", "a", b"three"),
    ("upload", "a"),
    ("remove", "d/b"),
    ("rename", "b", "d/a"),
    ("remove", "e"),
]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_lost_reply_is_no_error(has_links: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "WAITS_S", ())
    for lost in range(100):
        calls: list[str] = []

        def failing(name: str, lost: int = lost, calls: list[str] = calls) -> int:
            if name == "link" and not has_links:
                return errno.EPERM
            if name not in LOST or name == "mkdir":  # such a directory is taken for one that was there: it stays
                return 0
            calls.append(name)
            return LOST[name] if len(calls) == lost else 0

        with world({"b": b"held", "d/c": b"held"}, []) as made:
            with on(made, failing):
                made.do(HISTORY)
                report = made.end()
            assert not report.left, (lost, calls)
            check(made, report, is_late=False)
        if len(calls) < lost:
            break
    assert set(calls) >= {"link" if has_links else "rename", "rename", "unlink", "symlink"}


faults = st.dictionaries(
    st.integers(0, 150), st.sampled_from([errno.ESTALE, errno.EIO, errno.EDQUOT, errno.ENOSPC]), max_size=10
)


@SLOW
@given(held=helds, history=histories, plan=faults)
def test_what_fails_now_and_then_is_named_and_comes_later(
    held: dict[str, bytes], history: list[tuple[object, ...]], plan: dict[int, int]
) -> None:
    with world(held, []) as made:
        report = done(made, history, planned(plan))
        check(made, report, is_late=bool(failed(report)), is_swept=not failed(report))
        again = made.late()
        assert not failed(again)
        check(made, again, is_late=True)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOSPC])
def test_names_that_are_exchanged_lose_nothing_where_one_call_fails(number: int) -> None:
    for at in range(60):
        with world({"a": b"one", "e/a": b"two"}, []) as made:
            done(made, [("exchange", "a", "e/a")], planned({at: number}))
            check(made, made.late(), is_late=True)


def test_a_copy_whose_temporary_name_could_not_go_is_known_when_the_next_one_fails() -> None:
    calls: list[str] = []

    def failing(name: str) -> int:
        calls.append(name)
        is_first = calls.count(name) == {"unlink": 1, "rename": 1}.get(name)
        return errno.ESTALE if is_first else 0

    with world({}, []) as made:
        report = done(made, [("write", "a", b"one")], failing)
        assert calls.count("rename") == 1
        assert not report.beside
        check(made, report, is_late=False)


@SLOW
@given(held=helds, history=histories, number=st.sampled_from(sorted(REFUSED)), after=st.integers(0, 60))
def test_a_target_that_is_read_only_or_full_from_some_time_on_gets_all_later(
    held: dict[str, bytes], history: list[tuple[object, ...]], number: int, after: int
) -> None:
    count = iter(range(1 << 30))

    def failing(name: str) -> int:
        if next(count) < after or name == "lstat" or (number == errno.EDQUOT and name in {"unlink", "rmdir", "open"}):
            return 0
        return number

    with world(held, []) as made:
        report = done(made, history, failing)
        check(made, report, is_late=True, is_swept=False)
        again = made.late()
        assert not failed(again)
        check(made, again, is_late=True)


@pytest.mark.parametrize("history", [[("exchange", "e/a", "d")], [("clear", "d"), ("write", "d", b"")]])
def test_what_got_a_place_beside_before_the_target_failed_is_told(history: list[tuple[object, ...]]) -> None:
    for after in range(60):
        count = iter(range(1 << 30))

        def failing(name: str, after: int = after, count: Iterator[int] = count) -> int:
            return errno.EROFS if next(count) >= after and name != "lstat" else 0

        with world({"a": b"", "d/a": b"", "e/a": b""}, []) as made:
            check(made, done(made, history, failing), is_late=True, is_swept=False)
            again = made.late()
            assert not failed(again)
            check(made, again, is_late=True)
