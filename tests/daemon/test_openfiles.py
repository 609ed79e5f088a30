"""What processes have open, as /proc tells."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcstage.daemon.copying import openfiles, sightings
from hpcstage.daemon.copying.openfiles import in_turn, open_below
from hpcstage.daemon.copying.sightings import Sightings
from hpcstage.forked import Helpers
from hpcstage.plan.dataset.datasets import resolve
from hpcstage.plan.dataset.scan import scan


def test_open_and_mapped_files_below_a_directory(tmp_path: Path) -> None:
    inside, outside = tmp_path / "data", tmp_path / "data2"
    for directory in (inside, outside):
        directory.mkdir()
        for name in ("open", "mapped", "closed", "un linked"):
            (directory / name).write_bytes(b"some")
    with (inside / "open").open("rb"), (outside / "open").open("rb"):
        kept = []
        for path in (inside / "mapped", outside / "mapped", inside / "un linked"):
            with path.open("rb") as file:
                kept.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        (inside / "un linked").unlink()
        found = open_below([os.getpid(), 2**22 + 1], [os.fsencode(inside)])
        for mapped in kept:
            mapped.close()
    assert found == {os.fsencode(inside / name) for name in ("open", "mapped", "un linked")}


def test_of_many_processes_some_at_a_time(monkeypatch) -> None:
    mine = [os.getpid(), os.getppid(), 1]
    monkeypatch.setattr(openfiles, "MOST_PROCESSES", 2)
    last, seen = in_turn([*mine, 2**22 + 1], 0)
    assert seen == sorted(mine)[:2]
    last, seen = in_turn(mine, last)
    assert seen[0] == sorted(mine)[2]
    assert in_turn([], last) == (0, [])


def test_a_first_sight_is_soon_confirmed_however_long_looks_take(
    make_tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sightings, "MOST_TIME_SHARE", 1e-9)
    root = make_tree(files=1, size_bytes=4096)
    (path,) = (path for path in root.rglob("*") if path.is_file())
    helpers = Helpers()
    seen = Sightings(helpers, scan(resolve([os.fspath(root)], root)).manifest, lambda: 0)

    def look(now: float) -> set[int] | None:
        return seen.look(lambda: [os.getpid()], (), (), now)

    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            found = [look(now) for now in (10.0, 10.4, 10.5, 60.0)]
    finally:
        seen.close()
        helpers.close()
    assert found == [{0}, None, {0}, None]


def test_a_look_that_was_kept_from_the_processor_is_followed_soon(make_tree: Callable[..., Path]) -> None:
    """It took long and cost little."""
    root = make_tree(files=1, size_bytes=4096)
    helpers = Helpers()
    seen = Sightings(helpers, scan(resolve([os.fspath(root)], root)).manifest, lambda: 0)

    def programs() -> list[int]:
        threading.Event().wait(0.5)
        return []

    try:
        found = [seen.look(programs, (), (), now) for now in (10.0, 30.0)]
    finally:
        seen.close()
        helpers.close()
    assert found == [set(), set()]
