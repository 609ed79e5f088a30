"""Files that programs write through memory maps: what is stored arrives, whatever the file system notes of it."""
# ruff: noqa: F811  fixtures are imported

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from draining import Running, start, tree  # noqa: F401

from hpcstage.outputs import seen
from hpcstage.outputs.facts import SeenEvent, SeenKind
from hpcstage.outputs.late import drain_late

ARRAY = """
import os, numpy as np
array = np.lib.format.open_memmap("array.npy", mode="w+", shape=(500,), dtype="int64")
os.closerange(3, 64)  # Python's map keeps a descriptor, those of other languages do not
array[:250] = range(1, 251)
array[250:] = -1
"""
LAST_SAMPLES = """
for sample in range(250, 500):
    array[sample] = sample + 1
array.flush()
"""


class Program:
    """A process in the watched directory that does what it is told; the test itself must not map the files: the
    carrying process is forked from it."""

    def __init__(self, directory: Path) -> None:
        loop = "import sys\nfor line in sys.stdin: exec(eval(line)); print(flush=True)"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([sys.executable, "-c", loop], cwd=directory, text=True, **pipes)

    def __call__(self, code: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(repr(code), file=self.process.stdin, flush=True)
        assert self.process.stdout.readline(), "the program failed"

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture(params=["disk", "memory"])
def running(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A drain on a file system that notes the first store into a clean page, or on tmpfs."""
    tmp_path, local_dir = request.getfixturevalue("tmp_path"), request.getfixturevalue("local_dir")
    monkeypatch.setattr(seen, "OPEN_S", 0.1)
    local = {"disk": tmp_path / "local", "memory": local_dir}[request.param]
    made = Running(local, tmp_path / "results")
    yield made
    made.stop()


@pytest.fixture
def program(running: Running) -> Iterator[Program]:
    made = Program(running.out)
    yield made
    made.end()


def same(running: Running, name: str) -> bool:
    return (running.target / name).exists() and (running.target / name).read_bytes() == (
        running.out / name
    ).read_bytes()


@pytest.mark.parametrize("ends", ["closed", "exited"])
def test_samples_that_are_stored_one_after_the_other_arrive(running: Running, program: Program, ends: str) -> None:
    """The file is copied in between, and the stores after that are into a page that was changed already."""
    program(ARRAY)
    running.until(lambda: same(running, "array.npy"))
    running.settle()
    program(LAST_SAMPLES)
    if ends == "closed":
        program("del array")
    else:
        program.end()
    assert running.end().undrained == []
    assert same(running, "array.npy")


def test_results_that_are_stored_when_everything_is_killed_are_copied_late(running: Running, program: Program) -> None:
    program(ARRAY)
    running.until(lambda: same(running, "array.npy"))
    running.settle()
    running.stop()
    program(LAST_SAMPLES)
    program.end()
    report = drain_late(running.place, 60.0)
    assert report is not None
    assert (report.undrained, report.findings.beside) == ([], {})
    assert same(running, "array.npy")
    again = drain_late(running.place, 60.0)
    assert again is not None
    assert again.files == 0, "what is equal is not copied again"


def test_a_store_after_a_read_of_a_closed_file_arrives(running: Running, program: Program) -> None:
    """On tmpfs it leaves no time, and the end of the map an event."""
    (running.out / "array.npy").write_bytes(b"\0" * 8192)
    running.until(lambda: same(running, "array.npy"))
    running.settle()
    program("import numpy as np\narray = np.memmap('array.npy', mode='r+')\nassert array[0] == 0\narray[0] = 7")
    program("del array")
    assert running.end().undrained == []
    assert same(running, "array.npy")


@pytest.mark.parametrize("how", ["killed", "events lost"])
def test_a_store_that_nobody_saw_arrives(running: Running, program: Program, how: str) -> None:
    (running.out / "array.npy").write_bytes(b"\0" * 8192)
    running.until(lambda: same(running, "array.npy"))
    running.settle()
    program("import numpy as np\narray = np.memmap('array.npy', mode='r+')\nassert array[0] == 0")
    if how == "killed":
        running.stop()
    program("array[0] = 7\ndel array")
    if how == "killed":
        report = drain_late(running.place, 60.0)
        assert report is not None
        assert (report.undrained, report.findings.beside) == ([], {})
    else:
        while running.drain._watch._queue.read():
            pass
        running.drain._take(SeenEvent(SeenKind.MISSED), 0.0)
        running.end()
    assert same(running, "array.npy")


def test_no_half_of_a_mapped_file_takes_the_place_of_a_complete_one(running: Running, program: Program) -> None:
    (running.out / "best.npy").write_text("complete")
    running.until(lambda: same(running, "best.npy"))
    program(ARRAY)
    running.until(lambda: same(running, "array.npy"))
    running.settle()
    program(LAST_SAMPLES + "import os\nos.rename('array.npy', 'best.npy')")
    complete = {b"complete", (running.out / "best.npy").read_bytes()}
    shown = set()
    running.until(lambda: shown.add((running.target / "best.npy").read_bytes()) or same(running, "best.npy"))
    assert shown <= complete
    program.end()
    running.end()
    assert tree(running.target) == tree(running.out)


@pytest.mark.parametrize(
    ("begins", "goes_on", "ends"),
    [
        pytest.param(
            "import h5py\nfile = h5py.File('store.h5', 'w')\ndata = file.create_dataset('x', (99,))\nfile.flush()",
            "data[:] = range(99)",
            "file.close()",
            id="h5py",
        ),
        pytest.param(
            "import lmdb\nenv = lmdb.open('lmdb', writemap=True, map_size=1 << 20, sync=False)\n"
            "with env.begin(write=True) as all: all.put(b'0', b'0')",
            "for i in range(99):\n with env.begin(write=True) as all: all.put(b'%d' % i, b'%d' % -i)",
            "env.close()",
            id="lmdb",
        ),
        pytest.param(
            "import sqlite3\nbase = sqlite3.connect('base.db', isolation_level=None)\n"
            "base.execute('pragma journal_mode=wal')\nbase.execute('pragma mmap_size=1048576')\n"
            "base.execute('create table t (x)')",
            "for i in range(99): base.execute('insert into t values (?)', (i,))",
            "base.close()",
            id="sqlite",
        ),
    ],
)
def test_stores_of_libraries_arrive(running: Running, program: Program, begins: str, goes_on: str, ends: str) -> None:
    program(begins)
    running.until(lambda: tree(running.target).keys() == tree(running.out).keys())
    running.settle()
    program(goes_on)
    program(ends)
    assert running.end().undrained == []
    assert tree(running.target) == tree(running.out)


def test_an_ordinary_file_is_not_looked_into_again(
    start: Callable[..., Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start()
    for number in range(100):
        (running.out / f"{number}").write_text("content")
    running.until(lambda: len(os.listdir(running.target)) == 100)
    running.settle()
    monkeypatch.setattr(running.drain, "_give", lambda *_: pytest.fail("a look at the times is enough"))
    running.drain.end(0.0)
    while running.drain._last_look is not None:
        running.drain.work(0.0)
    assert all(entry.is_sealed for entry in running.drain._ledger.entries.values())
