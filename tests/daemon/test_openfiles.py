"""What processes have open, as /proc tells."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from hpcstage.daemon.copying import openfiles
from hpcstage.daemon.copying.openfiles import in_turn, open_below


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
