"""What the daemon does beside its loop: forked helpers that may hang, fail or say nothing."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from hpcstage.forked import Helpers

PATIENCE_S = 120.0


@pytest.fixture
def helpers():
    made = Helpers()
    yield made
    made.close()


def started(helpers: Helpers, said: list[bytes | None]) -> psutil.Process:
    """The process of a helper that never ends."""
    before = set(psutil.Process().children())
    assert helpers.start("hangs", forever, said.append) is not None
    (child,) = set(psutil.Process().children()) - before
    return child


def forever() -> bytes:
    while True:
        signal.pause()


def raises() -> bytes:
    raise OSError("as the disk does")


def test_what_it_returns_is_handed_over(helpers: Helpers) -> None:
    said: list[bytes | None] = []
    for number, work in enumerate((lambda: b"", lambda: b"much" * 100_000, raises)):
        assert helpers.start(str(number), work, said.append) is not None
        assert helpers.wait(str(number), PATIENCE_S)
    assert said == [b"", b"much" * 100_000, None]
    assert not helpers.names()


def test_one_that_gives_way_is_the_nicest(helpers: Helpers) -> None:
    said: list[bytes | None] = []
    for name, gives_way in (("hurries", False), ("gives way", True)):
        assert helpers.start(name, lambda: b"%d" % os.nice(0), said.append, gives_way=gives_way) is not None
        assert helpers.wait(name, PATIENCE_S)
    assert said == [b"%d" % os.nice(0), b"19"]


def test_one_of_a_name_at_a_time(helpers: Helpers) -> None:
    assert helpers.start("one", forever, lambda _: None) is not None
    assert helpers.start("one", forever, lambda _: None) is None
    assert helpers.start("other", forever, lambda _: None) is not None


def test_one_that_is_stopped_says_that_it_has_ended(helpers: Helpers) -> None:
    said: list[bytes | None] = []
    child = started(helpers, said)
    assert helpers.start("other", forever, said.append) is not None
    helpers.stop("hangs")
    helpers.stop("unknown")
    assert helpers.wait("hangs", PATIENCE_S)
    assert said == [None]
    assert not child.is_running()
    assert helpers.names() == ["other"]


def test_one_that_hangs_is_waited_for_no_longer_than_said(helpers: Helpers) -> None:
    said: list[bytes | None] = []
    child = started(helpers, said)
    assert not helpers.wait("hangs", 0.05)
    assert helpers.names() == ["hangs"]
    helpers.close()
    assert not child.is_running()
    assert not said


def test_a_helper_that_is_killed_failed(helpers: Helpers) -> None:
    said: list[bytes | None] = []
    started(helpers, said).kill()
    assert helpers.wait("hangs", PATIENCE_S)
    assert said == [None]


def test_nobody_is_waited_for_that_does_not_run(helpers: Helpers) -> None:
    assert helpers.wait("nobody", 0.0)
